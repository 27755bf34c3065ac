"""Say in sentences what filled a device, and what to do about it; the tables of ``memprof --plan``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cs336sys.allocations.causes import Moment
from cs336sys.allocations.diagnosis import MemoryDiagnosis, longest_batch
from cs336sys.commands.memprof.tables import identity_columns, say_memory
from cs336sys.findings import Finding
from cs336sys.results.model import Cell
from cs336sys.tables.saved import measured_cells
from cs336sys.tables.table import Column, Table, named_columns, with_rows
from cs336sys.tables.titles import failure_notes

_MOST_CATEGORIES = 3

# As tables and pages call them.
CERTAINTIES = {"measured": "proved", "looks like": "looks like"}


@dataclass(frozen=True)
class Verdict:
    """The sentences on a snapshot.

    Attributes:
        event: the allocation that failed, and the memory held then; without a cause, why none is known.
        advice: what to do where there is no cause.
    """

    diagnosis: MemoryDiagnosis
    event: str
    causes: Sequence[Finding]
    advice: str = ""

    @property
    def sentence(self) -> str:
        if not self.causes:
            return f"{self.event} {self.advice}".rstrip()
        text = "; also, ".join(f"{say_memory('why', cause)}: {say_memory('remedy', cause)}" for cause in self.causes)
        return f"{self.event} {text[0].upper()}{text[1:]}."


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[Verdict]:
    """Return the verdict on each snapshot: on those that failed first, then on those that hold the most."""
    longest = longest_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda diagnosis: (diagnosis.moment.failure is None, -diagnosis.size))
    result = []
    for diagnosis in ordered:
        causes = list(diagnosis.causes)
        # The comparison with other ranks replaces that with this rank's own earlier steps.
        if longest is not None and longest.where == diagnosis.name:
            causes = [*(cause for cause in causes if cause.cause != "longer batch"), longest]
        causes.sort(key=lambda cause: cause.certainty != "measured")  # Proved causes first.
        event, advice = _event(diagnosis), ""
        # Say why no cause is known, unless the device holds nothing, or memprof itself recorded a step that went well.
        if not causes and diagnosis.kinds and not diagnosis.moment.inference.is_recorded:
            reason = next(reason for reason, test in _NO_CAUSE.items() if test(diagnosis.moment))
            event += " " + say_memory("no cause", cause=reason, kind=diagnosis.kinds[0])
            advice = say_memory("no cause remedy", cause=reason)
        result.append(Verdict(diagnosis, event, causes, advice))
    return result


def _event(diagnosis: MemoryDiagnosis) -> str:
    """Say which allocation failed, where, and which categories held the memory then."""
    failure = diagnosis.moment.failure
    sizes = sorted(((size, category) for category, size in diagnosis.by_category.items() if size), reverse=True)
    return say_memory(
        "event",
        requested=None if failure is None else failure.size,
        failed_at=diagnosis.failed_at,
        has_stacks=diagnosis.moment.record.has_stacks,
        live_bytes=diagnosis.size,
        largest=[(category, size) for size, category in sizes[:_MOST_CATEGORIES]],
    )


# Why there is no cause: the first whose test holds.
_NO_CAUSE: dict[str, Callable[[Moment], bool]] = {
    "no history": lambda moment: not moment.record.last_position,
    "no stacks": lambda moment: not moment.record.has_stacks,
    # As many as growth is proved by.
    "no growth": lambda moment: len(moment.inference.steps) >= 3,
    # The record begins with the device's first allocation.
    "first step": lambda moment: (
        moment.failure is not None and not moment.inference.steps and all(block.start for block in moment.record.blocks)
    ),
    "few steps": lambda moment: True,
}


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """Build the tables of the answer, of the plan step by step, and of each change by itself."""
    identity = identity_columns(cells)
    planned = measured_cells(cells)
    answers = []
    for cell in cells:
        row = cell.configuration | {"status": None if cell.status == "ok" else cell.status}
        if cell.status == "ok":
            row |= {"answer": say_memory("plan answer", **cell.derived), "command": cell.derived.get("command")}
        answers.append(row)
    columns = (*identity, *named_columns("answer", "command", "status"))
    facts = {"is_formula": all(cell.derived["by_formula"] for cell in planned)}
    notes = [say_memory("plan origin", **facts), say_memory("plan order"), say_memory("no offloading")]
    if any("model" in cell.configuration for cell in planned):
        notes.append(say_memory("no fsdp"))
    notes += failure_notes(cells)
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
