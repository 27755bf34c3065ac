"""Runs a function on N ranks: spawns them on this machine, or joins those that torchrun or Slurm already started.

A spawned rank is a process of its own. All are killed as soon as one fails, when Ctrl-C is pressed, and when the parent
dies. They find each other through a file in a fresh temporary directory, so runs never meet: no port is chosen.

Ranks started from outside are recognized by ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, which torchrun sets; they find
each other through ``MASTER_ADDR`` and ``MASTER_PORT``. Under Slurm, export those two and start every rank with
``srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID cs336sys ...'``.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.rank_process import Place, join_process_group, leave_process_group
from cs336sys.parallel.spawned_ranks import SpawnedRanks

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
        cs336sys.parallel.spawned_ranks.RankError: a spawned rank raised anything else, was killed, exited or hangs.
    """
    with start(world_size, backend=backend, timeout_s=timeout_s) as ranks:
        return ranks.run(function, *args)


def start(world_size: int, *, backend: str | None = None, timeout_s: float = 120.0) -> "SpawnedRanks | JoinedRanks":
    """Ranks that run one function after another: ``with start(2) as ranks: ranks.run(function, ...)``.

    Arguments and errors as in :func:`run`. After an error the ranks are gone; start new ones.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    outside = started_outside()
    _check(world_size, backend, timeout_s, outside)
    if outside is not None:
        return JoinedRanks(outside, backend, timeout_s)
    return SpawnedRanks(world_size, backend, timeout_s)


def started_outside() -> Place | None:
    """This process's place among ranks that torchrun or Slurm started; None if it was started alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return Place(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


def _check(world_size: int, backend: str, timeout_s: float, outside: Place | None) -> None:
    if world_size < 1:
        raise UsageError(f"world size {world_size}: must be at least 1")
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend '{backend}': choose from {', '.join(BACKENDS)}")
    if not timeout_s > 0:
        raise UsageError(f"timeout {timeout_s} s: must be positive")
    if outside is not None and outside.world_size != world_size:
        raise UsageError(f"world size {world_size}: {outside.world_size} ranks were started, ask for those")
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        needed = world_size if outside is None else outside.local_rank + 1
        if needed > gpus:
            raise CapabilityError(
                f"{needed} ranks on this machine: NCCL needs a GPU for each and torch sees {gpus}; "
                "choose a smaller world size or backend gloo"
            )


class JoinedRanks:
    """The ranks that torchrun or Slurm started, seen from one of them; every rank makes the same calls."""

    def __init__(self, place: Place, backend: str, timeout_s: float):
        self._place = place
        # Each process group gets keys of its own in the store: an earlier group's name connections that are closed.
        store = dist.PrefixStore(f"cs336sys-{next(_joined_groups)}", _store_from_environment())
        join_process_group(place, backend, store, timeout_s)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` here and return what all ranks returned; an error leaves as it is."""
        try:
            return gather_objects(function(*args))
        except Exception as error:
            error.add_note(f"on rank {self._place.rank} of {self._place.world_size}")
            raise

    def __enter__(self) -> "JoinedRanks":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may never come to a collective again, and leaving a group can be one.
        if error_type is None:
            leave_process_group()


_joined_groups = itertools.count()


@functools.cache
def _store_from_environment() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://"))
    return store
