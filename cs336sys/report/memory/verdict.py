"""Say in sentences what filled a device, and what to do about it; the tables of ``memprof --plan``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336sys.measure.allocations.diagnosis import Leak, Longer, MemoryDiagnosis, longer_batch
from cs336sys.report.memory.tables import identity_columns
from cs336sys.report.numbers import format_quantity
from cs336sys.report.table import Column, Table, with_rows
from cs336sys.report.titles import reasons
from cs336sys.results.model import Cell

_LISTED = 3


@dataclass(frozen=True)
class Cause:
    """A mistake, or a waste.

    Attributes:
        name: in a word or two: ``leak``.
        size: bytes that it holds.
        why: one clause.
        advice: what to do.
    """

    name: str
    size: int
    why: str
    advice: str

    @property
    def sentence(self) -> str:
        return f"{self.why}: {self.advice}"


def size_words(size: float) -> str:
    return format_quantity(size, "bytes")


def causes(diagnosis: MemoryDiagnosis, longer: Longer | None = None) -> list[Cause]:
    """The mistakes that a snapshot proves, in the order in which to mend them."""
    proved = []
    twice, leak, logits = diagnosis.twice, diagnosis.leak, diagnosis.logits
    if twice is not None:
        why = (
            f"the optimizer's state exists twice, {size_words(twice.held)} more than once, made at {twice.code}",
            "step one optimizer alone, and drop the old one before its state is loaded into another",
        )
        proved.append(Cause("optimizer state twice", twice.held, *why))
    if leak is not None:
        proved.append(_leak_cause(leak))
    if longer is not None and longer.name == diagnosis.name:
        why = (
            f"its activations are {longer.ratio:.3g} times those of the other ranks by the same lines",
            "its batch is longer; pad or pack batches to one length on all ranks, or bound tokens a rank",
        )
        proved.append(Cause("longer batch", max(0, longer.difference), *why))
    free, failure = diagnosis.free, diagnosis.failure
    if free.is_cause and failure is not None:
        expand = "" if free.is_expandable else "; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        pieces = f"{size_words(free.usable)} free in pieces of at most {size_words(free.largest)}"
        why = (f"{pieces}, and {size_words(failure.size)} were asked for", f"fragmentation{expand}")
        proved.append(Cause("fragmentation", free.usable, *why))
    if logits is not None:
        why = (
            f"fp32 copies of half-precision logits take {size_words(logits.held)} ({logits.code})",
            "compute the loss in chunks, or with a fused cross entropy that holds no logits",
        )
        proved.append(Cause("fp32 logits", logits.held, *why))
    return proved


def _leak_cause(leak: Leak) -> Cause:
    grows = f"memory grows by {size_words(leak.step_bytes)} a step from {leak.code or 'code without a stack'}"
    if leak.is_graph:
        return Cause(
            "graph kept",
            leak.held,
            f"{grows}: {leak.steps} steps have left the activations of a whole forward pass behind",
            "something keeps a tensor with its graph, such as a loss in a list; keep loss.item(), or compute it under "
            "torch.no_grad()",
        )
    return Cause(
        "leak",
        leak.held,
        f"{grows}, {size_words(leak.held)} after {leak.steps} steps",
        "something, such as a list, keeps the tensors that this line makes; keep a number, or .detach().cpu()",
    )


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[tuple[MemoryDiagnosis, str, list[Cause]]]:
    """The sentences on each snapshot, the one that failed first: what is held, and why."""
    longer = longer_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda diagnosis: (not diagnosis.is_failed, -diagnosis.held))
    return [
        (diagnosis, _snapshot_verdict(diagnosis, proved), proved)
        for diagnosis in ordered
        for proved in [causes(diagnosis, longer)]
    ]


def _snapshot_verdict(diagnosis: MemoryDiagnosis, proved: Sequence[Cause]) -> str:
    sizes = [(size, category) for category, size in diagnosis.by_category.items() if size]
    sizes.sort(reverse=True)
    parts = ", ".join(f"{category} {size_words(size)}" for size, category in sizes[:_LISTED])
    held_text = size_words(diagnosis.held)
    if diagnosis.failure is None:
        event = f"Nothing failed: the record holds {held_text} at its peak"
    else:
        backward = " in the backward pass" if diagnosis.has_stacks else ""
        where = f" at {diagnosis.failed_at}" if diagnosis.failed_at else backward
        event = f"An allocation of {size_words(diagnosis.failure.size)}{where} failed with {held_text} held"
    first = f"{event}: {parts}." if parts else f"{event}."
    if proved:
        sentences = "; also, ".join(cause.sentence for cause in proved)
        return f"{first} {sentences[0].upper()}{sentences[1:]}."
    if not diagnosis.kinds:
        return first
    kind = diagnosis.kinds[0]
    origin = f" from {kind.code}" if kind.code else ""
    return (
        f"{first} No leak, no copy and no fragmentation is proved; the largest kind is {kind.count} x "
        f"{size_words(kind.size)} of {kind.category}{origin}."
    )


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """The answer first, then the plan step by step, and each change by itself."""
    identity = identity_columns(cells)
    planned = [cell for cell in cells if cell.status == "ok"]
    answers = [cell.configuration | {"status": None if cell.status == "ok" else cell.status} for cell in cells]
    for row, cell in zip(answers, cells, strict=True):
        if cell.status == "ok":
            row["answer"] = _plan_answer(cell.derived)
            row["command"] = cell.derived.get("command")
    columns = (*identity, Column("answer", "answer"), Column("command", "command"), Column("status", "status"))
    notes = [*_plan_notes(planned), *reasons(cells)]
    answer = Table("answer", "what would fit", columns, answers, notes=notes)
    steps = [_change_row(cell, step) for cell in planned for step in cell.derived["plan"] or ()]
    changes = [_change_row(cell, change) for cell in planned for change in cell.derived["changes"]]
    common = (Column("peak_bytes", "then holds", "bytes"), Column("cost", "cost"))
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


def _change_row(cell: Cell, values: dict[str, Any]) -> dict[str, Any]:
    """A row with the cell's settings and a change, whose own setting is told by its option."""
    return cell.configuration | {
        key: values.get(key) for key in ("option", "peak_bytes", "saved_bytes", "cost", "pytorch")
    }
