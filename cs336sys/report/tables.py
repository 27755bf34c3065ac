"""What a table is: columns with units, rows, notes; and its cells as text for people."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cs336sys.printable import printable
from cs336sys.report.noise import NOISY_PART, Interval, is_noisy
from cs336sys.report.numbers import Value, format_value, shown_units, unit_label
from cs336sys.results import Samples


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: the name for programs, with its unit: ``forward_ms``, ``parameters``, ``peak_gib``.
        header: the name for people, without it: ``forward``.
        unit: how numbers are written, see :data:`cs336sys.report.numbers.UNITS`.
        exact, kind: where each row has its own unit, the keys under which rows hold the number to sort by, and what it
            is a number of; rows of one kind are sorted among themselves.
    """

    key: str
    header: str
    unit: str | None = None
    exact: str | None = None
    kind: str | None = None

    @property
    def title(self) -> str:
        """Header and unit, ``forward, ms``; a header that is or ends with its unit (``tokens/s``) stands alone."""
        label = unit_label(self.unit)
        return self.header if self.header.endswith(label) else f"{self.header}, {label}"


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        name: the table's name for programs.
        title: its caption for people.
        rows: values by column key; a missing key is None, and a key that no column has is left out.
        notes: sentences printed below the table.
        steadier: what makes its measurements less noisy, as options of the command: ``more --steps``.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Value]]
    notes: Sequence[str] = ()
    steadier: str = ""

    @property
    def all_notes(self) -> list[str]:
        """The notes, and what marks of noise in the table mean."""
        values = [row.get(column.key) for row in self.rows for column in self.columns]
        marks = []
        if any(isinstance(value, Interval) and (value.is_noise or value.is_range) for value in values):
            marks.append("~, <, or a range: what differs is within the noise, by the 95 % intervals of the medians")
        if any(isinstance(value, Samples) and is_noisy(value) for value in values):
            marks.append(f"!: the standard deviation is more than {100 * NOISY_PART:g} % of the mean")
        advice = f"; steadier: {self.steadier}, and nothing else running" if self.steadier else ""
        return [*self.notes, *(mark + advice for mark in marks)]


def with_rows(*tables: Table | None) -> list[Table]:
    """Those of the tables that there are, and that have a row."""
    return [table for table in tables if table is not None and table.rows]


def _is_empty(value: Value) -> bool:
    return value is None or (isinstance(value, Samples) and not value.measured)


@dataclass(frozen=True)
class Grid:
    """A table as text for people: only the columns that have a value somewhere.

    Attributes:
        keys: how many of the first columns say which row it is, and not what was found.
    """

    headers: list[str]
    rows: list[list[str]]
    is_number: list[bool]
    keys: int = 0

    @property
    def alignment(self) -> list[str]:
        return ["right" if is_number else "left" for is_number in self.is_number]

    def map(self, escape: Callable[[str], str]) -> "Grid":
        return Grid(
            [escape(text) for text in self.headers],
            [[escape(text) for text in row] for row in self.rows],
            self.is_number,
            self.keys,
        )


def grid_of(table: Table) -> Grid:
    values = {
        column: [value for row in table.rows if not _is_empty(value := row.get(column.key))] for column in table.columns
    }
    shown = [column for column in table.columns if values[column] or not table.rows]
    is_number = [
        bool(values[column]) and not any(isinstance(value, str | bool) for value in values[column]) for column in shown
    ]
    units = shown_units([(column.unit, values[column]) for column in shown])
    columns = [replace(column, unit=unit) for column, unit in zip(shown, units, strict=True)]
    rows = [[one_line(format_value(row.get(column.key), column.unit)) for column in columns] for row in table.rows]
    keys = itertools.takewhile(lambda column: column.unit in (None, "parameters"), columns)
    return Grid([one_line(column.title) for column in columns], rows, is_number, sum(1 for _ in keys))


def one_line(text: str) -> str:
    """The text without newlines, nor what would command a terminal."""
    return " ".join(printable(text).splitlines())
