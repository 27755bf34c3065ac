"""The cells, tables and pictures of an invocation, and what is said of cells that cannot be shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from cs336sys.errors import UsageError, choose_from
from cs336sys.report.noise import Interval
from cs336sys.report.saved.commands import SAVED_COMMANDS, Pictures, Presentation
from cs336sys.report.saved.invocation import Invocation
from cs336sys.report.tables import Table
from cs336sys.results import Cell, Samples

Built = TypeVar("Built")


def shown_cells(invocation: Invocation, statuses: Sequence[str] = ()) -> list[Cell]:
    """Its cells of these statuses (of any, without one), with their rounds pooled.

    Raises:
        UsageError: nothing knows how cells of its command are shown, or they lack what that needs.
    """
    if invocation.command not in SAVED_COMMANDS:
        known = choose_from(invocation.command, SAVED_COMMANDS)
        raise UsageError(f"cells of '{invocation.command}' cannot be shown by this cs336sys: {known}")
    cells = _checked(invocation, lambda: SAVED_COMMANDS[invocation.command].pooled(list(invocation.cells.values())))
    return [cell for cell in cells if not statuses or cell.status in statuses]


def saved_tables(invocation: Invocation, cells: Sequence[Cell], presentation: Presentation, mark: bool) -> list[Table]:
    """The tables of an invocation's :func:`shown_cells`, whose titles say with ``mark`` which invocation it was.

    Raises:
        UsageError: the cells lack what the tables need.
    """
    build = SAVED_COMMANDS[invocation.command].tables
    tables = _checked(invocation, lambda: [_plain(table) for table in build(cells, invocation.run, presentation)])
    return [replace(table, title=f"{table.title} ({invocation.name})") for table in tables] if mark else tables


def _plain(table: Table) -> Table:
    for row in table.rows:
        for column in table.columns:
            if not isinstance(row.get(column.key), str | int | float | Samples | Interval | None):
                raise TypeError(f"{column.key} is {row[column.key]}")
    return table


def saved_pictures(invocation: Invocation, cells: Sequence[Cell]) -> Pictures:
    """The pictures that an invocation's :func:`shown_cells` have data for.

    Raises:
        UsageError: the cells lack what that needs.
    """
    draw = SAVED_COMMANDS[invocation.command].pictures
    return _checked(invocation, lambda: draw(cells, invocation.run))


def _checked(invocation: Invocation, build: Callable[[], Built]) -> Built:
    """What ``build`` makes of cells that another version, or another program, may have written."""
    try:
        return build()
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        lacking = f"lack {error}" if isinstance(error, KeyError) else f"hold something else than expected ({error})"
        raise UsageError(
            f"{invocation.command}, {invocation.name}: the saved cells {lacking}, so that they cannot be shown; "
            "show them with the version that measured them, or measure again"
        ) from error
