"""The worker process that measures the cells of a sweep, so that none can end the sweep or keep memory from the next.

The worker imports torch, its parent need not. It is replaced after a cell that ran out of memory, crashed or timed out,
and after one that could not be captured in a CUDA graph, because parts of torch may still be capturing.
"""

import contextlib
import functools
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cs336sys.errors import DEBUG_VARIABLE, CapabilityError, CaptureError, LostProcessError, UsageError, UserCodeError
from cs336sys.machine.late_imports import why_no_triton
from cs336sys.processes.caches import use_private_caches
from cs336sys.processes.child import imported
from cs336sys.processes.parent import Guarded, call_guarded, cause_of_death, out_of_memory_kills
from cs336sys.results.model import Run, Samples, Status
from cs336sys.settings.course_package import telling_import_errors

Progress = Callable[[str], None]

# How long a worker that has nothing to do may take to end its own helpers (compiler processes) and exit.
_EXIT_S = 10.0

# What the errors of allocators say when memory runs out. The second is that of torch.OutOfMemoryError, too, a
# RuntimeError, whose type would have to be imported with torch.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one cell: numbers when ``status`` is ``ok``, one sentence of ``reason`` otherwise.

    Attributes:
        refused: an ``error`` before anything was run, or in the user's code, after which the worker can go on.
        spoilt: the worker cannot go on, whatever the status.
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
    """The process of a :class:`Worker`, and the pipe to it."""

    guarded: Guarded
    connection: multiprocessing.connection.Connection
    kills_before: int | None = field(default_factory=out_of_memory_kills)  # At the child's start.

    def receive(self, timeout_s: float | None) -> Run | Outcome | str | None:
        """Return the process's next message, or an ``oom`` or ``error`` outcome if it died; None if the time is up."""
        try:
            if not self.connection.poll(timeout_s):
                return None
            message = self.connection.recv_bytes()
        except (EOFError, OSError):  # It may have died in the middle of a message.
            cause = "closed its connection"
            if self.guarded.has_ended(_EXIT_S):
                cause = cause_of_death(self.guarded.process.returncode, self.kills_before)
            # The kernel kills with SIGKILL where memory has run out, and counts it.
            is_killed = self.guarded.process.returncode == -signal.SIGKILL
            ran_out = is_killed and self.kills_before is not None and (out_of_memory_kills() or 0) > self.kills_before
            return Outcome("oom" if ran_out else "error", reason=f"the measuring process {cause}")
        try:
            return pickle.loads(message)
        except Exception as error:
            return Outcome("error", reason=f"cannot read the measuring process's answer: {_first_sentences(error)}")


class Worker:
    """A process that measures one cell after another.

    Args:
        measure: where to find the :data:`Measure` function, as ``package.module:function``; a name and not the function
            itself, so that the parent need not import its module.
        arguments: the command line, for the run's record.
        silence_s: how long the process may take to start, and then until the first message of a cell. A cell that
            starts ranks ends them when they hang, but may hang itself before. None: as long as it takes.

    Attributes:
        run: the machine that the worker found itself on; None before it has started.
    """

    def __init__(self, measure: str, arguments: tuple[str, ...] = (), *, silence_s: float | None = None):
        self._measure = measure
        self._arguments = arguments
        self._silence_s = silence_s
        self._child: _Child | None = None
        self.run: Run | None = None
        self._is_busy = False

    def start(self, *, timeout_s: float | None = None) -> Outcome | None:
        """Start the process unless there is one; :meth:`measure` does so, too.

        Return None, or the outcome of the cell that waited for it: ``timeout``, or ``error`` where it died though an
        earlier one had started. Raise a CapabilityError where none has ever started, and a UsageError where a package
        of the user's cannot be imported.
        """
        if self._child is not None and self._child.guarded.process.poll() is None:
            return None
        self.close()
        self._is_busy = True  # A process that does not start is killed by close(), not waited for.
        timeout_s = self._silence_s if timeout_s is None else timeout_s
        self._child = child = _Child(*call_guarded(f"{__name__}:{_serve.__name__}", self._measure, self._arguments))
        message = child.receive(timeout_s)
        if isinstance(message, Run):
            self.run = self.run or message  # A replaced worker goes on with its predecessor's run.
            self._is_busy = False
            return None
        self.close()
        if message is None:
            return Outcome("timeout", reason=f"the measuring process did not start within {timeout_s:g} s")
        assert isinstance(message, Outcome)
        if message.status == "unsupported":
            raise UsageError(message.reason)  # As _serve() says where a package of the user's cannot be imported.
        reason = f"the measuring process did not start: {message.reason}"
        if self.run is None:
            raise CapabilityError(reason)
        return Outcome("error", reason=reason)

    def measure(self, configuration: dict[str, Any], *, timeout_s: float | None, progress: Progress) -> Outcome:
        """Measure one cell; whatever goes wrong in it is an outcome, but a CapabilityError that no process starts.

        ``timeout_s`` is how long the cell may take, and as long before it the process to start.
        """
        failure = self.start(timeout_s=timeout_s)
        if failure is not None:
            return failure
        child = self._child
        assert child is not None
        limit_s = min((limit for limit in (timeout_s, self._silence_s) if limit is not None), default=None)
        sent_s = time.monotonic()
        self._is_busy = True  # Before it is sent: an interruption in between must not take it for idle.
        with contextlib.suppress(OSError):  # That the process has died is noticed when its answer is read.
            child.connection.send(configuration)
        while True:
            remaining = None if limit_s is None else max(0.0, sent_s + limit_s - time.monotonic())
            message = child.receive(remaining)
            if isinstance(message, str):
                limit_s = timeout_s  # From its first message on, only the cell's own limit counts.
                progress(message)
                continue
            if message is None:
                self.close()
                return Outcome("timeout", reason=f"not done after {limit_s:g} s")
            assert isinstance(message, Outcome)
            self._is_busy = False
            if not message.leaves_worker_sound:
                self.close()
            return message

    def close(self) -> None:
        """End the worker: let it exit when it waits for the next cell, else kill it and all that it started."""
        child = self._child
        if child is None:
            return
        if not self._is_busy:
            child.connection.close()  # At which it exits.
            child.guarded.has_ended(_EXIT_S)
        child.guarded.kill()
        child.connection.close()
        self._child = None
        self._is_busy = False


class WorkerHere:
    """A stand-in for :class:`Worker` where cells need objects that this process alone has: it measures them itself.

    Errors of a cell come back as outcomes, too, but nothing ends a cell that takes too long, and one that kills its
    process kills this one.
    """

    def __init__(self, measure: str, arguments: tuple[str, ...] = ()):
        use_private_caches()
        with telling_import_errors():
            self._measure_cell = imported(measure)
        self._arguments = arguments

    @functools.cached_property
    def run(self) -> Run:
        run: Run = imported("cs336sys.machine.environment:new_run")(self._arguments)
        return run

    def start(self, *, timeout_s: float | None = None) -> Outcome | None:
        """Start nothing: this process runs."""
        return None

    def measure(self, configuration: dict[str, Any], *, timeout_s: float | None, progress: Progress) -> Outcome:
        """Measure one cell, as :meth:`Worker.measure`."""
        outcome = guarded(self._measure_cell, configuration, progress)
        release_memory()
        return outcome

    def close(self) -> None:
        """End nothing."""


class _ParentGone(BaseException):
    """Nobody waits for this cell any more; no Exception, which would be taken for the cell's."""


def _serve(connection: multiprocessing.connection.Connection, measure: str, arguments: tuple[str, ...]) -> None:
    """Serve as a worker: describe this machine, then measure configurations until the parent closes the pipe."""

    def send(message: Run | Outcome | str) -> None:
        try:
            connection.send(message)
        except ConnectionError:
            raise _ParentGone from None

    try:
        with telling_import_errors():
            measure_cell = imported(measure)
    except UsageError as error:
        send(Outcome("unsupported", reason=str(error)))
        return
    new_run = imported("cs336sys.machine.environment:new_run")
    # The connection is reset, not closed, where the parent ended with messages unread.
    with contextlib.suppress(EOFError, ConnectionResetError, _ParentGone):
        send(new_run(arguments))
        while True:
            configuration = connection.recv()
            send(guarded(measure_cell, configuration, send))
            release_memory()


def guarded(measure_cell: Measure, configuration: dict[str, Any], send: Progress) -> Outcome:
    """Run one cell, and return its outcome also where it raises; reasons name the stage that it has come to."""
    stage = "start"

    def progress(text: str) -> None:
        nonlocal stage
        stage = text
        send(text)

    try:
        return measure_cell(configuration, progress)
    except (CapabilityError, UsageError) as error:
        return Outcome("unsupported", reason=str(error), spoilt=isinstance(error, CaptureError))
    except (UserCodeError, LostProcessError) as error:
        if DEBUG_VARIABLE in os.environ:
            traceback.print_exc()
        if isinstance(error, LostProcessError):  # A rank, or another process of the cell's.
            return Outcome("error", reason=f"{_first_sentences(error)}, at {stage}")
        # ``refused``: the worker goes on, unless an assertion failed on its GPU, which it cannot use any more then.
        return Outcome("error", reason=str(error), refused="CUDA error" not in str(error))
    except Exception as error:
        if isinstance(error, ImportError) and (reason := why_no_triton()) is not None:
            return Outcome("unsupported", reason=f"needs {reason}")
        if is_out_of_memory(error):
            return Outcome("oom", reason=f"out of memory at {stage}: {_first_sentences(error)}")
        traceback.print_exc()
        return Outcome("error", reason=f"{type(error).__name__} at {stage}: {_first_sentences(error)}")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, on whichever device; the error may be a cause of this one."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__  # Compilers wrap what the compiled code raised.
    return False


def _first_sentences(error: BaseException) -> str:
    """Return an error's message, short enough for a table: its first line, at most two sentences."""
    # The CPU allocator's message begins with the place of its check.
    text = re.sub(r"\[enforce fail at .*?\] .*?\. ", "", str(error).strip())
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # Compilers write where the error was raised on a line of its own, which ends in a colon.
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return ". ".join(first.split(". ")[:2]).rstrip(".")


def release_memory() -> None:
    """Free what a cell left behind: compiled code, garbage, the GPU memory that torch and cuBLAS keep."""
    import torch

    from cs336sys.machine.device import free_gpu_memory

    if "torch._dynamo" in sys.modules:  # Else this would import the compiler, in more than a second.
        torch.compiler.reset()
    free_gpu_memory()
