"""Start processes that end with this one, and say what they died of."""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336sys.processes.caches import use_private_caches

_GUARD = str(Path(__file__).with_name("guard.py"))

# Longer than a guard waits for what it has killed.
_KILL_S = 60.0

# Keeps the working folder off the path of a started Python process: files in it could replace modules that are imported
# before the process has its parent's path. Processes that it spawns in turn inherit this.
_SAFE_PATH = "-P"

# A Python process receives its parent's module path, and then the function to call.
_PROGRAM = (
    "import sys; from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1])); "
    "sys.path[:] = connection.recv(); from cs336sys.processes.child import run_guarded; run_guarded(connection)"
)


class Guarded:
    """A program that ends when this process does, however that dies, with all that it has started at any depth.

    Args:
        command: the program, and its arguments.
        descriptors: of open files that it inherits.
        options: of :class:`subprocess.Popen`.

    Attributes:
        process: the guard (``guard.py``), which ends as the program did, after all that the program has started.
    """

    def __init__(self, command: Sequence[str], *, descriptors: Sequence[int] = (), **options: Any):
        read_end, write_end = os.pipe()
        # Closed by the kernel when this process dies.
        self._kill_pipe = open(write_end, "wb", buffering=0)  # noqa: SIM115
        try:
            inherited = ",".join(map(str, descriptors))
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARD, str(read_end), inherited, *command],  # See guard.py.
                pass_fds=(read_end, *descriptors),
                # Ctrl-C on a terminal reaches this process alone, which decides what happens to the program.
                start_new_session=True,
                **options,
            )
        finally:
            os.close(read_end)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait until the program has ended, and return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.returncode is not None

    def kill(self) -> None:
        """Kill the program and all that it has started, unless they have ended."""
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._kill_pipe.write(b"k")
            if not self.has_ended(_KILL_S):
                self.process.kill()
                self.process.wait()
        self._kill_pipe.close()


def run_guarded_program(
    command: Sequence[str], *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as :class:`Guarded`, with further environment ``variables``, and return what it printed.

    It is killed when its time is up: subprocess.TimeoutExpired.
    """
    program = Guarded(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | (variables or {}),
    )
    try:
        output, errors = program.process.communicate(timeout=timeout_s)
    finally:
        program.kill()  # If it has ended, this only closes our end of its pipe.
    return subprocess.CompletedProcess(command, program.process.returncode, output, errors)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command ``python -m module arguments``, but with the path of this process as its path."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [*_python(), "-c", program, *arguments]


def _python() -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # what multiprocessing uses, too
    return [sys.executable, *flags, _SAFE_PATH]


def call_guarded(function: str, *args: Any) -> tuple[Guarded, multiprocessing.connection.Connection]:
    """Start a Python process that calls ``function(connection, *args)``, as ``package.module:function``.

    Its standard output becomes standard error: only the parent prints results. Return the process and our end of its
    connection, where the end of file is read after its death; raise a CapabilityError where compiled code would be
    loaded from a folder that others can write to.
    """
    use_private_caches()
    ours, theirs = multiprocessing.Pipe()
    command = [*_python(), "-c", _PROGRAM, str(theirs.fileno())]
    guarded = Guarded(command, descriptors=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
    theirs.close()
    # That it has died is noticed when its first message is read.
    with contextlib.suppress(OSError):
        ours.send(sys.path)  # By itself: the process imports modules by it before it reads what follows.
        ours.send((function, args))
    return guarded, ours


def start_for_good(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process that asks the kernel to die with its parent, from a thread that lives as long as this process.

    For the kernel the parent is a thread: a process that a short-lived thread started dies with that thread.
    """
    started: concurrent.futures.Future[None] = concurrent.futures.Future()
    _start_requests(os.getpid()).put((process, started))
    started.result()


@functools.cache
def _start_requests(process_id: int) -> queue.SimpleQueue:
    """Return the queue of the thread for :func:`start_for_good`: one a process, because a fork has no such thread."""
    requests: queue.SimpleQueue = queue.SimpleQueue()

    def serve() -> None:
        while True:
            process, started = requests.get()
            try:
                process.start()
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

    threading.Thread(target=serve, name="starts processes", daemon=True).start()
    return requests


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Let processes started in this context ignore Ctrl-C: their parent decides what happens to them."""
    if threading.current_thread() is not threading.main_thread():  # Only the main thread may set handlers.
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def out_of_memory_kills() -> int | None:
    """Count the processes that this kernel has killed for lack of memory since it booted; None if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def cause_of_death(exit_code: int, kills_before: int | None) -> str:
    """Say how a process ended, in words that follow "the process"; ``kills_before`` is from when it was started."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    kills = out_of_memory_kills() if exit_code == -signal.SIGKILL else None
    cause = f"was killed by {name}"
    if kills is not None and kills_before is not None and kills > kills_before:
        cause += ", and the kernel has killed for lack of memory since this process was started"
    return cause
