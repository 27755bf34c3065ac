"""Parts of tables: some of them, some of their columns, their rows in another order."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from cs336sys.errors import UsageError, choose_from
from cs336sys.report.noise import Interval
from cs336sys.report.numbers import Value
from cs336sys.report.tables import Column, Table
from cs336sys.results import Samples


def select_in_groups(
    groups: Sequence[Sequence[Table]], names: Sequence[str] = (), keys: Sequence[str] = (), order: str | None = None
) -> list[list[Table]]:
    """What :func:`select_tables`, :func:`sort_rows` and :func:`select_columns` leave of tables in groups.

    Raises:
        UsageError: no table of any group has what was asked for.
    """
    chosen = [list(group) for group in groups]

    def all_tables() -> list[Table]:
        return [table for group in chosen for table in group]

    if names:
        chosen = [select_tables(group, names, all_tables()) for group in chosen]
    # Before columns are left out: rows may be sorted by another one.
    if order is not None:
        chosen = [sort_rows(group, order, all_tables()) for group in chosen]
    if keys:
        chosen = [select_columns(group, keys, all_tables()) for group in chosen]
    return chosen


def select_tables(tables: Sequence[Table], names: Sequence[str], among: Sequence[Table] = ()) -> list[Table]:
    """The tables of these names.

    Args:
        among: the tables that the names must be of, where ``tables`` are some of them.

    Raises:
        UsageError: no table has one of the names.
    """
    _check(names, "--table", [table.name for table in among or tables])
    return [table for table in tables if table.name in names]


def select_columns(tables: Sequence[Table], names: Sequence[str], among: Sequence[Table] = ()) -> list[Table]:
    """The tables with these columns alone, in this order; those that have none of them are left out.

    A column is named by its key (``step_ms``), or by its header (``step``) in any case.

    Args:
        among: the tables that the columns must be of, where ``tables`` are some of them.

    Raises:
        UsageError: no table has one of the columns.
    """
    _check_columns(names, "--columns", among or tables)
    chosen = [
        replace(table, columns=list(dict.fromkeys(column for name in names for column in _named(table, name))))
        for table in tables
    ]
    return [table for table in chosen if table.columns]


def sort_rows(tables: Sequence[Table], order: str, among: Sequence[Table] = ()) -> list[Table]:
    """The tables with their rows sorted by a column (``step_ms``; ``-step_ms``: the largest first), where they have it.

    Samples are sorted by their mean. Rows without a value come last in either order. Where rows have their own
    units, bytes and seconds, those of one kind are sorted among themselves, and kinds keep their order.

    Args:
        among: the tables that the column must be of, where ``tables`` are some of them.

    Raises:
        UsageError: no table has the column.
    """
    name, is_descending = order.removeprefix("-"), order.startswith("-")
    _check_columns([name], "--sort", among or tables)
    return [
        _sorted(table, columns[0], is_descending) if (columns := _named(table, name)) else table for table in tables
    ]


def _sorted(table: Table, column: Column, is_descending: bool) -> Table:
    ranked = [(_rank(row.get(column.exact or column.key)), row) for row in table.rows]
    known = sorted(
        ((rank, row) for rank, row in ranked if rank is not None), key=lambda pair: pair[0], reverse=is_descending
    )
    if (kind := column.kind) is not None:
        kinds = list(dict.fromkeys(row.get(kind) for row in table.rows))
        known.sort(key=lambda pair: kinds.index(pair[1].get(kind)))
    return replace(table, rows=[row for _, row in known] + [row for rank, row in ranked if rank is None])


def _rank(value: Value) -> tuple[bool, float, str] | None:
    """Numbers, also those written as text (``1.2e-05``), before text; None for what has no place in an order."""
    if isinstance(value, Samples):
        value = value.mean if value.measured else None
    elif isinstance(value, Interval):
        value = value.estimate
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return True, 0.0, str(value)
    return None if math.isnan(number) else (False, number, "")


def _named(table: Table, name: str) -> list[Column]:
    """The column of this key, or else those of this header."""
    by_key = [column for column in table.columns if column.key == name]
    return by_key or [column for column in table.columns if column.header.lower() == name.lower()]


def _check_columns(names: Sequence[str], option: str, tables: Sequence[Table]) -> None:
    unknown = [name for name in names if not any(_named(table, name) for table in tables)]
    _check(unknown, option, [column.key for table in tables for column in table.columns])


def _check(names: Sequence[str], option: str, choices: Collection[str]) -> None:
    for name in names:
        if name not in choices:
            raise UsageError(f"{option} '{name}': {choose_from(name, list(dict.fromkeys(choices)))}")
