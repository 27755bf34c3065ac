"""Progress of a sweep: a bar on a terminal, and a line for every finished cell where standard error is a file."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cs336sys.command_line.faults import say
from cs336sys.results.model import Cell, distinguishing_settings
from cs336sys.tables.numbers import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress

# Written by torch.profiler for tracers of the kernel, whenever it starts and stops.
_TRACER_LINES = b"USDT:"
# A cell that takes longer reports its stage, so that one that waits for ever is noticed.
_SILENT_S = 30.0
# How long the last lines may take: busy cores delay the thread that passes them on for seconds, and a reader of
# standard error that has stopped delays it for ever.
_PASSED_ON_S = 30.0
# Written to the pipe to mark the end of all that was written before; it occurs in no text.
_END_MARK = b"\0\0 all of it\n"


class SweepProgress:
    """Reports of a sweep while it goes on; this class shows nothing."""

    def at_stage(self, stage: str) -> None:
        """Report the stage of the cell that is measured now."""

    def cell_done(self, cell: Cell, took_s: float | None) -> None:
        """Report a cell that was measured in so many seconds, or taken from a file (None)."""


@contextlib.contextmanager
def showing_progress(
    command: str, configurations: Sequence[Mapping[str, Any]], *, is_shown: bool, measured_here: bool = False
) -> Iterator[SweepProgress]:
    """Show the progress of a sweep over ``configurations`` on standard error, if it is shown here.

    A process that measures cells itself (``measured_here``) cannot read its own standard error: native code that writes
    more than a pipe holds while it keeps Python's lock would wait for ever.
    """
    from rich.console import Console

    reading_stderr: Callable[..., contextlib.AbstractContextManager[Any]] = _stderr_by_lines
    if measured_here:
        reading_stderr = contextlib.nullcontext
    if not is_shown:
        yield SweepProgress()
    elif Console(stderr=True).is_terminal and os.environ.get("TERM") != "dumb":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        # A duplicate, as 2 is redirected below; left open for the thread that prints what outlives the sweep.
        console = Console(file=open(os.dup(2), "w"))  # noqa: SIM115
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), "{task.fields[stage]}"
        shown_bar = Progress("{task.description}", *columns, console=console, transient=True)
        # Lines of workers are printed above the bar, or they would be written into it.
        with shown_bar as bar, reading_stderr(functools.partial(_print_above, bar)):
            yield _Bar(bar, command, len(configurations))
    else:
        with (
            reading_stderr(functools.partial(_write_to, os.dup(2))),
            contextlib.closing(_Lines(command, configurations)) as lines,
        ):
            yield lines


class _Lines(SweepProgress):
    """``bench: 2 of 8: ok: size small, precision bf16: 12.3 s, about 1 min 14 s left``

    And of a cell that takes long, at 30 s, 1 min, 2 min, ...: ``bench: 3 of 8: timing steps, after 30 s``
    """

    def __init__(self, command: str, configurations: Sequence[Mapping[str, Any]]):
        self._command = command
        self._count = len(configurations)
        self._settings = distinguishing_settings(configurations)
        self._done = 0
        self._durations_s: list[float] = []
        self._stage = ""
        self._cell_ended = threading.Event()
        self.close()  # Before the first stage no cell is measured.

    def at_stage(self, stage: str) -> None:
        self._stage = stage
        if self._cell_ended.is_set():
            self._cell_ended = threading.Event()
            threading.Thread(target=self._tell_stages, args=(self._done + 1, self._cell_ended), daemon=True).start()

    def close(self) -> None:
        """Report no more of the cell."""
        self._cell_ended.set()

    def _tell_stages(self, number: int, cell_ended: threading.Event) -> None:
        """Report a cell's stage after a time, and again after as long as it has taken by then, until it ends."""
        wait_s, waited_s = _SILENT_S, 0.0
        while not cell_ended.wait(wait_s):
            waited_s += wait_s
            say(f"{self._command}: {number} of {self._count}: {self._stage}, after {format_duration(waited_s)}")
            wait_s = waited_s

    def cell_done(self, cell: Cell, took_s: float | None) -> None:
        self.close()
        self._done += 1
        settings = ", ".join(f"{name} {cell.configuration.get(name)}" for name in self._settings)
        outcome = cell.status if cell.reason is None else f"{cell.status} ({cell.reason})"
        time = "from the file" if took_s is None else format_duration(took_s)
        if took_s is not None:
            self._durations_s.append(took_s)
        cells_left = self._count - self._done
        if cells_left and self._durations_s:
            remaining_s = cells_left * sum(self._durations_s) / len(self._durations_s)
            time += f", about {format_duration(remaining_s)} left"
        say(": ".join(filter(None, [self._command, f"{self._done} of {self._count}", outcome, settings, time])))


@contextlib.contextmanager
def _stderr_by_lines(write: Callable[[bytes], None]) -> Iterator[None]:
    """Call ``write`` with each line that this process, and those that it starts meanwhile, write to standard error."""
    read_end, write_end = os.pipe()
    stderr = os.dup(2)
    os.dup2(write_end, 2)
    all_is_passed_on = threading.Event()
    threading.Thread(target=_pass_on, args=(read_end, write, all_is_passed_on), daemon=True).start()
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        # The thread goes on for processes that outlive this: a mark, not the pipe's end, says that ours is passed on.
        os.write(write_end, _END_MARK)
        os.close(write_end)
        all_is_passed_on.wait(_PASSED_ON_S)


def _pass_on(descriptor: int, write: Callable[[bytes], None], all_is_passed_on: threading.Event) -> None:
    """Write the lines that come from a pipe, but those of tracers; set the event at the mark of their end."""
    with open(descriptor, "rb") as lines:
        for line in lines:
            text = line.removesuffix(_END_MARK)
            if text and not text.startswith(_TRACER_LINES):
                # Read on even if this fails: a full pipe that nobody reads would block those who write to it.
                with contextlib.suppress(OSError):
                    write(text)
            if line.endswith(_END_MARK):
                all_is_passed_on.set()


def _print_above(bar: "Progress", line: bytes) -> None:
    with bar.live._lock:  # rich computes where the bar is, writes later, and must not redraw it in between.
        bar.console.print(line.decode(errors="replace").rstrip(), markup=False, highlight=False)


def _write_to(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


class _Bar(SweepProgress):
    def __init__(self, bar: "Progress", command: str, count: int):
        self._bar = bar
        self._task = bar.add_task(command, total=count, stage="")

    def at_stage(self, stage: str) -> None:
        self._bar.update(self._task, stage=stage)

    def cell_done(self, cell: Cell, took_s: float | None) -> None:
        self._bar.advance(self._task)
