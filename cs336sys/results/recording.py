"""Collect what a command that runs as a function measures and prints, for its caller. Plain data, no torch."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recording:
    """One call of a command.

    Attributes:
        sources: results that the command reads in place of files, by the names that it is called with.
        arguments: the command line that would do the same.
        tables, cells, runs: in the order in which they were made, as in :mod:`cs336sys.results.model`; runs by id.
    """

    sources: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    tables: list[Any] = field(default_factory=list)
    cells: list[Any] = field(default_factory=list)
    runs: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)
current_recording = _current.get


@contextlib.contextmanager
def recording(sources: Mapping[str, Any]) -> Iterator[Recording]:
    """Record what commands do in this context, in which they print no tables."""
    recording = Recording(sources)
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)


def record(run: Any, *cells: Any) -> None:
    """Keep cells and the run that measured them for the caller, where a command runs as a function."""
    if (recording := _current.get()) is not None:
        recording.cells += cells
        recording.runs |= {} if run is None else {run.run_id: run}  # None where no worker could start.


def command_line() -> tuple[str, ...]:
    """Return the arguments of this process, or those that mean what a function was called with."""
    return tuple(sys.argv[1:]) if (recording := _current.get()) is None else recording.arguments
