"""Which of several ranks a process is, and how worker processes begin and end with their parents. No torch."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# PR_SET_PDEATHSIG of prctl(2): when the parent dies, the kernel sends this process a signal.
_SET_PARENT_DEATH_SIGNAL = 1

# Set for programs that run under a profiler, which writes what it has seen when they exit.
_PROFILER_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")


@dataclass(frozen=True)
class RankIdentity:
    """Which rank a process is. ``local_rank`` counts the ranks of one machine, and selects the GPU."""

    rank: int
    world_size: int
    local_rank: int


def started_outside() -> RankIdentity | None:
    """Which of the ranks started by torchrun or Slurm this process is; None if it is not one of them."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return RankIdentity(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


def become_worker(parent: int) -> bool:
    """Make this process the first of a process group that can be killed as a whole, and let it die with its parent.

    Its standard output becomes standard error: results are printed by the parent, what a worker prints is log.

    Args:
        parent: id of the process that started this one.

    Returns:
        False if the parent has already ended: then this process should end, too.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)
    return os.getppid() == parent


def run_worker(parent: int, function: str, *args: Any) -> None:
    """What a spawned process does from its start to its end: become a worker and call a function.

    Args:
        parent: id of the process that started this one.
        function: where to find it, as ``package.module:function``. To unpickle a function would import its module
            before this process becomes a worker.
    """
    if not become_worker(parent):
        return
    imported(function)(*args)
    if any(name in os.environ for name in _PROFILER_VARIABLES):
        return
    # The way multiprocessing ends processes that it forked. Python's own would free all that torch consists of: 0.5 s.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def imported(name: str) -> Any:
    """What ``package.module:name`` names, imported by a process that will keep it to its end.

    Nothing imported becomes garbage. That Python does not look for any meanwhile saves a tenth of the time torch takes;
    that it leaves out what was imported whenever it looks later saves 0.15 s each time.
    """
    module, attribute = name.split(":")
    gc.disable()
    try:
        found = getattr(importlib.import_module(module), attribute)
        gc.freeze()
    finally:
        gc.enable()
    return found


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C: their parent decides what happens to them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def cause_of_death(exit_code: int) -> str:
    """How a process ended that should not have ended, phrased to follow "the process"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ": out of host memory, or killed from outside" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
