"""Saved results shown again: which cells were one invocation of a command, and how each command's are shown."""

import contextlib
import html
import importlib
import itertools
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cs336sys.command_line.faults import say
from cs336sys.errors import UsageError, choose_from
from cs336sys.results.model import Cell, Results, Run, Samples, configuration_key, distinguishing_settings, json_text
from cs336sys.results.statistics import Interval
from cs336sys.tables.page import html_page, html_picture, html_table
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, tidy, with_origin
from cs336sys.tables.table import Table, grid_of, with_rows

# Where a command's record (:class:`~cs336sys.tables.saved.SavedCommand`) is not ``SAVED`` in its ``tables.py``.
_ELSEWHERE = {
    "attn": "attention.tables.SAVED_ATTN",
    "flash": "attention.tables.SAVED_FLASH",
    "memprof": "memprof.page.SAVED",
    "precision": "precision.options.SAVED",
    "trace": "trace.difference_tables.SAVED",
}
_FOLDERS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/tables.py"))


def _record(command: str) -> SavedCommand | None:
    """Import a command's record; None where it has none."""
    if command not in _FOLDERS and command not in _ELSEWHERE:
        return None
    module, _, record = _ELSEWHERE.get(command, f"{command}.tables.SAVED").rpartition(".")
    return getattr(importlib.import_module(f"cs336sys.commands.{module}"), record, None)


def can_be_shown(command: str) -> bool:
    """Return whether this version can show cells of a command."""
    return _record(command) is not None


def saved_commands() -> list[str]:
    """Return the commands whose cells can be shown."""
    return list(filter(can_be_shown, sorted({*_FOLDERS, *_ELSEWHERE})))


def saved_command(command: str) -> SavedCommand:
    """Return the record of how a command's cells are shown, or raise a UsageError where there is none."""
    if (record := _record(command)) is None:
        choices = choose_from(command, saved_commands())
        raise UsageError(f"cells of '{command}' cannot be shown by this cs336sys: {choices}")
    return record


@dataclass
class Invocation:
    """The cells that one invocation of a command printed.

    Attributes:
        runs: the run that measured them, after those that it resumed.
        cells: the cells by the key of their configuration.
    """

    command: str
    runs: list[Run] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def run(self) -> Run | None:
        """Return the last run, whose machine a title may name; None where runs had several machines."""
        return self.runs[-1] if self.runs and all(run.machine == self.runs[-1].machine for run in self.runs) else None

    @property
    def name(self) -> str:
        """Return a name that differs from those of other invocations of the command."""
        return f"run {self.runs[-1].run_id[:8]} of {self.runs[-1].time}" if self.runs else "a run not recorded"


def invocations(files: Sequence[Results]) -> list[Invocation]:
    """Return the invocations whose cells these files hold, in their order, every cell once.

    A run with ``--resume`` belongs to the invocation before it in its file that had the same conditions; of cells that
    it measured again the later ones are kept, as it printed them.
    """
    by_run: dict[tuple[str, str], Invocation] = {}
    for results in files:
        # The last invocation so far in this file, by command (which --resume-any goes on with), and by command and
        # conditions (which --resume goes on with).
        latest: dict[str, Invocation] = {}
        latest_alike: dict[tuple[str, str], Invocation] = {}
        for command, run_id in dict.fromkeys((cell.command, cell.run_id) for cell in results.cells):
            run = results.runs.get(run_id)
            if run is None:  # Its record is lost: nobody knows what it resumed, or under which conditions.
                by_run.setdefault((command, run_id), Invocation(command))
                continue
            # To be resumed, a run needs the same conditions, and the same code.
            source = {"source_digest": run.environment.get("source_digest")}
            conditions = json_text(run.conditions | source, sort_keys=True)
            if (command, run_id) not in by_run:  # another file may hold the run, too
                resumed = None
                if "--resume-any" in run.arguments:
                    resumed = latest.get(command)
                elif "--resume" in run.arguments:
                    resumed = latest_alike.get((command, conditions))
                by_run[command, run_id] = resumed or Invocation(command)
                by_run[command, run_id].runs.append(run)
            latest[command] = latest_alike[command, conditions] = by_run[command, run_id]
        for cell in results.cells:
            by_run[cell.command, cell.run_id].cells[configuration_key(cell.configuration)] = cell
    return list({id(invocation): invocation for invocation in by_run.values()}.values())  # Resumed runs share one.


# Errors that tables and pictures raise for cells that another version, or another program, has written.
FAULTS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, StopIteration)


def fault_words(error: Exception) -> str:
    """Say what is wrong with cells, as a predicate: ``lack 'timeline'``."""
    return f"lack {error}" if isinstance(error, KeyError) else f"hold something else than expected ({error})"


@contextlib.contextmanager
def _refusing_faults(invocation: Invocation, done: str = "shown") -> Iterator[None]:
    """Raise a UsageError where cells of another version, or of another program, cannot be ``done``."""
    try:
        yield
    except FAULTS as error:
        raise UsageError(
            f"{invocation.command}, {invocation.name}: the saved cells {fault_words(error)}, so that they cannot be "
            f"{done}; show them with the version that measured them, or measure again"
        ) from error


def shown_cells(invocation: Invocation, statuses: Sequence[str] = ()) -> list[Cell]:
    """Return an invocation's cells of these statuses (of any, without one), with their rounds pooled.

    A UsageError says that cells of its command cannot be shown, or that these lack what that needs.
    """
    command = saved_command(invocation.command)
    with _refusing_faults(invocation):
        cells = command.pooled(list(invocation.cells.values()))
    return [cell for cell in cells if not statuses or cell.status in statuses]


def saved_tables(invocation: Invocation, cells: Sequence[Cell], presentation: Presentation) -> list[Table]:
    """Build the tables of an invocation's :func:`shown_cells`, or raise a UsageError where tables lack values."""
    command = saved_command(invocation.command)
    rows = with_origin(cells, {run.run_id: run for run in invocation.runs})
    with _refusing_faults(invocation):
        tables = tidy(invocation.command, with_rows(*command.tables(rows, invocation.run, presentation)), rows)
        for table in tables:
            for row, column in itertools.product(table.rows, table.all_columns):
                if not isinstance(row.get(column.key), str | int | float | Samples | Interval | None):
                    raise TypeError(f"{column.key} is {row[column.key]}")  # Which cannot be written.
            grid_of(table)
    return tables


def marked(invocation: Invocation, tables: Sequence[Table]) -> list[Table]:
    """Add to the tables' titles which invocation it was."""
    return [replace(table, title=f"{table.title} ({invocation.name})") for table in tables]


def sound_cells_and_tables(
    invocation: Invocation, statuses: Sequence[str], presentation: Presentation
) -> tuple[list[Cell], list[Table]]:
    """Return the :func:`shown_cells` and their :func:`saved_tables`; warn of cells that cannot be shown, and omit them.

    A UsageError says that no cell can be shown, or that each can alone but not all together.
    """

    def build() -> tuple[list[Cell], list[Table]]:
        cells = shown_cells(invocation, statuses)
        return cells, saved_tables(invocation, cells, presentation) if cells else []

    try:
        return build()
    except UsageError:
        sentences = _leave_out_unsound(invocation, presentation)
        if not sentences:
            raise
        for sentence in sentences:
            say(f"warning: {sentence}")
        return build()


def saved_pictures(
    invocation: Invocation, cells: Sequence[Cell], presentation: Presentation = Presentation()
) -> Pictures:
    """Return the pictures that an invocation's :func:`shown_cells` have data for.

    This, and drawing them, raises a UsageError where the cells lack what that needs.
    """
    command = saved_command(invocation.command)
    with _refusing_faults(invocation):
        pictures = command.pictures(cells, invocation.run, presentation)
    return {
        name: _refusing_faults(invocation, f"drawn as the picture '{name}'")(draw) for name, draw in pictures.items()
    }


def _leave_out_unsound(invocation: Invocation, presentation: Presentation) -> list[str]:
    """Remove the cells that cannot be shown alone, unless none can, and return a sentence on each that says why."""
    faults = {}
    for key, cell in invocation.cells.items():
        single = Invocation(invocation.command, invocation.runs, {key: cell})
        try:
            saved_tables(single, shown_cells(single), presentation)
        except UsageError as error:
            cause = error.__cause__  # The error is about the invocation; its cause says what is wrong with the cell.
            faults[key] = fault_words(cause) if isinstance(cause, FAULTS) else f"cannot be shown: {error}"
    if len(faults) == len(invocation.cells):
        return []
    identifying = distinguishing_settings([cell.configuration for cell in invocation.cells.values()])
    sentences = []
    for key, reason in faults.items():
        settings = invocation.cells.pop(key).configuration
        # No setting and value takes more than 80 characters of a sentence.
        label = ", ".join(f"{name} {settings[name]}"[:80] for name in identifying if name in settings)
        place = f"{invocation.command}, {invocation.name}"
        sentences.append(f"{place}: the values of {label or 'the cell'} {reason}, and it is left out")
    return sentences


# Progress is reported so often: a picture takes a second, and a page may have hundreds.
_SILENT_S = 5.0


def saved_page(title: str, shown: Sequence[tuple[Invocation, Sequence[Table], Pictures]]) -> str:
    """Return the text of a page with invocations' tables and pictures; say how many pictures are drawn.

    An OutputError says that a picture cannot be drawn, because no file can be written.
    """
    total, drawn, reported_at_s = sum(len(pictures) for *_, pictures in shown), 0, time.monotonic()
    parts = []
    for invocation, tables, pictures in shown:
        lines = [shlex.join(["cs336sys", *run.arguments]) for run in invocation.runs if run.arguments]
        parts.append(f"<h2>{html.escape(f'{invocation.command}, {invocation.name}')}</h2>")
        parts += [f"<pre>{html.escape(line)}</pre>" for line in dict.fromkeys(lines)]
        for name, draw in pictures.items():
            try:
                parts.append(html_picture(draw, f"{invocation.command}: {name}"))
            except UsageError as error:  # The page says why it cannot be drawn.
                say(f"warning: {error}")
                parts.append(f'<p class="note">{html.escape(str(error))}</p>')
            drawn += 1
            if drawn < total and time.monotonic() - reported_at_s >= _SILENT_S:
                reported_at_s = time.monotonic()
                say(f"{drawn} of {total} pictures are done")
        parts += [html_table(table, "h3") for table in tables]
    return html_page(title, parts)
