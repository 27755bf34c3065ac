"""The answer to a part of a problem: the commands' tables, and a template's sentences about their rows."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.accounting.derivation import Derived
from cs336sys.commands.report.evidence import PLAIN, Evidence, Selection, Settings, joined_selection
from cs336sys.commands.report.problem import Handout
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import ratio, same_within
from cs336sys.tables.answers import answers_table
from cs336sys.tables.numbers import format_number, format_quantity
from cs336sys.tables.table import Table, named_columns

if TYPE_CHECKING:
    from jinja2 import Environment

OfHandout = Callable[[Handout], Settings]
Rows = Sequence[Mapping[str, Any]]


def join_text(parts: Iterable[Any], conjunction: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *others, last = [str(part) for part in parts] or [""]
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def times(value: float) -> str:
    """A factor in three digits, ``2.10x``; ``4x`` where it is exactly that."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}x"
    return f"{value:#.3g}x".replace(".x", "x")


def compare_speed(before: Samples, after: Samples) -> str:
    """Return how much faster ``after`` is, as far as the samples can tell: ``1.28x as fast``."""
    speedup = ratio(before, after)
    if speedup.is_undecided:
        return f"undecided; about {speedup.to_decide} steps would decide"
    if speedup.is_noise:
        return f"the {same_within(speedup.low, speedup.high)}"
    bound = speedup.low if speedup.low > 1 else speedup.high
    faster = bound if speedup.is_bound else speedup.estimate
    # Beyond the noise, a difference is one however small; three digits show half a percent.
    exact = f"{times(faster)} as fast" if faster > 1 else f"{times(1 / faster)} slower"
    return "at least " * speedup.is_bound + (exact if abs(faster - 1) > 0.005 else "as fast within 0.5 %")


def trend(values: Sequence[float | Samples]) -> str:
    """``grows``, ``falls``, or neither; samples grow where the noise does not explain it."""

    def step(before: Any, after: Any) -> int:
        if isinstance(before, Samples) and ratio(after, before).is_noise:
            return 0
        first, second = (value.median if isinstance(value, Samples) else value for value in (before, after))
        return (second > first) - (second < first)

    steps = {step(*pair) for pair in pairwise(values)}
    return "grows" if steps == {1} else "falls" if steps == {-1} else "neither grows nor falls steadily"


def _spread(values: Sequence[float], unit: str = "times") -> str:
    """``between 1.2x and 1.9x``, or the one value if all are shown alike."""
    low, high = _WORDS[unit](min(values)), _WORDS[unit](max(values))
    return low if low == high else f"between {low} and {high}"


# Filters of templates: of one value, joined for a list; then those of a list.
_WORDS: dict[str, Callable[[Any], str]] = {
    **{unit: partial(format_quantity, unit=unit) for unit in ("ms", "bytes", "decimal_bytes")},
    "times": times,
    "gib": lambda gib: format_quantity(gib, "gib" if abs(gib) >= 0.1 or gib == 0 else "gib as mib"),
    "signed_gib": lambda gib: f"{'+' if gib > 0 else ''}{_WORDS['gib'](gib)}",
    "us": lambda us: format_quantity(us, "us") if us < 1e3 else format_quantity(us / 1e3, "ms"),
    "percent": lambda value: f"{value:.2g} %" if abs(value) < 1 else f"{format_number(value, 'percent')} %",
    "deviation": lambda samples: 100 * samples.std / samples.mean,
    "calls": lambda count: f"{count:g} call{'s' * (count != 1)}",
    "plural": lambda count: "s" * (count != 1),
}


def _of_each(word: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: join_text(map(word, value)) if isinstance(value, list | tuple) else word(value)


def where(rows: Iterable[Mapping[str, Any]], **settings: Any) -> list[Mapping[str, Any]]:
    """The rows with these values."""
    return [row for row in rows if settings.items() <= {name: row.get(name) for name in settings}.items()]


def longest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of each size's longest context."""
    rows = list(rows)
    return [row for row in rows if row["context"] == max(other["context"] for other in where(rows, size=row["size"]))]


@cache
def templates() -> "Environment":
    """The templates of all problems, with the filters and functions that their sentences use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context

    loader = PackageLoader("cs336sys.commands.report", "problems")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {name: _of_each(word) for name, word in _WORDS.items()}
    environment.filters |= {"spread": _spread, "trend": trend, "listed": join_text, "where": where, "longest": longest}
    called = pass_context(lambda context, size: _of_each(context["handout"].called)(size))
    shape = pass_context(lambda context, row: f"{context['handout'].called(row['size'])} at context {row['context']}")
    environment.filters |= {"called": called, "shape": shape}
    environment.globals |= {"compare_speed": compare_speed, "ratio": ratio, "each": _each}
    return environment


def _each(items: Iterable[Any], caller: Callable[[Any], str]) -> str:
    """Join what a block makes of each, ``{% call(row) each(rows) %}``."""
    return join_text([caller(item).strip() for item in items])


@dataclass
class Answer:
    """The sentences of a part, and the cells of one machine that they are about.

    Attributes:
        sentences: computed from the numbers; a part without sentences and tables has no answer.
        runs: that measured what the sentences say; none for what follows from arithmetic.
        missing: what is asked and was not measured.
        machine: where the cells were measured, with the environment that changes results; empty for arithmetic.
        commands: that measured them, or that print the arithmetic.
    """

    evidence: Evidence
    handout: Handout
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    machine: str = ""
    commands: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.find, self.find_each = self.evidence.find, self.evidence.find_each

    def write(self, name: str, /, **facts: Any) -> None:
        """Add the sentences of the template block ``problem.part``, those that begin with ``Missing:`` to what lacks.

        Raises:
            LookupError: the template names a fact that is not there.
        """
        from jinja2 import UndefinedError

        file, _, block = name.partition(".")
        template = templates().get_template(f"{file}.jinja")
        try:
            text = "".join(template.blocks[block](template.new_context({"handout": self.handout, **facts})))
        except UndefinedError as error:
            raise LookupError(str(error)) from error
        for sentence in (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()):
            written = self.missing if sentence.startswith("Missing: ") else self.sentences
            if (wording := sentence.removeprefix("Missing: ")) not in written:
                written.append(wording)

    def _label(self, label: str, settings: Mapping[str, Any]) -> str:
        """Fill a label with settings; ``{called}`` is the handout's name of a size."""
        return label.format_map({**settings, "called": self.handout.called(settings.get("size", ""))})

    def lack_unmeasured(self, label: str, rows: Iterable[Mapping[str, Any]], grid: Settings) -> None:
        """Say which points of a grid of settings no row has."""
        measured = {tuple(row[key] for key in grid) for row in rows} if grid else {()}
        points = [point for point in product(*grid.values()) if point not in measured]
        self.missing += [self._label(label, dict(zip(grid, point, strict=True))) for point in points]

    def write_failures(self, cells: Iterable[Cell], label: str) -> None:
        """Write a sentence for each status that is none of success: which cells, by their filled label."""
        failed = [cell for cell in cells if cell.status != "ok"]
        for status in dict.fromkeys(cell.status for cell in failed):
            names = [self._label(label, cell.configuration) for cell in failed if cell.status == status]
            self.write("common.failures", status=status, names=list(dict.fromkeys(names)))

    def derive(self, answers: Sequence[Derived], table: str, title: str) -> None:
        """Add derived values as a table, each with its formula and reason."""
        self.tables.append(answers_table(table, title, answers))

    def measured_by(self, groups: Iterable[Selection]) -> None:
        """Name the invocations that measured the cells, each once."""
        self.runs |= {run.run_id: run for group in groups for run in group.invocation.runs[-1:]}

    def show(
        self,
        groups: Sequence[Selection],
        table: str,
        *columns: str,
        medians: bool = False,
        join: bool = False,
        keep: Callable[[Rows], Rows] = list,
    ) -> None:
        """Add the command's own table: its settings and these columns, or all columns.

        Args:
            medians: of samples, as the sentences have them, in place of means with standard deviations.
            join: the groups' cells into one table, whose settings that differ become columns; not for commands that
                compare the cells of an invocation.
            keep: chooses the rows that are shown.
        """
        for group in [joined_selection(groups)] if join and groups else groups:
            for selected in group.tables(table, *columns):
                shown = replace(selected, rows=keep(selected.rows))
                self.tables += [of_medians(shown) if medians else shown] if shown.rows else []
        self.measured_by(groups)

    def show_compared(
        self, rows: Sequence[dict], table: str, title: str, settings: Sequence[str], phases: Sequence[str], *last: str
    ) -> None:
        """Add a table of :func:`compared` rows with these columns ``last``, and name the invocations.

        Args:
            settings: columns that tell rows apart; a sentence for each value of the first says where it is faster.
        """
        keys = [*settings, *(f"{phase}_{end}" for phase in phases for end in ("before_ms", "ms", "speedup")), *last]
        columns = named_columns(**{key: "faster" if key.endswith("_speedup") else "" for key in keys})
        self.tables.append(Table(table, title, columns, rows))
        self.measured_by(row["group"] for row in rows)
        self.write("common.compared", rows=rows, by=settings[0], phases=phases)

    def draw(self, groups: Iterable[Selection], *names: str) -> None:
        """The pictures of all groups (of these names, if any is given), numbered where several have one of a name."""
        for group in groups:
            for name, draw in group.pictures(*names).items():
                number = 1 + sum(picture.split(",")[0] == name for picture in self.pictures)
                self.pictures[name if number == 1 else f"{name}, {number}"] = draw


def of_medians(table: Table) -> Table:
    """A table with medians in place of means and standard deviations, as the sentences next to it have them."""
    rows = [
        {key: value.median if isinstance(value, Samples) and value.measured else value for key, value in row.items()}
        for row in table.rows
    ]
    notes = [note.replace("mean ± standard deviation", "medians") for note in table.notes]
    return replace(table, rows=rows, notes=notes)


def facts_of(cell: Cell) -> dict[str, Any]:
    """A cell's settings, columns and samples under one name each."""
    return {"status": cell.status, **cell.configuration, **cell.derived, **cell.samples}


def measured(
    command: str,
    block: str,
    tables: Mapping[str, Sequence[str]],
    *,
    wanted: OfHandout = lambda handout: {},
    required: Settings = PLAIN,
    grid: OfHandout = lambda handout: {},
    label: str = "{called}",
    medians: bool = False,
    draws: bool = False,
    keep: Callable[[Rows], Rows] = list,
    only: Callable[[Cell], Any] = lambda cell: True,
    facts: Callable[[Answer, list[Selection]], Mapping[str, Any] | None] = lambda answer, groups: {},
) -> Callable[[Answer], None]:
    """Answer with a command's cells: its tables with some columns, and a block of a template.

    The block, if any, gets ``cells``, all that were ``tried``, and ``rows`` of the command's tables by name.

    Args:
        wanted, required: settings of the cells, as :meth:`Evidence.find` takes them.
        grid: settings of which every combination is asked for; ``label`` names a combination.
        medians, keep: as :meth:`Answer.show` takes them.
        draws: whether the command's pictures are shown.
        only: whether a cell is taken.
        facts: more for the block, from the cells by invocation; without them there is no answer.
    """

    def answered(answer: Answer) -> None:
        selections = [group.only(only) for group in answer.find(command, wanted(answer.handout), **required)]
        groups = [group for group in selections if group.cells]
        extra = facts(answer, groups) if groups else None
        if extra is None:
            return
        for table, columns in tables.items():
            answer.show(groups, table, *columns, medians=medians, join=True, keep=keep)
        answer.measured_by(groups)
        answer.draw(groups if draws else ())
        joined = joined_selection(groups)
        tried = list(map(facts_of, joined.cells))
        if block:
            answer.write(block, **{"cells": where(tried, status="ok"), "tried": tried, "rows": joined.rows, **extra})
        answer.lack_unmeasured(label, tried, grid(answer.handout))

    return answered


# Settings that a cell shares with the one that it is compared with.
_SHARED = ("size", "mode", "context", "head_dim", "dtype", "precision", "compile", "implementation")

# A speed-up whose interval is wider, its high end over its low end, rests on few samples and is no extreme.
_SURE = 1.25


def compared(
    groups: Iterable[Selection], setting: str, base: Any, phases: Sequence[str], *order: str
) -> list[dict[str, Any]]:
    """Compare cells with those of their own invocation that have the base value of a setting.

    Returns:
        rows in this order of settings, each with its ``group`` and, by phase, the columns ``PHASE_before_ms``,
        ``PHASE_ms`` and ``PHASE_speedup``, an interval, and whether this is narrow, ``PHASE_is_sure``. Of what several
        invocations compared the first stands that has samples enough to tell, or else the first.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for group in groups:
        for cell in group.measured:
            names = {name: cell.configuration[name] for name in _SHARED if name in cell.configuration}
            settings = {**names, setting: base}.items()
            before = next((other for other in group.measured if settings <= other.configuration.items()), None)
            if before is None or cell.configuration[setting] == base:
                continue
            row: dict[str, Any] = {**facts_of(cell), "group": group, "undecided": 0, "samples": math.inf}
            for phase in [phase for phase in phases if phase in cell.samples]:
                first, second = before.samples[phase], cell.samples[phase]
                speedup = ratio(first, second)
                row |= {f"{phase}_before_ms": first.median, f"{phase}_ms": second.median, f"{phase}_speedup": speedup}
                row |= {f"{phase}_before_std_ms": first.std, f"{phase}_std_ms": second.std}
                row[f"{phase}_is_sure"] = speedup.high <= _SURE * speedup.low
                row["samples"] = min(row["samples"], len(first.measured), len(second.measured))
                row["undecided"] += speedup.is_undecided
            row["peak_before_gib"] = before.derived.get("peak_gib")
            key = tuple(names.values())
            if key not in rows or row["undecided"] < rows[key]["undecided"]:
                rows[key] = row
    return sorted(rows.values(), key=lambda row: [row[name] for name in order])
