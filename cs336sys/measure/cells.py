"""Measures the cells of a sweep in a worker process, so that no cell can end the sweep or keep memory from the next.

The worker imports torch; its parent need not, and never creates a CUDA context of its own. It is replaced after a cell
that ran out of memory, crashed or timed out, because memory stays held by tracebacks and by the allocator's cache, and
after one that could not be captured in a CUDA graph, because parts of torch may still be capturing.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cs336sys.errors import CapabilityError, CaptureError, UsageError
from cs336sys.processes import cause_of_death, ctrl_c_ignored, imported, run_worker
from cs336sys.results import Run, Samples, Status

Progress = Callable[[str], None]

# How long a worker that has nothing to do may take to end its own helpers (compiler processes) and exit.
_EXIT_S = 10.0

# What allocators outside torch.OutOfMemoryError say when memory runs out.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: numbers when ``status`` is ``ok``, one sentence of ``reason`` otherwise.

    Attributes:
        refused: the cell failed before anything was run: the process that measures can go on.
        spoilt: the process that measures cannot go on, whatever the status.
    """

    status: Status
    samples: dict[str, Samples] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    refused: bool = False
    spoilt: bool = False

    @property
    def leaves_worker_sound(self) -> bool:
        return not self.spoilt and (self.refused or self.status in ("ok", "unsupported", "wrong"))


# Called in the worker with a cell's configuration; reports what it is doing through the second argument.
Measure = Callable[[dict[str, Any], Progress], Outcome]


@dataclass(frozen=True)
class _Child:
    """A started process and the pipe to it."""

    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection

    def receive(self, timeout_s: float | None) -> Run | Outcome | str | None:
        """Its next message, an ``error`` outcome when it died, None when the time is up."""
        ready = multiprocessing.connection.wait([self.connection, self.process.sentinel], timeout_s)
        if not ready:
            return None
        if self.connection in ready:
            with contextlib.suppress(EOFError, ConnectionResetError):
                return self.connection.recv()
        self.process.join()
        exit_code = self.process.exitcode
        assert exit_code is not None
        return Outcome("error", reason=f"the measuring process {cause_of_death(exit_code)}")

    def kill(self) -> None:
        """Kill it and all that it started."""
        process_id = self.process.pid
        assert process_id is not None
        try:
            os.killpg(process_id, signal.SIGKILL)
        except ProcessLookupError:
            # It has not made its own process group yet.
            self.process.kill()


class Worker:
    """A process that measures one cell after another.

    Args:
        measure: where to find the :data:`Measure` function, as ``package.module:function``; a name and not the function
            itself, so that the parent need not import its module.
        arguments: the command line, for the run's record.
    """

    def __init__(self, measure: str, arguments: tuple[str, ...] = ()):
        self._measure = measure
        self._arguments = arguments
        self._child: _Child | None = None
        self._run: Run | None = None
        self._is_measuring = False

    @property
    def run(self) -> Run:
        """The machine that the worker found itself on.

        Raises:
            CapabilityError: the worker could not start.
        """
        if self._run is None:
            self._start()
        assert self._run is not None
        return self._run

    def measure(self, configuration: dict[str, Any], *, timeout_s: float | None, progress: Progress) -> Outcome:
        """Measure one cell; whatever goes wrong in it comes back as an outcome.

        Raises:
            UsageError, CapabilityError: the worker could not start.
        """
        child = self._child or self._start()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        child.connection.send(configuration)
        self._is_measuring = True
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            message = child.receive(remaining)
            if isinstance(message, str):
                progress(message)
                continue
            if message is None:
                self.close()
                return Outcome("timeout", reason=f"not done after {timeout_s:g} s")
            assert isinstance(message, Outcome)
            self._is_measuring = False
            if not message.leaves_worker_sound:
                self.close()
            return message

    def close(self) -> None:
        """End the worker: by itself when it waits for the next cell, else kill it and all that it started."""
        child = self._child
        if child is None:
            return
        child.connection.close()
        if not self._is_measuring:
            child.process.join(_EXIT_S)
        if child.process.is_alive():
            child.kill()
        child.process.join()
        self._child = None
        self._is_measuring = False

    def _start(self) -> _Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        args = (os.getpid(), f"{__name__}:{_serve.__name__}", theirs, self._measure, self._arguments)
        process = context.Process(target=run_worker, args=args)
        self._child = child = _Child(process, ours)
        with ctrl_c_ignored():
            process.start()
        theirs.close()
        message = child.receive(None)
        if isinstance(message, Outcome):
            self.close()
            raise CapabilityError(f"the measuring process did not start: {message.reason}")
        assert isinstance(message, Run)
        # A replaced worker goes on with its predecessor's run.
        self._run = self._run or message
        return child


def _serve(connection: multiprocessing.connection.Connection, measure: str, arguments: tuple[str, ...]) -> None:
    """What a worker does: describe this machine, then measure configurations until the parent closes the pipe."""
    measure_cell = imported(measure)
    from cs336sys.measure.environment import new_run

    connection.send(new_run(arguments))
    with contextlib.suppress(EOFError):
        while True:
            configuration = connection.recv()
            connection.send(guarded(measure_cell, configuration, connection.send))
            release_memory()


def guarded(measure_cell: Measure, configuration: dict[str, Any], send: Progress) -> Outcome:
    """Run one cell and turn what it raises into its status."""
    stage = "start"

    def progress(text: str) -> None:
        nonlocal stage
        stage = text
        send(text)

    try:
        return measure_cell(configuration, progress)
    except (CapabilityError, UsageError) as error:
        return Outcome("unsupported", reason=str(error), spoilt=isinstance(error, CaptureError))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "triton":
            return Outcome("unsupported", reason="needs the package triton, which is not installed")
        if _is_out_of_memory(error):
            return Outcome("oom", reason=f"out of memory at {stage}: {_first_sentences(error)}")
        traceback.print_exc()
        return Outcome("error", reason=f"{type(error).__name__} at {stage}: {_first_sentences(error)}")


def _is_out_of_memory(error: BaseException | None) -> bool:
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
            return True
        # Compilers wrap what the compiled code raised.
        error = error.__cause__
    return False


def _first_sentences(error: BaseException) -> str:
    """An error's message, short enough for a table: its first line, at most two sentences."""
    # The CPU allocator puts the place of its check before what happened.
    text = re.sub(r"\[enforce fail at .*?\] .*?\. ", "", str(error).strip())
    lines = text.splitlines() or [type(error).__name__]
    return ". ".join(lines[0].split(". ")[:2]).rstrip(".")


def release_memory() -> None:
    """Free what a cell left behind: compiled code, garbage, the GPU memory that torch's allocator keeps."""
    import torch

    # Imports the compiler, which takes more than a second and about as long again when the process ends.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
