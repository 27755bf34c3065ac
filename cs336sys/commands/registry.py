"""Saved results shown again: which cells were one invocation of a command, and how each command's are shown."""

import html
import importlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cs336sys.errors import UsageError, choose_from
from cs336sys.results.model import Cell, Results, Run, Samples, configuration_key, distinguishing_settings, json_text
from cs336sys.results.statistics import Interval
from cs336sys.tables.page import html_page, html_picture, html_table
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand
from cs336sys.tables.table import Table, grid_of, with_rows
from cs336sys.tables.tidy import tidy, with_origin

# Where a command's record (:class:`~cs336sys.tables.saved.SavedCommand`) is not ``SAVED`` of its tables.
_ELSEWHERE = {
    "attn": "attention.tables.SAVED_ATTN",
    "flash": "attention.tables.SAVED_FLASH",
    "memprof": "memprof.page.SAVED",
    "shard": "shard.board_tables.SAVED",
    "trace": "trace.difference_tables.SAVED",
}
_FOLDERS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/tables.py"))


def _record(command: str) -> SavedCommand | None:
    if command not in _FOLDERS and command not in _ELSEWHERE:
        return None
    module, _, record = _ELSEWHERE.get(command, f"{command}.tables.SAVED").rpartition(".")
    return getattr(importlib.import_module(f"cs336sys.commands.{module}"), record, None)


def can_be_shown(command: str) -> bool:
    """Return whether this version knows how cells of a command are shown."""
    return _record(command) is not None


def saved_commands() -> list[str]:
    """Return the commands whose cells can be shown."""
    return list(filter(can_be_shown, sorted({*_FOLDERS, *_ELSEWHERE})))


def saved_command(command: str) -> SavedCommand:
    """Return how a command's cells are shown, or raise a UsageError where nothing knows."""
    if (record := _record(command)) is None:
        choices = choose_from(command, saved_commands())
        raise UsageError(f"cells of '{command}' cannot be shown by this cs336sys: {choices}")
    return record


@dataclass
class Invocation:
    """The cells that one invocation of a command printed.

    Attributes:
        runs: the one that measured them, after those that it resumed.
        cells: by their configuration.
    """

    command: str
    runs: list[Run] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def run(self) -> Run | None:
        """The last run, whose machine a title may name; None where there were several machines."""
        return self.runs[-1] if self.runs and all(run.machine == self.runs[-1].machine for run in self.runs) else None

    @property
    def name(self) -> str:
        """Return the name that tells it from other invocations of the command."""
        return f"run {self.runs[-1].run_id[:8]} of {self.runs[-1].time}" if self.runs else "a run not recorded"


def invocations(files: Sequence[Results]) -> list[Invocation]:
    """The invocations whose cells these files hold, in their order, every cell once.

    A run with ``--resume`` goes on with what its file held before it, if that was measured alike; of cells that it
    measured again the later ones are kept, as it printed them.
    """
    by_run: dict[tuple[str, str], Invocation] = {}
    for results in files:
        in_file: set[tuple[str, str]] = set()
        # Of this file, by command and conditions: the invocation of the last run under these, or under any ("").
        latest: dict[tuple[str, str], Invocation] = {}
        for cell in results.cells:
            key = (cell.command, cell.run_id)
            if key not in in_file:
                in_file.add(key)
                run = results.runs.get(cell.run_id)
                conditions = _conditions_key(run) if run is not None else ""
                if key not in by_run:
                    arguments = run.arguments if run is not None else ()
                    resumed = "" if "--resume-any" in arguments else conditions if "--resume" in arguments else None
                    earlier = None if resumed is None else latest.get((cell.command, resumed))
                    by_run[key] = earlier or Invocation(cell.command)
                    by_run[key].runs += [run] if run is not None else []
                if run is not None:
                    latest[cell.command, ""] = latest[cell.command, conditions] = by_run[key]
            by_run[key].cells[configuration_key(cell.configuration)] = cell
    return list({id(invocation): invocation for invocation in by_run.values()}.values())


def _conditions_key(run: Run) -> str:
    """Return a key that is equal for runs of the same code under the same conditions."""
    return json_text(run.conditions | {"source_digest": run.environment.get("source_digest")}, sort_keys=True)


# What tables and pictures raise of cells that another version, or another program, has written.
FAULTS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, StopIteration)


def fault_words(error: Exception) -> str:
    """Say what is wrong with the cells, to follow their name: ``lack 'timeline'``."""
    return f"lack {error}" if isinstance(error, KeyError) else f"hold something else than expected ({error})"


Built = TypeVar("Built")

# Of a setting and its value in a sentence.
_NAME_CHARACTERS = 80


def shown_cells(invocation: Invocation, statuses: Sequence[str] = ()) -> list[Cell]:
    """Its cells of these statuses (of any, without one), with their rounds pooled.

    Raises:
        UsageError: nothing knows how cells of its command are shown, or they lack what that needs.
    """
    pooled = saved_command(invocation.command).pooled
    cells = _build_checked(invocation, lambda: pooled(list(invocation.cells.values())))
    return [cell for cell in cells if not statuses or cell.status in statuses]


def saved_tables(invocation: Invocation, cells: Sequence[Cell], presentation: Presentation) -> list[Table]:
    """The tables of an invocation's :func:`shown_cells`, or a UsageError where these lack what tables need."""
    build = saved_command(invocation.command).tables
    rows = with_origin(cells, {run.run_id: run for run in invocation.runs})

    def built() -> list[Table]:
        return tidy(invocation.command, with_rows(*build(rows, invocation.run, presentation)), rows)

    return _build_checked(invocation, lambda: list(map(_plain, built())))


def marked(invocation: Invocation, tables: Sequence[Table]) -> list[Table]:
    """The tables with titles that say which invocation it was."""
    return [replace(table, title=f"{table.title} ({invocation.name})") for table in tables]


def sound_cells_and_tables(
    invocation: Invocation, statuses: Sequence[str], presentation: Presentation, say: Callable[[str], None]
) -> tuple[list[Cell], list[Table]]:
    """The :func:`shown_cells` and their :func:`saved_tables`, without cells that cannot be shown even by themselves.

    ``say`` gets a sentence on each of these.

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
        for column in table.all_columns:
            if not isinstance(row.get(column.key), str | int | float | Samples | Interval | None):
                raise TypeError(f"{column.key} is {row[column.key]}")
    grid_of(table)
    return table


def saved_pictures(
    invocation: Invocation, cells: Sequence[Cell], presentation: Presentation = Presentation()
) -> Pictures:
    """The pictures that an invocation's :func:`shown_cells` have data for.

    This and drawing one raise a UsageError where the cells lack what that needs.
    """
    draw = saved_command(invocation.command).pictures
    pictures = _build_checked(invocation, lambda: draw(cells, invocation.run, presentation))
    return {name: partial(_draw, invocation, name, draw_picture) for name, draw_picture in pictures.items()}


def _draw(invocation: Invocation, name: str, draw: Callable[[Path], None], path: Path) -> None:
    _build_checked(invocation, lambda: draw(path), f"drawn as the picture '{name}'")


def _leave_out_unsound(invocation: Invocation, presentation: Presentation) -> list[str]:
    """Remove the cells that cannot be shown by themselves, unless none can; which they are and why."""

    faults = {}
    for key, cell in invocation.cells.items():
        single = Invocation(invocation.command, invocation.runs, {key: cell})
        try:
            saved_tables(single, shown_cells(single), presentation)
        except UsageError as error:
            cause = error.__cause__
            faults[key] = fault_words(cause) if isinstance(cause, FAULTS) else f"cannot be shown: {error}"
    if len(faults) == len(invocation.cells):
        return []
    identifying = distinguishing_settings([cell.configuration for cell in invocation.cells.values()])
    sentences = []
    for key, reason in faults.items():
        settings = invocation.cells.pop(key).configuration
        label = ", ".join(f"{name} {settings[name]}"[:_NAME_CHARACTERS] for name in identifying if name in settings)
        which = f"{invocation.command}, {invocation.name}"
        sentences.append(f"{which}: the values of {label or 'the cell'} {reason}, and it is left out")
    return sentences


def _build_checked(invocation: Invocation, build: Callable[[], Built], done: str = "shown") -> Built:
    """Build from cells that another version, or another program, may have written."""
    try:
        return build()
    except FAULTS as error:
        raise UsageError(
            f"{invocation.command}, {invocation.name}: the saved cells {fault_words(error)}, so that they cannot be "
            f"{done}; show them with the version that measured them, or measure again"
        ) from error


# A picture takes a second, and a page may have hundreds.
_SILENT_S = 5.0


@dataclass(frozen=True)
class Shown:
    """The tables and pictures of an invocation."""

    invocation: Invocation
    tables: Sequence[Table]
    pictures: Pictures


def saved_page(title: str, shown: Sequence[Shown], say: Callable[[str], None]) -> str:
    """The page's text.

    Args:
        say: is told which pictures cannot be drawn, and how many are, for those who wait.

    Raises:
        OutputError: a picture cannot be drawn, because no file can be written.
    """
    total = sum(len(invocation_shown.pictures) for invocation_shown in shown)
    drawn, said_at = 0, time.monotonic()

    def picture(draw: Callable[[Path], None], caption: str) -> str:
        nonlocal drawn, said_at
        try:
            part = html_picture(draw, caption)
        except UsageError as error:
            say(f"warning: {error}")
            part = f'<p class="note">{html.escape(str(error))}</p>'
        drawn += 1
        if drawn < total and time.monotonic() - said_at >= _SILENT_S:
            said_at = time.monotonic()
            say(f"{drawn} of {total} pictures are done")
        return part

    return html_page(title, [part for invocation_shown in shown for part in _parts(invocation_shown, picture)])


def _parts(shown: Shown, picture: Callable[[Callable[[Path], None], str], str]) -> list[str]:
    invocation = shown.invocation
    heading = html.escape(f"{invocation.command}, {invocation.name}")
    # What was not run by the command line has arguments that begin with something else.
    lines = [shlex.join(["cs336sys", *run.arguments]) for run in invocation.runs if run.arguments]
    return [
        f"<h2>{heading}</h2>",
        *(f"<pre>{html.escape(line)}</pre>" for line in dict.fromkeys(lines)),
        *(picture(draw, f"{invocation.command}: {name}") for name, draw in shown.pictures.items()),
        *(html_table(table, "h3") for table in shown.tables),
    ]
