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
from cs336sys.tables.saved import measured_cells
from cs336sys.tables.table import Column, Table, named_columns, with_rows
from cs336sys.tables.titles import failure_notes

_MOST_CATEGORIES = 3


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
    """The sentences on a snapshot.

    Attributes:
        event: the allocation that failed, and the memory held then; without a cause, why none is known.
        advice: what to do where there is no cause.
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
    """Fill the sentences of causes.toml; ``others`` are those that a longer batch is compared with."""
    sentences = tomllib.loads((resources.files(__package__) / "causes.toml").read_text())[cause.name]
    facts = {
        "size": size_words(cause.size),
        "step_bytes": size_words(cause.step_bytes),
        "steps": cause.steps,
        "ratio": cause.ratio,
        "code": cause.code or "code without a stack",
        "largest": size_words(moment.free.largest),
        "requested": size_words(moment.failure.size if moment.failure else 0),
        "expand": "" if moment.free.is_expandable else "; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "others": others,
    }
    why, advice = sentences["why"].format_map(facts), sentences["advice"].format_map(facts)
    if cause.is_proved:
        return Cause(cause.name, "proved", cause.size, why, advice)
    why = f"this looks like {cause.name}, which the snapshot does not prove: {why}"
    return Cause(cause.name, "looks like", cause.size, why, f"{advice}. To decide: {sentences['decides']}")


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[Verdict]:
    """Return the verdict on each snapshot: on those that failed first, then on those that hold the most."""
    longest_batch = longer_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda diagnosis: (diagnosis.moment.failure is None, -diagnosis.size))
    result = []
    for diagnosis in ordered:
        causes = [_cause_in_words(cause, diagnosis.moment, "all steps before") for cause in diagnosis.causes]
        if longest_batch is not None and longest_batch[0] == diagnosis.name:
            causes = [cause for cause in causes if cause.name != "longer batch"]
            causes.append(_cause_in_words(longest_batch[1], diagnosis.moment, "the other ranks"))
        causes.sort(key=lambda cause: cause.certainty != "proved")
        event, advice = _event(diagnosis), ""
        if not causes and diagnosis.kinds and not diagnosis.moment.inference.is_recorded:
            why_no_cause, advice = next(texts for test, *texts in _NO_CAUSE if test(diagnosis.moment))
            kind = diagnosis.kinds[0]
            origin = f" from {kind.code}" if kind.code else ""
            largest = f"{kind.count} x {size_words(kind.size)} of {kind.category}{origin}"
            event = f"{event} {why_no_cause} No cause is proved; the largest kind is {largest}."
        result.append(Verdict(diagnosis, event, causes, advice))
    return result


def _event(diagnosis: MemoryDiagnosis) -> str:
    """Say which allocation failed, where, and which categories held the memory then."""
    moment = diagnosis.moment
    sizes = sorted(((size, category) for category, size in diagnosis.by_category.items() if size), reverse=True)
    parts = ", ".join(f"{category} {size_words(size)}" for size, category in sizes[:_MOST_CATEGORIES])
    event = f"Nothing failed: the record holds {size_words(diagnosis.size)} at its peak"
    if moment.failure is not None:
        # Where others have a stack, memory without one is the backward pass's.
        in_backward = " in the backward pass" if moment.record.has_stacks else ""
        where = f" at {diagnosis.failed_at}" if diagnosis.failed_at else in_backward
        failed = f"An allocation of {size_words(moment.failure.size)}{where} failed"
        event = f"{failed} with {size_words(diagnosis.size)} held"
    return f"{event}: {parts}." if parts else f"{event}."


_RECORD = "Record with torch.cuda.memory._record_memory_history(stacks='python') from before the model is built."
_SMALLER = "Make the step smaller: a smaller batch, micro-batches, checkpoints; memprof --plan finds the cheapest."
# Why there is no cause, by the first test that holds, and what to do.
_NO_CAUSE: tuple[tuple[Callable[[Moment], bool], str, str], ...] = (
    (lambda moment: not moment.record.last_position, "Without a history, only what is held is known.", _RECORD),
    (lambda moment: not moment.record.has_stacks, "Without stacks, causes cannot be told.", _RECORD),
    (lambda moment: len(moment.inference.steps) >= 3, "Nothing grew from step to step.", _SMALLER),
    (
        # The record begins with the device's first allocation.
        lambda moment: (
            moment.failure is not None
            and not moment.inference.steps
            and all(block.start for block in moment.record.blocks)
        ),
        "It failed before the end of the first step, so that no earlier step can have left anything behind: this step "
        "alone does not fit.",
        _SMALLER,
    ),
    (lambda moment: True, "The record holds the ends of too few steps to tell whether memory grows.", _SMALLER),
)


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """Build the tables of the answer, of the plan step by step, and of each change by itself."""
    identity = identity_columns(cells)
    planned = measured_cells(cells)
    answers = []
    for cell in cells:
        row = cell.configuration | {"status": None if cell.status == "ok" else cell.status}
        if cell.status == "ok":
            row |= {"answer": _plan_answer(cell.derived), "command": cell.derived.get("command")}
        answers.append(row)
    columns = (*identity, *named_columns("answer", "command", "status"))
    notes = [*_plan_notes(planned), *failure_notes(cells)]
    steps = [cell.configuration | step for cell in planned for step in cell.derived["plan"] or ()]
    changes = [cell.configuration | change for cell in planned for change in cell.derived["changes"]]
    option, common = Column("option", "change"), named_columns(peak_bytes="then holds", cost="cost")
    step_columns = (*identity, option, *common, Column("pytorch", "in PyTorch"))
    change_columns = (*identity, option, *named_columns(saved_bytes="saves"), *common)
    return [
        Table("answer", "what would fit", columns, answers, notes=notes),
        *with_rows(
            Table("steps", "the plan, one change after another", step_columns, steps),
            Table("changes", "what each change alone would save", change_columns, changes),
        ),
    ]


def _plan_answer(derived: dict[str, Any]) -> str:
    """Say which options make the step fit, or that none is needed or none does."""
    limit, base, plan = size_words(derived["limit_bytes"]), size_words(derived["base_bytes"]), derived["plan"]
    if plan is None:
        least = f"the least of {derived['tried']} combinations {size_words(derived['least_bytes'])}"
        return f"Nothing that is known fits into {limit}: the step holds {base}, and {least}."
    if not plan:
        return f"It fits as it is: {base} of {limit}."
    options, peak = " ".join(step["option"] for step in plan), size_words(plan[-1]["peak_bytes"])
    return f"{options}: {peak} in place of {base}, under {limit}; without the last of them it does not fit."


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
