"""Say in sentences what filled a device, and what to do about it; the tables of ``memprof --plan``."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cs336sys.allocations.causes import MemoryCause, Moment
from cs336sys.allocations.diagnosis import MemoryDiagnosis, longer_batch
from cs336sys.commands.memprof.tables import identity_columns
from cs336sys.results.model import Cell
from cs336sys.tables.numbers import format_quantity
from cs336sys.tables.table import Column, Table, named_columns, with_rows
from cs336sys.tables.titles import failure_notes

_LISTED = 3


@dataclass(frozen=True)
class Cause:
    """A cause in words.

    Attributes:
        size: bytes that it holds.
        certainty: ``proved``, or ``looks like``.
    """

    name: str
    certainty: str
    size: int
    why: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """What can be said of a snapshot.

    Attributes:
        event: what was held when what failed; without a cause, why none is known.
        advice: what to do without a cause.
    """

    diagnosis: MemoryDiagnosis
    event: str
    causes: Sequence[Cause]
    advice: str = ""

    @property
    def sentence(self) -> str:
        if not self.causes:
            return f"{self.event} {self.advice}".rstrip()
        text = "; also, ".join(f"{cause.why}: {cause.advice}" for cause in self.causes)
        return f"{self.event} {text[0].upper()}{text[1:]}."


def size_words(size: float) -> str:
    return format_quantity(size, "bytes")


def _cause_in_words(cause: MemoryCause, moment: Moment, others: str) -> Cause:
    text = tomllib.loads((resources.files(__package__) / "causes.toml").read_text())[cause.name]
    expand = "" if moment.free.is_expandable else "; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    sizes = {
        "size": cause.size,
        "step_bytes": cause.step_bytes,
        "largest": moment.free.largest,
        "requested": moment.failure.size if moment.failure else 0,
    }
    facts = vars(cause) | {name: size_words(size) for name, size in sizes.items()}
    facts |= {"code": cause.code or "code without a stack", "others": others, "expand": expand}
    why, advice = text["why"].format_map(facts), text["advice"].format_map(facts)
    if cause.is_proved:
        return Cause(cause.name, "proved", cause.size, why, advice)
    why = f"this looks like {cause.name}, which the snapshot does not prove: {why}"
    return Cause(cause.name, "looks like", cause.size, why, f"{advice}. To decide: {text['decides']}")


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[Verdict]:
    """Return what can be said of each snapshot, the one that failed first."""
    longest = longer_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda diagnosis: (diagnosis.moment.failure is None, -diagnosis.size))
    result = []
    for diagnosis in ordered:
        causes = [_cause_in_words(cause, diagnosis.moment, "all steps before") for cause in diagnosis.causes]
        if longest is not None and longest[0] == diagnosis.name:
            causes = [cause for cause in causes if cause.name != "longer batch"]
            causes.append(_cause_in_words(longest[1], diagnosis.moment, "the other ranks"))
        causes.sort(key=lambda cause: cause.certainty != "proved")
        event, advice = _event(diagnosis), ""
        if not causes and diagnosis.kinds and not diagnosis.moment.inference.is_recorded:
            without_cause, advice = next(texts for test, *texts in _NO_CAUSE if test(diagnosis.moment))
            kind = diagnosis.kinds[0]
            origin = f" from {kind.code}" if kind.code else ""
            largest = f"{kind.count} x {size_words(kind.size)} of {kind.category}{origin}"
            event = f"{event} {without_cause} No cause is proved; the largest kind is {largest}."
        result.append(Verdict(diagnosis, event, causes, advice))
    return result


def _event(diagnosis: MemoryDiagnosis) -> str:
    moment = diagnosis.moment
    sizes = sorted(((size, category) for category, size in diagnosis.by_category.items() if size), reverse=True)
    parts = ", ".join(f"{category} {size_words(size)}" for size, category in sizes[:_LISTED])
    total = size_words(diagnosis.size)
    if moment.failure is None:
        event = f"Nothing failed: the record holds {total} at its peak"
    else:
        backward = " in the backward pass" if moment.record.has_stacks else ""
        where = f" at {diagnosis.failed_at}" if diagnosis.failed_at else backward
        event = f"An allocation of {size_words(moment.failure.size)}{where} failed with {total} held"
    return f"{event}: {parts}." if parts else f"{event}."


_RECORD = "Record with torch.cuda.memory._record_memory_history(stacks='python') from before the model is built."
_SMALLER = "Make the step smaller: a smaller batch, micro-batches, checkpoints; memprof --plan finds the cheapest."
# What can be said of a moment without a cause, the first that holds, and what to do.
_NO_CAUSE: tuple[tuple[Callable[[Moment], bool], str, str], ...] = (
    (lambda moment: not moment.record.length, "Without a history, only what is held is known.", _RECORD),
    (lambda moment: not moment.record.has_stacks, "Without stacks, causes cannot be told.", _RECORD),
    (lambda moment: len(moment.inference.steps) >= 3, "Nothing grew from step to step.", _SMALLER),
    (
        lambda moment: moment.failure is not None and not moment.inference.steps and moment.begins_empty,
        "It failed before the end of the first step, so that no earlier step can have left anything behind: this step "
        "alone does not fit.",
        _SMALLER,
    ),
    (lambda moment: True, "The record holds the ends of too few steps to tell whether memory grows.", _SMALLER),
)


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """The answer first, then the plan step by step, and each change by itself."""
    identity = identity_columns(cells)
    planned = [cell for cell in cells if cell.status == "ok"]
    answers = [
        cell.configuration | {"answer": _plan_answer(cell.derived), "command": cell.derived.get("command")}
        if cell.status == "ok"
        else cell.configuration | {"status": cell.status}
        for cell in cells
    ]
    columns = (*identity, *named_columns("answer", "command", "status"))
    notes = [*_plan_notes(planned), *failure_notes(cells)]
    answer = Table("answer", "what would fit", columns, answers, notes=notes)
    steps = [cell.configuration | step for cell in planned for step in cell.derived["plan"] or ()]
    changes = [cell.configuration | change for cell in planned for change in cell.derived["changes"]]
    common = (Column("peak_bytes", "then holds", "bytes"), *named_columns("cost"))
    identity = (*identity, Column("option", "change"))
    step_columns = (*identity, *common, Column("pytorch", "in PyTorch"))
    change_columns = (*identity, Column("saved_bytes", "saves", "bytes"), *common)
    return [
        answer,
        *with_rows(
            Table("steps", "the plan, one change after another", step_columns, steps),
            Table("changes", "what each change alone would save", change_columns, changes),
        ),
    ]


def _plan_answer(derived: dict[str, Any]) -> str:
    """Say which options make the step fit, or that none is needed or none does."""
    limit, base, plan = (derived[key] for key in ("limit_bytes", "base_bytes", "plan"))
    if plan is None:
        return (
            f"Nothing that is known fits into {size_words(limit)}: the step holds {size_words(base)}, and the least "
            f"of {derived['tried']} combinations {size_words(derived['least_bytes'])}."
        )
    if not plan:
        return f"It fits as it is: {size_words(base)} of {size_words(limit)}."
    names = " ".join(step["option"] for step in plan)
    return (
        f"{names}: {size_words(plan[-1]['peak_bytes'])} in place of {size_words(base)}, under {size_words(limit)}; "
        "without the last of them it does not fit."
    )


def _plan_notes(cells: Sequence[Cell]) -> list[str]:
    by = "formulas" if all(cell.derived["by_formula"] for cell in cells) else "traces of fake tensors"
    notes = [
        f"Predicted by {by}: tensors alone. On a GPU leave some 2 GiB for the CUDA context, workspaces and rounding.",
        "The cheapest plan: the same numbers before recomputation, that before other rounding, more GPUs last.",
        "Not predicted: offloading optimizer state or activations to the CPU "
        "(torch.distributed.fsdp.CPUOffloadPolicy).",
    ]
    if any("model" in cell.configuration for cell in cells):
        notes.append("Not predicted for a model of yours: fsdp (shard --model measures it).")
    return notes
