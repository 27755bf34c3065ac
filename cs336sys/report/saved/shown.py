"""The cells, tables and pictures of an invocation, and what is said of cells that cannot be shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cs336sys.errors import UsageError, choose_from
from cs336sys.report.foreign_cells import FAULTS, fault_words
from cs336sys.report.noise import Interval
from cs336sys.report.saved.commands import SAVED_COMMANDS, Pictures, Presentation
from cs336sys.report.saved.invocation import Invocation
from cs336sys.report.tables import Table, grid_of
from cs336sys.results import Cell, Samples, distinguishing_settings

Built = TypeVar("Built")

# Of a setting and its value in a sentence.
_NAME_CHARACTERS = 80


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


def saved_tables(invocation: Invocation, cells: Sequence[Cell], presentation: Presentation) -> list[Table]:
    """The tables of an invocation's :func:`shown_cells`.

    Raises:
        UsageError: the cells lack what the tables need.
    """
    build = SAVED_COMMANDS[invocation.command].tables
    return _checked(invocation, lambda: [_plain(table) for table in build(cells, invocation.run, presentation)])


def marked(invocation: Invocation, tables: Sequence[Table]) -> list[Table]:
    """The tables with titles that say which invocation it was."""
    return [replace(table, title=f"{table.title} ({invocation.name})") for table in tables]


def sound_cells_and_tables(
    invocation: Invocation, statuses: Sequence[str], presentation: Presentation, say: Callable[[str], None]
) -> tuple[list[Cell], list[Table]]:
    """The :func:`shown_cells` and their :func:`saved_tables`, without cells that cannot be shown even by themselves.

    Args:
        say: is told of each that is left out.

    Raises:
        UsageError: no cell can be shown, or all can and are at odds with each other.
    """

    def build() -> tuple[list[Cell], list[Table]]:
        cells = shown_cells(invocation, statuses)
        return cells, saved_tables(invocation, cells, presentation) if cells else []

    try:
        return build()
    except UsageError:
        left_out = _leave_out_unsound(invocation, presentation)
        if not left_out:
            raise
        for sentence in left_out:
            say(sentence)
        return build()


def _plain(table: Table) -> Table:
    for row in table.rows:
        for column in table.columns:
            if not isinstance(row.get(column.key), str | int | float | Samples | Interval | None):
                raise TypeError(f"{column.key} is {row[column.key]}")
    grid_of(table)
    return table


def saved_pictures(invocation: Invocation, cells: Sequence[Cell]) -> Pictures:
    """The pictures that an invocation's :func:`shown_cells` have data for.

    Raises:
        UsageError: the cells lack what that needs; also raised by drawing one.
    """
    draw = SAVED_COMMANDS[invocation.command].pictures
    pictures = _checked(invocation, lambda: draw(cells, invocation.run))
    return {name: partial(_draw, invocation, name, one) for name, one in pictures.items()}


def _draw(invocation: Invocation, name: str, draw: Callable[[Path], None], path: Path) -> None:
    _checked(invocation, lambda: draw(path), f"drawn as the picture '{name}'")


def _leave_out_unsound(invocation: Invocation, presentation: Presentation) -> list[str]:
    """Remove the cells that cannot be shown by themselves, unless none can; which they are and why."""

    def fault(key: str) -> str | None:
        alone = Invocation(invocation.command, invocation.runs, {key: invocation.cells[key]})
        try:
            saved_tables(alone, shown_cells(alone), presentation)
        except UsageError as error:
            return fault_words(error.__cause__) if isinstance(error.__cause__, FAULTS) else f"cannot be shown: {error}"
        return None

    faults = {key: found for key in invocation.cells if (found := fault(key)) is not None}
    if len(faults) == len(invocation.cells):
        return []
    identifying = distinguishing_settings([cell.configuration for cell in invocation.cells.values()])
    sentences = []
    for key, found in faults.items():
        settings = invocation.cells.pop(key).configuration
        words = ", ".join(f"{name} {settings[name]}"[:_NAME_CHARACTERS] for name in identifying if name in settings)
        which = f"{invocation.command}, {invocation.name}"
        sentences.append(f"{which}: the values of {words or 'the cell'} {found}, and it is left out")
    return sentences


def _checked(invocation: Invocation, build: Callable[[], Built], done: str = "shown") -> Built:
    """What ``build`` makes of cells that another version, or another program, may have written."""
    try:
        return build()
    except FAULTS as error:
        raise UsageError(
            f"{invocation.command}, {invocation.name}: the saved cells {fault_words(error)}, so that they cannot be "
            f"{done}; show them with the version that measured them, or measure again"
        ) from error
