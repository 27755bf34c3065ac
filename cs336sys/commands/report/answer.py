"""The answer to a part of a problem: the commands' tables, and a template's sentences about their rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.memory import GIB
from cs336sys.commands.report.evidence import PLAIN, Evidence, Selection, Settings, joined_selection
from cs336sys.commands.report.problem import Handout, plain_peak_gib
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import ratio, same_within
from cs336sys.tables.numbers import format_number, format_quantity
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.table import Table, named_columns, paragraphs

if TYPE_CHECKING:
    from jinja2 import Environment

OfHandout = Callable[[Handout], Settings]  # Settings that depend on the year.
Rows = Sequence[Mapping[str, Any]]


def join_text(parts: Iterable[Any], conjunction: str = "and") -> str:
    """Join as ``a``, ``a and b``, or ``a, b and c``."""
    *others, last = [str(part) for part in parts] or [""]
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def times(value: float) -> str:
    """Write a factor in three digits, ``2.10x``; ``4x`` where it is exactly that."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}x"
    return f"{value:#.3g}x".replace(".x", "x")  # 99.97 is written as "100."


def compare_speed(before: Samples, after: Samples) -> str:
    """Return how much faster ``after`` is, as far as the samples can tell: ``1.28x as fast``."""
    speedup = ratio(before, after)
    if speedup.is_undecided:
        return f"undecided; about {speedup.to_decide} steps would decide"
    if speedup.is_noise:
        return f"the {same_within(speedup.low, speedup.high)}"
    # Samples that drift too much for a test give a bound alone: the end of the interval that is nearer to 1.
    end_near_1 = speedup.low if speedup.low > 1 else speedup.high
    factor = end_near_1 if speedup.is_bound else speedup.estimate
    # A difference beyond the noise may still be too small for the three digits of a factor: 1.00x.
    exact = f"{times(factor)} as fast" if factor > 1 else f"{times(1 / factor)} slower"
    return "at least " * speedup.is_bound + (exact if abs(factor - 1) > 0.005 else "as fast within 0.5 %")


def trend(values: Sequence[float | Samples]) -> str:
    """Say whether every value ``grows`` or ``falls`` from the one before; for samples noise is no change."""

    def sign_of_change(before: Any, after: Any) -> int:
        if isinstance(before, Samples):
            if ratio(after, before).is_noise:  # Noise is the same either way round.
                return 0
            before, after = before.median, after.median
        return (after > before) - (after < before)

    signs = {sign_of_change(*pair) for pair in pairwise(values)}
    return "grows" if signs == {1} else "falls" if signs == {-1} else "neither grows nor falls steadily"


def _spread(values: Sequence[float], unit: str = "times") -> str:
    """Write the range ``between 1.2x and 1.9x``, its ends by a filter, or one value if both are written alike."""
    low, high = map(_VALUE_FILTERS[unit], (min(values), max(values)))
    return low if low == high else f"between {low} and {high}"


# Filters of templates that write one value; :func:`_of_each` lets them take a list, too.
_VALUE_FILTERS: dict[str, Callable[[Any], str]] = {
    **{unit: partial(format_quantity, unit=unit) for unit in ("ms", "bytes", "decimal_bytes")},
    "times": times,
    "gib": lambda gib: format_quantity(gib, "gib" if abs(gib) >= 0.1 or gib == 0 else "gib as mib"),
    "bytes_as_gib": lambda count: _VALUE_FILTERS["gib"](count / GIB),
    "signed_gib": lambda gib: f"{'+' if gib > 0 else ''}{_VALUE_FILTERS['gib'](gib)}",
    "us": lambda us: format_quantity(us, "us") if us < 1e3 else format_quantity(us / 1e3, "ms"),
    "percent": lambda value: f"{value:.2g} %" if abs(value) < 1 else f"{format_number(value, 'percent')} %",
    "deviation": lambda samples: 100 * samples.std / samples.mean,
    "calls": lambda count: f"{count:g} call{'s' * (count != 1)}",
    "plural": lambda count: "s" * (count != 1),
}


def _of_each(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a filter that writes one value, or each value of a list, joined."""
    return lambda value: join_text(map(write, value)) if isinstance(value, list | tuple) else write(value)


def where(rows: Iterable[Mapping[str, Any]], **settings: Any) -> list[Mapping[str, Any]]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in settings.items())]


def longest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of each size's longest context."""
    rows = list(rows)
    return [row for row in rows if row["context"] == max(other["context"] for other in where(rows, size=row["size"]))]


@cache
def templates() -> "Environment":
    """Load the templates of all problems, with the filters and functions that their sentences use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context

    loader = PackageLoader("cs336sys.commands.report", "problems")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {name: _of_each(write) for name, write in _VALUE_FILTERS.items()}
    environment.filters |= {"spread": _spread, "trend": trend, "listed": join_text, "where": where, "longest": longest}
    # These name sizes as the handout does, which is a fact of every block.
    called = pass_context(lambda context, size: _of_each(context["handout"].called)(size))
    shape = pass_context(lambda context, row: f"{context['handout'].called(row['size'])} at context {row['context']}")
    environment.filters |= {"called": called, "shape": shape}
    environment.globals |= {"compare_speed": compare_speed, "ratio": ratio, "plain_peak_gib": plain_peak_gib}
    # Joins what the body of {% call(row) each(rows) %} makes of each item.
    environment.globals["each"] = lambda items, caller: join_text(caller(item).strip() for item in items)
    return environment


@dataclass
class Answer:
    """The sentences of a part, and the cells of one machine that they are about."""

    evidence: Evidence
    handout: Handout
    # Computed from the numbers; a part without sentences and tables has no answer.
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    # That measured what the sentences say; none for what follows from arithmetic.
    runs: dict[str, Run] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # What is asked and was not measured.
    machine: str = ""  # Where the cells were measured, with the environment that changes results; empty for arithmetic.
    commands: Sequence[str] = ()  # That measured them, or that print the arithmetic.

    def __post_init__(self) -> None:
        self.find, self.find_each = self.evidence.find, self.evidence.find_each

    def write(self, name: str, /, **facts: Any) -> None:
        """Add the paragraphs that a template block, ``FILE.BLOCK``, makes of the facts, each as one sentence.

        Those that begin with ``Missing:`` are added to what is missing. A LookupError says which fact lacks.
        """
        from jinja2 import UndefinedError

        file, _, block = name.partition(".")
        template = templates().get_template(f"{file}.jinja")
        try:
            written = paragraphs(template, block, {"handout": self.handout, **facts})
        except UndefinedError as error:
            raise LookupError(str(error)) from error
        for sentence in written:
            wording = sentence.removeprefix("Missing: ")
            sentences = self.sentences if wording == sentence else self.missing
            if wording not in sentences:
                sentences.append(wording)

    def _label(self, label: str, settings: Mapping[str, Any]) -> str:
        """Fill in a label's ``{SETTING}``; ``{called}`` is the handout's name of the size."""
        return label.format_map({**settings, "called": self.handout.called(settings.get("size", ""))})

    def lack_unmeasured(self, label: str, rows: Iterable[Mapping[str, Any]], grid: Settings) -> None:
        """Say which combinations of a grid's settings no row has."""
        measured = {tuple(row[key] for key in grid) for row in rows}
        points = [point for point in product(*grid.values()) if point not in measured]
        self.missing += [self._label(label, dict(zip(grid, point, strict=True))) for point in points]

    def write_failures(self, cells: Iterable[Cell], label: str) -> None:
        """Write a sentence for each status but ``ok``, which names its cells by their filled-in label."""
        failed = [cell for cell in cells if cell.status != "ok"]
        for status in dict.fromkeys(cell.status for cell in failed):
            names = [self._label(label, cell.configuration) for cell in failed if cell.status == status]
            self.write("common.failures", status=status, names=list(dict.fromkeys(names)))

    def derive(self, answers: Sequence[Derived], table: str, title: str) -> None:
        """Add derived values as a table, each with its formula and reason."""
        self.tables.append(answers_table(table, title, answers))

    def measured_by(self, groups: Iterable[Selection]) -> None:
        """Name the last runs of the invocations that measured the cells, each once."""
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
        """Add the command's own table of each group: its settings and these columns, or all columns.

        Args:
            medians: show medians of samples, as the sentences do, instead of means with standard deviations.
            join: put the groups' cells into one table, in which settings that differ become columns; not for commands
                that compare the cells of an invocation.
            keep: chooses the rows that are shown.
        """
        for group in [joined_selection(groups)] if join else groups:
            for selected in group.tables(table, *columns):
                shown = replace(selected, rows=keep(selected.rows))
                if shown.rows:
                    self.tables.append(of_medians(shown) if medians else shown)
        self.measured_by(groups)

    def show_compared(
        self, rows: Sequence[dict], table: str, title: str, settings: Sequence[str], phases: Sequence[str], *last: str
    ) -> None:
        """Add a table of :func:`compared` rows, and say for each value of the first setting where it is faster.

        The first columns are ``settings``, which tell rows apart, and after three for each phase come ``last``.
        """
        keys = [*settings, *(f"{phase}_{end}" for phase in phases for end in ("before_ms", "ms", "speedup")), *last]
        # Without a header of its own, a column is headed by its key.
        columns = named_columns(**{key: "faster" if key.endswith("_speedup") else "" for key in keys})
        self.tables.append(Table(table, title, columns, rows))
        self.measured_by(row["group"] for row in rows)
        self.write("common.compared", rows=rows, by=settings[0], phases=phases)

    def draw(self, groups: Iterable[Selection], *names: str) -> None:
        """Add the groups' pictures (of these names, if any is given); a second ``flash`` is called ``flash, 2``."""
        for group in groups:
            for name, draw in group.pictures(*names).items():
                number = 1 + sum(picture.split(",")[0] == name for picture in self.pictures)
                self.pictures[name if number == 1 else f"{name}, {number}"] = draw


def of_medians(table: Table) -> Table:
    """Replace the means and standard deviations of a table by medians, as the sentences next to it have them."""
    rows = [
        {key: value.median if isinstance(value, Samples) and value.measured else value for key, value in row.items()}
        for row in table.rows
    ]
    notes = [note.replace("mean ± standard deviation", "medians") for note in table.notes]
    return replace(table, rows=rows, notes=notes)


def facts_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's status, settings, derived columns and samples by name, as templates ask for them."""
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
    keep: Callable[[Rows], Rows] = list,
    only: Callable[[Cell], Any] = lambda cell: True,
    facts: Callable[[Answer, list[Selection]], Mapping[str, Any] | None] = lambda answer, groups: {},
) -> Callable[[Answer], None]:
    """Return a function that answers with a command's cells: its tables with some columns, and a template's block.

    The block, if any, gets the measured ``cells``, all that were ``tried``, and ``rows``, a function that returns the
    rows of a table of the command's.

    Args:
        wanted, required: settings of the cells, the preferred and the required ones of :meth:`Evidence.find`.
        grid: settings of which the handout asks for every combination; ``label`` names one that was not measured.
        medians, keep: as :meth:`Answer.show` takes them.
        only: returns whether a cell is taken.
        facts: returns more facts for the block, or None where the cells hold no answer.
    """

    def answer_with_cells(answer: Answer) -> None:
        selections = [group.only(only) for group in answer.find(command, wanted(answer.handout), **required)]
        groups = [group for group in selections if group.cells]
        facts_of_groups = facts(answer, groups) if groups else None
        if facts_of_groups is None:  # No cells, or none with an answer.
            return
        for table, columns in tables.items():
            answer.show(groups, table, *columns, medians=medians, join=True, keep=keep)
        joined = joined_selection(groups)
        tried = list(map(facts_of, joined.cells))
        if block:
            cells = where(tried, status="ok")
            answer.write(block, cells=cells, tried=tried, rows=joined.rows, **facts_of_groups)
        answer.lack_unmeasured(label, tried, grid(answer.handout))

    return answer_with_cells


def compared(
    groups: Iterable[Selection], setting: str, base: Any, phases: Sequence[str], *order: str
) -> list[dict[str, Any]]:
    """Compare cells with those of their own invocation that have the base value of a setting, a row for each.

    Rows are sorted by the settings ``order``. A row has a cell's facts, its ``group``, ``peak_before_gib``, the fewest
    ``samples`` of a phase and the number of ``undecided`` phases, and of each phase ``PHASE_before_ms`` and
    ``PHASE_ms`` (medians; ``_std_ms`` with deviations), ``PHASE_speedup`` (an interval) and ``PHASE_is_sure`` (it is
    narrow). Of several invocations with the same cells, the first with the fewest undecided phases counts.
    """
    # Settings that a cell shares with the one that it is compared with, but for the setting that is compared.
    names = ("size", "mode", "context", "head_dim", "dtype", "precision", "compile", "implementation")
    rows: dict[tuple, dict[str, Any]] = {}
    for group in groups:
        for cell in group.measured:
            shared = {name: cell.configuration[name] for name in names if name in cell.configuration}
            base_settings = {**shared, setting: base}.items()  # The cell's, but for the base value.
            before = next((other for other in group.measured if base_settings <= other.configuration.items()), None)
            if before is None or cell.configuration[setting] == base:
                continue  # Nothing to compare with, or the base itself.
            row: dict[str, Any] = {**facts_of(cell), "group": group, "undecided": 0, "samples": math.inf}
            for phase in [phase for phase in phases if phase in cell.samples]:
                old, new = before.samples[phase], cell.samples[phase]
                speedup = ratio(old, new)
                row |= {f"{phase}_before_ms": old.median, f"{phase}_ms": new.median, f"{phase}_speedup": speedup}
                row |= {f"{phase}_before_std_ms": old.std, f"{phase}_std_ms": new.std}
                # If its ends are in a larger ratio, it rests on few samples, and is not named as an extreme.
                row[f"{phase}_is_sure"] = speedup.high <= 1.25 * speedup.low
                row["samples"] = min(row["samples"], len(old.measured), len(new.measured))
                row["undecided"] += speedup.is_undecided
            row["peak_before_gib"] = before.derived.get("peak_gib")
            key = tuple(shared.values())  # ``setting`` is among them, so each of its values has a row.
            if key not in rows or row["undecided"] < rows[key]["undecided"]:
                rows[key] = row
    return sorted(rows.values(), key=lambda row: [row[name] for name in order])
