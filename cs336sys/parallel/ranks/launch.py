"""Runs a function on N ranks: spawns them on this machine, or joins those that torchrun or Slurm already started.

A spawned rank is a process of its own. All are killed as soon as one fails, when Ctrl-C is pressed, and when the parent
dies. They find each other through a file in a fresh temporary directory, so runs never meet: no port is chosen.

Ranks started from outside are recognized by ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, which torchrun sets; they find
each other through ``MASTER_ADDR`` and ``MASTER_PORT``. Under Slurm, export those two and start every rank with
``srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID cs336sys ...'``.
"""

import datetime
import functools
import itertools
import multiprocessing.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ranks.process import join_process_group, leave_process_group
from cs336sys.parallel.ranks.spawned import SpawnedRanks
from cs336sys.processes import RankIdentity, started_outside

BACKENDS = ("gloo", "nccl")


def run(
    function: Callable[..., Any], *args: Any, world_size: int, backend: str | None = None, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return what the ranks returned, in rank order.

    The default process group exists while the function runs. Like any program that spawns, a script must call this
    under ``if __name__ == "__main__"``.

    Args:
        function: defined at the top level of a module; it, its arguments and its results are pickled. Results should
            be plain values or CPU tensors.
        backend: ``nccl``, one GPU a rank, or ``gloo`` on the CPU; None is NCCL where there are GPUs.
        timeout_s: how long a collective waits for other ranks, and a rank that returned for those that did not.

    Raises:
        UsageError: the world size is not positive or not that of the ranks started from outside, the backend is
            unknown, or the function cannot be pickled.
        CapabilityError: there are more ranks than GPUs; nothing was started.
        UsageError, CapabilityError: a rank raised this.
        cs336sys.parallel.ranks.spawned.RankError: a spawned rank raised anything else, was killed, exited or hangs.
    """
    with start(world_size, backend=backend, timeout_s=timeout_s) as ranks:
        return ranks.run(function, *args)


def start(
    world_size: int, *, backend: str | None = None, timeout_s: float = 120.0, high_priority: bool = False
) -> "Ranks":
    """Ranks that run one function after another: ``with start(2) as ranks: ranks.run(function, ...)``.

    After an error the ranks are gone; start new ones. Arguments and errors as in :func:`run`, and:

    Args:
        high_priority: let NCCL's kernels go before others that wait for the GPU; no effect on Gloo.
    """
    backend = backend or _default_backend()
    outside = started_outside()
    _check(world_size, backend, timeout_s, outside)
    if outside is not None:
        return JoinedRanks(outside, backend, timeout_s, high_priority)
    _check_gpus(world_size, backend)
    return SpawnedRanks(world_size, backend, timeout_s, high_priority)


_kept: dict[tuple, "Ranks"] = {}


def kept(
    world_size: int, *, backend: str | None = None, timeout_s: float = 120.0, high_priority: bool = False
) -> "Ranks":
    """The ranks of the last call if that asked for the same, and else new ones: to start ranks takes seconds.

    They stay until this process asks for others or ends; so does what their functions keep in modules, and the memory
    that torch caches. Arguments and errors as in :func:`start`.
    """
    asked = (world_size, backend or _default_backend(), timeout_s, high_priority)
    if asked in _kept and _kept[asked].alive:
        return _kept[asked]
    end_kept()
    _end_kept_at_exit()
    _kept[asked] = start(world_size, backend=backend, timeout_s=timeout_s, high_priority=high_priority)
    return _kept[asked]


def end_kept() -> None:
    """Let the ranks of :func:`kept` leave, those that no error ended."""
    while _kept:
        _, ranks = _kept.popitem()
        if ranks.alive:
            ranks.__exit__(None, None, None)


@functools.cache
def _end_kept_at_exit() -> None:
    # A process that multiprocessing started waits for its children before it runs what atexit knows.
    multiprocessing.util.Finalize(None, end_kept, exitpriority=1)


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _check(world_size: int, backend: str, timeout_s: float, outside: RankIdentity | None) -> None:
    if world_size < 1:
        raise UsageError(f"world size {world_size}: must be at least 1")
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend '{backend}': choose from {', '.join(BACKENDS)}")
    if not timeout_s > 0:
        raise UsageError(f"timeout {timeout_s} s: must be positive")
    if outside is not None and outside.world_size != world_size:
        raise UsageError(f"world size {world_size}: {outside.world_size} ranks were started, ask for those")


def _check_gpus(needed: int, backend: str) -> None:
    gpus = torch.cuda.device_count()
    if backend == "nccl" and needed > gpus:
        raise CapabilityError(
            f"{needed} ranks on this machine: NCCL needs a GPU for each and torch sees {gpus}; "
            "choose a smaller world size or backend gloo"
        )


class JoinedRanks:
    """The ranks that torchrun or Slurm started, seen from one of them; every rank makes the same calls.

    Attributes:
        alive: false after an error, which other ranks need not have met: nothing can be run any more.
    """

    def __init__(self, identity: RankIdentity, backend: str, timeout_s: float, high_priority: bool):
        self._identity = identity
        # Each process group gets keys of its own in the store: an earlier group's name connections that are closed.
        store = dist.PrefixStore(f"cs336sys-{next(_joined_groups)}", outside_store())
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        _check_gpus_of_all(identity, backend, store)
        join_process_group(identity, backend, store, timeout_s, high_priority)
        self.alive = True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` here and return what all ranks returned; an error leaves as it is.

        A function that refuses (UsageError, CapabilityError) must do so on every rank; then the next one can run.
        """
        try:
            return gather_objects(function(*args))
        except BaseException as error:
            self.alive = isinstance(error, UsageError | CapabilityError)
            error.add_note(f"on rank {self._identity.rank} of {self._identity.world_size}")
            raise

    def __enter__(self) -> "JoinedRanks":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may never come to a collective again, and leaving a group can be one.
        if error_type is None:
            self.alive = False
            leave_process_group()


Ranks = SpawnedRanks | JoinedRanks

_joined_groups = itertools.count()


@functools.cache
def outside_store() -> dist.Store:
    """What ranks that torchrun or Slurm started share besides process groups, from their first moment to their last."""
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _check_gpus_of_all(identity: RankIdentity, backend: str, store: dist.Store) -> None:
    """Let every rank refuse if one must: machines may differ, and the others would wait for its process group."""
    refusal = ""
    try:
        _check_gpus(identity.local_rank + 1, backend)
    except CapabilityError as error:
        refusal = str(error)
    store.set(f"refusal-{identity.rank}", refusal)
    for rank in range(identity.world_size):
        if refusal := store.get(f"refusal-{rank}").decode():
            raise CapabilityError(f"rank {rank}: {refusal}")
