"""A table: columns with units, rows and notes, the templates of its sentences, and its cells as text for people."""

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from cs336sys.errors import UsageError, choose_from
from cs336sys.results.foreign import printable
from cs336sys.results.model import Samples
from cs336sys.results.statistics import NOISY_PART, SAME_PERCENT, Interval, is_noisy
from cs336sys.tables.numbers import Value, central_value, format_quantity, format_value, shown_units, unit_label

if TYPE_CHECKING:
    from jinja2 import Environment, Template


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: the name for programs, with its unit: ``forward_ms``, ``parameters``, ``peak_gib``.
        header: the name for people, without it: ``forward``.
        unit: how numbers are written, see :data:`cs336sys.tables.numbers.UNITS`.
        value: computes the column of what a row stands for, for :func:`fill_row`.
        spread: ``samples`` or ``interval``: programs get a column for each of its statistics, even without any value.
        exact: where each row has its own unit, the key under which rows have the number to sort by.
        usual: of a setting, the values that titles do not name.
    """

    key: str
    header: str
    unit: str | None = None
    value: Callable[[Any], Value] | None = None
    exact: str | None = None
    spread: str = ""
    usual: Collection[Any] = ()

    @property
    def title(self) -> str:
        """Return header and unit, ``forward, ms``; a header that ends with its unit (``tokens/s``) stands alone."""
        label = unit_label(self.unit)  # empty without a unit, which every header ends with
        return self.header if self.header.endswith(label) else f"{self.header}, {label}"


# Units by what a column's key may end with, as ``step_ms`` does; rates are units of their own.
_KEY_UNITS = {unit: unit for unit in ("us", "ms", "s", "bytes", "gib", "percent", "gbps", "tflops", "ratio")}
_KEY_UNITS["speedup"] = "ratio"
_RATES = ("tokens_per_s", "examples_per_s")


def named_columns(*keys: str, spread: str = "", **headers: str) -> tuple[Column, ...]:
    """Return columns headed by their keys, ``head dim`` for ``head_dim``, and after them those with other headers.

    The unit is the key's ending, GiB of ``held_gib``.
    """
    columns = []
    for key, header in (dict.fromkeys(keys, "") | headers).items():
        name, _, ending = key.rpartition("_")
        # A rate is a unit as a whole. A key without a name before its unit, as "bytes", is its own header without one.
        unit = key if key in _RATES else _KEY_UNITS.get(ending) if name or header else None
        columns.append(Column(key, header or (name if unit else key).replace("_", " "), unit, spread=spread))
    return tuple(columns)


def by_key(*columns: Column) -> dict[str, Column]:
    return {column.key: column for column in columns}


def fill_row(columns: Sequence[Column], item: Any) -> dict[str, Any]:
    """Return the values of an item by the keys of the columns that compute one."""
    return {column.key: column.value(item) for column in columns if column.value is not None}


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        name: the table's name for programs.
        title: its caption for people.
        rows: values by column key; a missing key is None, and a key that no column has is left out.
        notes: sentences printed below the table.
        steadier: options of the command by which measurements become less noisy: ``more --steps``.
        hidden: the keys of columns that only programs get.
        settings, origin: columns that programs get before and after the others: see :mod:`cs336sys.tables.saved`.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Value]]
    notes: Sequence[str] = ()
    steadier: str = ""
    hidden: Collection[str] = ()
    settings: Sequence[Column] = ()
    origin: Sequence[Column] = ()

    @property
    def shown_columns(self) -> list[Column]:
        """Return the columns for people."""
        return [column for column in self.columns if column.key not in self.hidden]

    @property
    def all_columns(self) -> list[Column]:
        """Return the columns for programs, which are the same whatever a sweep varies."""
        keys = {column.key for column in (*self.settings, *self.origin)}
        return [*self.settings, *(column for column in self.columns if column.key not in keys), *self.origin]

    @property
    def all_notes(self) -> list[str]:
        """Return the notes, and those that explain the marks of noise in the table."""
        values = [row.get(column.key) for row in self.rows for column in self.columns]
        marks = []
        intervals = [value for value in values if isinstance(value, Interval)]
        if any(interval.is_range or (interval.is_noise and interval.is_cost) for interval in intervals):
            marks.append("< or a range: within the noise, by the rank-sum test at 5 %")
        if any(interval.is_undecided and not interval.is_range for interval in intervals):
            counts = [interval.to_decide for interval in intervals if interval.to_decide is not None]
            steps = f": about {max(counts)} samples of each would decide all ratios" if counts else ""
            marks.append(f"undecided: neither a difference nor the same within {SAME_PERCENT:g} %{steps}")
        if any(isinstance(value, Samples) and is_noisy(value) for value in values):
            marks.append(f"!: the standard deviation is more than {100 * NOISY_PART:g} % of the mean")
        advice = f"; steadier: {self.steadier}, and nothing else running" if self.steadier else ""
        return [*self.notes, *(mark + advice for mark in marks)]


def with_rows(*tables: Table | None) -> list[Table]:
    """Return the tables that have a row."""
    return [table for table in tables if table is not None and table.rows]


@dataclass(frozen=True)
class Grid:
    """A table as text for people, without columns that have no value.

    ``key_columns`` counts the first columns, which name the row by its settings; the others are results.
    """

    headers: list[str]
    rows: list[list[str]]
    is_number: list[bool]
    key_columns: int = 0

    @property
    def alignment(self) -> list[str]:
        return ["right" if is_number else "left" for is_number in self.is_number]

    def map(self, escape: Callable[[str], str]) -> "Grid":
        rows = [list(map(escape, row)) for row in self.rows]
        return replace(self, headers=list(map(escape, self.headers)), rows=rows)


def grid_of(table: Table) -> Grid:
    """Format a table as text for people, without columns that have no value, each in the unit that suits its values."""
    shown: dict[Column, list[Value]] = {}
    for column in table.shown_columns:
        values = [row.get(column.key) for row in table.rows]
        known_values = [value for value in values if central_value(value) is not None]
        if known_values or not table.rows:
            shown[column] = known_values
    is_number = [
        bool(values) and not any(isinstance(value, str | bool) for value in values) for values in shown.values()
    ]
    units = shown_units([(column.unit, values) for column, values in shown.items()])
    columns = [replace(column, unit=unit) for column, unit in zip(shown, units, strict=True)]
    rows = [[one_line(format_value(row.get(column.key), column.unit)) for column in columns] for row in table.rows]
    # What stands before the first measured column names the row: settings, and a model's parameters.
    keys = itertools.takewhile(lambda column: column.unit in (None, "parameters"), columns)
    return Grid([one_line(column.title) for column in columns], rows, is_number, sum(1 for _ in keys))


def one_line(text: str) -> str:
    """Return the text without newlines and terminal commands."""
    return " ".join(printable(text).splitlines())


def select_in_groups(
    groups: Sequence[Sequence[Table]], names: Sequence[str] = (), keys: Sequence[str] = (), order: str | None = None
) -> list[list[Table]]:
    """Return the tables of these names (of all, without any), sorted by a column, with these columns, in their groups.

    Args:
        keys: columns as :func:`select_columns` takes them.
        order: ``step_ms``, or ``-step_ms``: the largest first; tables without this column stay as they are. Samples are
            sorted by their mean. Rows without a value come last in either order.

    Raises:
        UsageError: no table of any group has a name or a column of these.
    """
    chosen = [[table for table in group if not names or table.name in names] for group in groups]
    # Checked on one table of each name and columns: files of thousands of runs have as many of each.
    distinct = {(table.name, *(column.title for column in table.columns)): table for table in itertools.chain(*groups)}
    _check_names(names, "--table", [table.name for table in distinct.values()])
    checked = [table for table in distinct.values() if not names or table.name in names]
    # Sorted before columns are left out, by one of which rows may be sorted.
    if order is not None:
        _check_columns([order.removeprefix("-")], "--sort", checked)
        chosen = [[_sorted(table, order) for table in group] for group in chosen]
    if keys:
        _check_columns(keys, "--columns", checked)
        chosen = [select_columns(group, keys) for group in chosen]
    return chosen


def select_columns(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """Return the tables with these columns alone, in this order; those that have none of them are left out.

    A column is named by its key (``step_ms``), or by its header (``step``) in any case. Notes on other columns go, too.
    """
    selected = []
    for table in tables:
        columns = list(dict.fromkeys(column for name in names for column in _columns_named(table, name)))
        # A note's parts begin with the header of the column that they explain, or with "no speed-ups", which
        # titles.find_baselines() writes for want of a baseline.
        hidden = {column.header.split(",")[0] for column in table.columns if column not in columns}
        if not any(column.key.endswith("speedup") for column in columns):
            hidden.add("no speed-ups")
        parts = ([part for part in note.split("; ") if part.partition(":")[0] not in hidden] for note in table.notes)
        notes = ["; ".join(kept) for kept in parts if kept]
        # Programs, too, get the chosen columns alone, and people get a chosen column that is hidden otherwise.
        selected.append(replace(table, columns=columns, notes=notes, hidden=(), settings=(), origin=()))
    return [table for table in selected if table.columns]


def _sorted(table: Table, order: str) -> Table:
    columns = _columns_named(table, order.removeprefix("-"))
    if not columns:
        return table
    column = columns[0]  # Several have one header: the first decides.
    keys_and_rows = [(_sort_key(row.get(column.exact or column.key)), row) for row in table.rows]
    with_value = [(key, row) for key, row in keys_and_rows if key is not None]
    with_value.sort(key=lambda key_and_row: key_and_row[0], reverse=order.startswith("-"))
    rows = [*(row for _, row in with_value), *(row for key, row in keys_and_rows if key is None)]
    return replace(table, rows=rows)


def _sort_key(value: Value) -> tuple[bool, float, str] | None:
    """Return a key that puts numbers, also those written as text (``1.2e-05``), before text; None for None and NaN."""
    value = central_value(value)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return True, 0.0, str(value)
    return None if math.isnan(number) else (False, number, "")


def _columns_named(table: Table, name: str) -> list[Column]:
    """Return the column of this key, or else those of this header: of columns for people, or else of all."""
    for columns in (table.shown_columns, table.all_columns):
        by_key = [column for column in columns if column.key == name]
        if matches := by_key or [column for column in columns if column.header.lower() == name.lower()]:
            return matches
    return []


def _check_columns(names: Sequence[str], option: str, tables: Sequence[Table]) -> None:
    unknown = [name for name in names if not any(_columns_named(table, name) for table in tables)]
    _check_names(unknown, option, [column.key for table in tables for column in table.all_columns])


def _check_names(names: Sequence[str], option: str, choices: Collection[str]) -> None:
    for name in names:
        if name not in choices:
            raise UsageError(f"{option} '{name}': {choose_from(name, list(dict.fromkeys(choices)))}")


@cache
def package_templates() -> "Environment":
    """Load the package's templates by their paths in it, with filters that write numbers."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("cs336sys", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"to": format, "quantity": format_quantity}
    environment.filters["counted"] = lambda number, noun: f"{number} {noun}{'s' * (number != 1)}"
    return environment


def paragraphs(template: "Template", block: str, facts: dict[str, Any]) -> list[str]:
    """Return the paragraphs that a block makes of the facts, each in one line, or raise a jinja2.UndefinedError."""
    text = "".join(template.blocks[block](template.new_context(facts)))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def sentences(module: str, block: str, **facts: Any) -> tuple[str, ...]:
    """Return the sentences of a block of the template next to a module: ``tables.jinja`` next to ``tables.py``."""
    path = module.removeprefix("cs336sys.").replace(".", "/")
    return tuple(paragraphs(package_templates().get_template(f"{path}.jinja"), block, facts))
