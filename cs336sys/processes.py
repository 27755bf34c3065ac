"""Which of several ranks a process is, and what processes that start others owe each other. No torch."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

# PR_SET_PDEATHSIG of prctl(2): the kernel sends this process the signal when its parent dies.
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True)
class RankIdentity:
    """Which rank a process is. ``local_rank`` counts on its machine alone and chooses the GPU."""

    rank: int
    world_size: int
    local_rank: int


def started_outside() -> RankIdentity | None:
    """This process among the ranks that torchrun or Slurm started; None if it was started alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return RankIdentity(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


def become_worker(parent: int) -> bool:
    """Make this process the first of a group that can be killed as a whole, and let it die with its parent.

    Its standard output becomes standard error: results are the parent's to print, what a worker prints is log.

    Args:
        parent: the process that started this one.

    Returns:
        False if the parent is gone already: then end.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)
    return os.getppid() == parent


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes started in it inherit that Ctrl-C is ignored: their parent decides what becomes of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def cause_of_death(exit_code: int) -> str:
    """How a process ended that should not have, after the words "the process"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ": out of host memory, or killed from outside" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
