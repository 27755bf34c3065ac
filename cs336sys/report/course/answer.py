"""The answer to a part of a problem, put together from saved cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cs336sys.accounting.derivation import Derived
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.problem import Handout
from cs336sys.report.course.prose import Prose, derived_sentence, joined
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import ratio

# Units of a column by how its key ends.
_UNITS = {"_ms": "ms", "_gib": "gib", "_speedup": "ratio"}


@dataclass
class Answer:
    """The sentences of a part, and the cells of one machine that they are about.

    Attributes:
        sentences: computed from the numbers; a part that says and shows nothing has no answer.
        tables: trimmed to what is asked.
        pictures: by name, each drawn to a file.
        runs: that measured what the sentences say; none for what follows from arithmetic.
        missing: what is asked and was not measured.
    """

    evidence: Evidence
    handout: Handout
    prose: Prose
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prose.formats["called"] = self.handout.called
        self.find, self.find_each = self.evidence.find, self.evidence.find_each

    def fill(self, name: str, facts: Mapping[str, Any] | None = None, /, **more: Any) -> str:
        """A named sentence of the template with these facts."""
        return self.prose.fill(name, {**(facts or {}), **more})

    def say(self, name: str, facts: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self.sentences.append(self.fill(name, facts, **more))

    def lack(self, name: str, facts: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Say what is missing."""
        self.missing.append(self.fill(name, facts, **more))

    def say_failures(self, cells: Sequence[Cell], name: str | Callable[[Cell], str]) -> None:
        """One sentence for each status that is none of success: which cells, by the named words, and why."""
        name_of = name if callable(name) else lambda cell: name
        for status in ("oom", "unsupported", "timeout", "wrong", "error"):
            failed = [cell for cell in cells if cell.status == status]
            if failed:
                names = joined(dict.fromkeys(self.fill(name_of(cell), cell.configuration) for cell in failed))
                # "a training step" begins the sentence, the name of a size stays as it is.
                names = f"A{names[1:]}" if names.startswith("a ") else names
                reasons = dict.fromkeys(_why(cell.reason) for cell in failed if cell.reason)
                self.say(status, names=names, reasons=f" ({'; '.join(reasons)})" if reasons else "")

    def derive(self, answers: Sequence[Derived], table: str, title: str, say: Iterable[Derived] = ()) -> None:
        """Derived values as sentences, some of those of a table."""
        self.sentences += map(derived_sentence, say)
        self.tables.append(answers_table(table, title, answers))

    def measured_by(self, groups: Iterable[Found]) -> None:
        """Name the invocations that measured the cells, each once."""
        self.runs |= {run.run_id: run for group in groups for run in group.invocation.runs[-1:]}

    def show(self, groups: Sequence[Found], table: str, *columns: str, medians: bool = False) -> None:
        """The command's own table, with these columns alone if any is given, and of samples with their medians."""
        shown = [_with_its_notes(one, whole) for group in groups for one, whole in group.tables(table, *columns)]
        self.tables += map(of_medians, shown) if medians else shown
        self.measured_by(groups)

    def add_table(self, name: str, title: str, headers: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the write-up's own, if it has a row; units follow from the ends of keys."""
        units = {key: next((unit for end, unit in _UNITS.items() if key.endswith(end)), None) for key in headers}
        if rows:
            self.tables.append(Table(name, title, [Column(key, headers[key], units[key]) for key in headers], rows))

    def draw(self, groups: Iterable[Found], *names: str) -> None:
        """The pictures of all groups (of these names, if any is given), numbered where several have one of a name."""
        for group in groups:
            for name, draw in group.pictures(*names).items():
                number = 1 + sum(known.split(",")[0] == name for known in self.pictures)
                self.pictures[name if number == 1 else f"{name}, {number}"] = draw


def _with_its_notes(table: Table, whole: Table) -> Table:
    """A table without what notes say of columns that it has not (``hidden: ...; as it ran: ...``)."""
    there = {column.header for column in table.columns}
    has_speedups = any(column.key.endswith("speedup") for column in table.columns)
    gone = {column.header.split(",")[0] for column in whole.columns if column.header not in there}

    def trimmed(note: str) -> str:
        return "; ".join(part for part in note.split("; ") if part.partition(":")[0] not in gone)

    notes = [note for note in table.notes if has_speedups or not note.startswith("no speed-ups")]
    return replace(table, notes=[kept for note in notes if (kept := trimmed(note))])


def of_medians(table: Table) -> Table:
    """A table with medians in place of means and standard deviations, as the sentences next to it have them."""

    def shown(value: Any) -> Any:
        return value.median if isinstance(value, Samples) and value.measured else value

    rows = [{name: shown(value) for name, value in row.items()} for row in table.rows]
    notes = [note.replace("mean ± standard deviation", "medians") for note in table.notes]
    return replace(table, rows=rows, notes=notes)


def _why(reason: str) -> str:
    """A cell's reason, without what the verb before it says: ``at warm-up 1/5: tried to allocate 82.00 MiB``."""
    said = reason.removeprefix("out of memory ").replace("CUDA out of memory. Tried", "tried")
    return said.rstrip(".")


def compared(before: Cell, after: Cell, phases: Iterable[str]) -> dict[str, Any]:
    """Medians of two cells and how many times as fast the second is, by phase: facts, and a row's values."""
    row: dict[str, Any] = {}
    for phase in phases:
        first, second = before.samples[phase], after.samples[phase]
        facts: dict[str, Any] = {"before": first.median, "after": second.median}
        found = ratio(first, second)
        facts |= {"speedup": found.estimate, "low": found.low, "high": found.high}
        row |= {phase: facts, f"{phase}_before_ms": facts["before"], f"{phase}_ms": facts["after"]}
        row[f"{phase}_speedup"] = facts["speedup"]
    return row


def compared_headers(phases: Iterable[str], before: str, after: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    for phase in phases:
        headers |= {f"{phase}_before_ms": phase + before, f"{phase}_ms": phase + after, f"{phase}_speedup": "faster"}
    return headers
