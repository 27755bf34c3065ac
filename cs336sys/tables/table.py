"""A table: columns with units, rows and notes, and its cells as text for people."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cs336sys.errors import UsageError, choose_from
from cs336sys.results.foreign import printable
from cs336sys.results.model import Samples
from cs336sys.results.statistics import NOISY_PART, SAME_PERCENT, Interval, is_noisy
from cs336sys.tables.numbers import Value, central_value, format_value, shown_units, unit_label


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: the name for programs, with its unit: ``forward_ms``, ``parameters``, ``peak_gib``.
        header: the name for people, without it: ``forward``.
        unit: how numbers are written, see :data:`cs336sys.tables.numbers.UNITS`.
        value: computes the column of what a row stands for, for :func:`fill_row`.
        spread: ``samples`` or ``interval``, of whose statistics programs get a column each, whether or not any row has
            a value.
        exact, kind: where each row has its own unit, the keys under which rows hold the number to sort by, and what it
            is a number of; rows of one kind are sorted among themselves.
        usual: of a setting, the values that titles do not name.
    """

    key: str
    header: str
    unit: str | None = None
    value: Callable[[Any], Value] | None = None
    exact: str | None = None
    kind: str | None = None
    spread: str = ""
    usual: Collection[Any] = ()

    @property
    def title(self) -> str:
        """Header and unit, ``forward, ms``; a header that is or ends with its unit (``tokens/s``) stands alone."""
        label = unit_label(self.unit)
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
        unit = key if key in _RATES else _KEY_UNITS.get(ending) if name or header else None
        columns.append(Column(key, header or (name if unit else key).replace("_", " "), unit, spread=spread))
    return tuple(columns)


def by_key(*columns: Column) -> dict[str, Column]:
    return {column.key: column for column in columns}


def fill_row(columns: Sequence[Column], item: Any) -> dict[str, Any]:
    """Return what the columns that compute a value make of an item."""
    return {column.key: column.value(item) for column in columns if column.value is not None}


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        name: the table's name for programs.
        title: its caption for people.
        rows: values by column key; a missing key is None, and a key that no column has is left out.
        notes: sentences printed below the table.
        steadier: what makes its measurements less noisy, as options of the command: ``more --steps``.
        hidden: the keys of columns that programs get alone.
        settings, origin: columns that programs get before and after the others: see :mod:`cs336sys.tables.tidy`.
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
        """The columns for people."""
        return [column for column in self.columns if column.key not in self.hidden]

    @property
    def all_columns(self) -> list[Column]:
        """The columns for programs, which are the same whatever a sweep varies."""
        keys = {column.key for column in (*self.settings, *self.origin)}
        return [*self.settings, *(column for column in self.columns if column.key not in keys), *self.origin]

    @property
    def all_notes(self) -> list[str]:
        """The notes, and what marks of noise in the table mean."""
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
    """Those of the tables that there are, and that have a row."""
    return [table for table in tables if table is not None and table.rows]


@dataclass(frozen=True)
class Grid:
    """A table as text for people: only the columns that have a value somewhere.

    Attributes:
        key_columns: how many of the first columns say which row it is, and not what was found.
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
    values_of_column = {
        column: [value for row in table.rows if central_value(value := row.get(column.key)) is not None]
        for column in table.shown_columns
    }
    shown = {column: values for column, values in values_of_column.items() if values or not table.rows}
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
    """The text without newlines, nor what would command a terminal."""
    return " ".join(printable(text).splitlines())


def select_in_groups(
    groups: Sequence[Sequence[Table]], names: Sequence[str] = (), keys: Sequence[str] = (), order: str | None = None
) -> list[list[Table]]:
    """Return the tables of these names, sorted by a column, with these columns alone, in their groups.

    Rows are sorted before columns are left out, so that they may be sorted by one of these.

    Args:
        names: of any name, without one.
        keys: columns as :func:`select_columns` takes them.
        order: ``step_ms``, or ``-step_ms``: the largest first; tables without this column stay as they are. Samples are
            sorted by their mean. Rows without a value come last in either order. Where rows have their own units, bytes
            and seconds, those of one kind are sorted among themselves, and kinds keep their order.

    Raises:
        UsageError: no table of any group has what was asked for.
    """
    # One table of each name and columns: files of thousands of runs have as many tables of each.
    kinds = {(table.name, *(column.title for column in table.columns)): table for group in groups for table in group}
    _check_names(names, "--table", [table.name for table in kinds.values()])
    chosen = [[table for table in group if not names or table.name in names] for group in groups]
    named = [table for table in kinds.values() if not names or table.name in names]
    if order is not None:
        _check_columns([order.removeprefix("-")], "--sort", named)
        chosen = [[_sorted(table, order) for table in group] for group in chosen]
    if keys:
        _check_columns(keys, "--columns", named)
        chosen = [select_columns(group, keys) for group in chosen]
    return chosen


def select_columns(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """Return the tables with these columns alone, in this order; those that have none of them are left out.

    A column is named by its key (``step_ms``), or by its header (``step``) in any case. Notes of others are left out.
    """
    selected = []
    for table in tables:
        columns = list(dict.fromkeys(column for name in names for column in _named(table, name)))
        hidden = {column.header.split(",")[0] for column in table.columns if column not in columns}
        hidden |= set() if any(column.key.endswith("speedup") for column in columns) else {"no speed-ups"}
        parts = ([part for part in note.split("; ") if part.partition(":")[0] not in hidden] for note in table.notes)
        notes = ["; ".join(kept) for kept in parts if kept]
        selected.append(replace(table, columns=columns, notes=notes, hidden=(), settings=(), origin=()))
    return [table for table in selected if table.columns]


def _sorted(table: Table, order: str) -> Table:
    columns = _named(table, order.removeprefix("-"))
    if not columns:
        return table
    column = columns[0]
    ranked = [(_sort_key(row.get(column.exact or column.key)), row) for row in table.rows]
    with_value = [(rank, row) for rank, row in ranked if rank is not None]
    with_value.sort(key=lambda pair: pair[0], reverse=order.startswith("-"))
    if (kind := column.kind) is not None:
        kinds = list(dict.fromkeys(row.get(kind) for row in table.rows))
        with_value.sort(key=lambda pair: kinds.index(pair[1].get(kind)))
    return replace(table, rows=[row for _, row in with_value] + [row for rank, row in ranked if rank is None])


def _sort_key(value: Value) -> tuple[bool, float, str] | None:
    """Numbers, also those written as text (``1.2e-05``), before text; None for what has no place in an order."""
    value = central_value(value)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return True, 0.0, str(value)
    return None if math.isnan(number) else (False, number, "")


def _named(table: Table, name: str) -> list[Column]:
    """The column of this key, or else those of this header: of columns for people, or else of all."""
    for columns in (table.shown_columns, table.all_columns):
        by_key = [column for column in columns if column.key == name]
        if matches := by_key or [column for column in columns if column.header.lower() == name.lower()]:
            return matches
    return []


def _check_columns(names: Sequence[str], option: str, tables: Sequence[Table]) -> None:
    unknown = [name for name in names if not any(_named(table, name) for table in tables)]
    _check_names(unknown, option, [column.key for table in tables for column in table.all_columns])


def _check_names(names: Sequence[str], option: str, choices: Collection[str]) -> None:
    for name in names:
        if name not in choices:
            raise UsageError(f"{option} '{name}': {choose_from(name, list(dict.fromkeys(choices)))}")
