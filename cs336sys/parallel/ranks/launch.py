"""Runs a function on N ranks: spawns them on this machine, or joins those that torchrun or Slurm has started.

Each spawned rank is a process. All are killed as soon as one fails, when Ctrl-C is pressed, and when the parent dies.
They find each other through a file in a fresh temporary directory: no port is chosen, so separate runs never meet.

Ranks started from outside are recognized by ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, which torchrun sets; they find
each other through ``MASTER_ADDR`` and ``MASTER_PORT``. Under Slurm, export these two and start every rank with
``srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID cs336sys ...'``.
"""

import datetime
import itertools
import multiprocessing.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.errors import CapabilityError, CaptureError, UsageError, require_known
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ranks.spawned import SpawnedRanks, join_process_group, leave_process_group
from cs336sys.processes import RankIdentity, started_outside
from cs336sys.processes.caches import use_private_caches

BACKENDS = ("gloo", "nccl")

# The process of a rank takes at least so many: with torch (2.13, on a CPU) each had 0.33e9, some of them shared.
_RANK_BYTES = 0.2e9


def run(
    function: Callable[..., Any], *args: Any, world_size: int, backend: str | None = None, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return the ranks' results, in rank order.

    The default process group exists while the function runs. As in any program that spawns processes, a script must
    call this under ``if __name__ == "__main__"``.

    Args:
        function: of a module's top level; pickled with its arguments, and its results: plain values or CPU tensors.
        backend: ``nccl``, with one GPU per rank, or ``gloo`` on the CPU; None chooses NCCL if there are GPUs.
        timeout_s: how long a collective waits for other ranks, and how much later than the first others may return.

    Raises:
        UsageError: the world size is not positive or not that of the ranks started from outside, the backend is
            unknown, or the function cannot be pickled.
        CapabilityError: there are more ranks than GPUs, or than memory has room for, or compiled code would be loaded
            from a folder that others can write to; nothing was started.
        UsageError, CapabilityError: a rank raised this.
        cs336sys.parallel.ranks.spawned.RankError: a spawned rank raised anything else, was killed, exited or hangs.
    """
    with start(world_size, backend=backend, timeout_s=timeout_s) as ranks:
        return ranks.run(function, *args)


def start(world_size: int, *, backend: str | None = None, timeout_s: float = 120.0) -> "Ranks":
    """Start ranks that run one function after another: ``with start(2) as ranks: ranks.run(function, ...)``.

    After an error the ranks are gone; start new ones. Arguments and errors are those of :func:`run`.
    """
    backend = backend or _default_backend()
    outside = started_outside()
    if not (hasattr(world_size, "__index__") and world_size >= 1):
        raise UsageError(f"world size {world_size}: must be a whole number, at least 1")
    require_known("backend", backend, BACKENDS)
    if not 0 < timeout_s <= 1e6:  # Above 24.8 days poll(2) overflows.
        raise UsageError(f"timeout {timeout_s} s: must be positive, and at most 1e+06")
    if outside is not None:
        if outside.world_size != world_size:
            raise UsageError(f"world size {world_size}: {outside.world_size} ranks were started, ask for those")
        return JoinedRanks(outside, backend, timeout_s)
    _check_gpus(world_size, backend)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if world_size * _RANK_BYTES > memory_bytes:  # Too many would leave no memory for anybody.
        raise CapabilityError(
            f"{world_size} ranks on this machine: each is a process of at least {_RANK_BYTES / 1e9:g} GB, and it has "
            f"{memory_bytes / 1e9:.0f} GB; choose a smaller world size"
        )
    use_private_caches()  # It refuses caches that others can write to.
    return SpawnedRanks(world_size, backend, timeout_s)


_kept: dict[tuple, "Ranks"] = {}  # The ranks of the last call of kept(), if any, by its arguments.


def kept(world_size: int, *, backend: str | None = None, timeout_s: float = 120.0) -> "Ranks":
    """Return the ranks of the last call if it had the same arguments, else new ones: starting ranks takes seconds.

    They stay until this process asks for different ones or ends; so does what their functions store in modules, and the
    memory that torch caches. Arguments and errors are those of :func:`start`.
    """
    key = (world_size, backend or _default_backend(), timeout_s)
    if key in _kept and _kept[key].alive:
        return _kept[key]
    end_kept()
    _kept[key] = start(world_size, backend=backend, timeout_s=timeout_s)
    return _kept[key]


def end_kept() -> None:
    """End the ranks of :func:`kept`, unless an error has ended them."""
    while _kept:
        _, ranks = _kept.popitem()
        if ranks.alive:
            ranks.__exit__(None, None, None)


# Not atexit: a process that multiprocessing has started waits for its children before it runs those functions.
multiprocessing.util.Finalize(None, end_kept, exitpriority=1)


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _check_gpus(rank_count: int, backend: str) -> None:
    gpus = torch.cuda.device_count()
    if backend == "nccl" and rank_count > gpus:
        raise CapabilityError(
            f"{rank_count} ranks on this machine: NCCL needs a GPU for each and torch sees {gpus}; "
            "choose a smaller world size or backend gloo"
        )


class JoinedRanks(AbstractContextManager["JoinedRanks"]):
    """The ranks that torchrun or Slurm has started, seen from one of them; every rank must make the same calls.

    Attributes:
        alive: False after an error, which other ranks may not have had: nothing more can be run.
    """

    def __init__(self, identity: RankIdentity, backend: str, timeout_s: float):
        self._identity = identity
        # Each process group has its own keys in the store: those of an earlier group name connections that are closed.
        store = dist.PrefixStore(f"cs336sys-{next(_joined_groups)}", outside_store(timeout_s))
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        _check_every_machine(identity, backend, store)
        join_process_group(identity, backend, store, timeout_s)
        self.alive = True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` here and return the results of all ranks; errors are passed on.

        A function that refuses (UsageError, CapabilityError) must do so on every rank; then the next can still be run.
        """
        try:
            return gather_objects(function(*args))
        except BaseException as error:
            # After a CaptureError, which is a CapabilityError, a process should compute nothing more.
            self.alive = isinstance(error, UsageError | CapabilityError) and not isinstance(error, CaptureError)
            error.add_note(f"on rank {self._identity.rank} of {self._identity.world_size}")
            raise

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may never reach a collective again, and leaving the group can involve one.
        if error_type is None:
            self.alive = False
            leave_process_group()


Ranks = SpawnedRanks | JoinedRanks

_joined_groups = itertools.count()

_outside_stores: list[dist.Store] = []  # The one that outside_store() has made, if any.


def outside_store(timeout_s: float = 120.0) -> dist.Store:
    """Return the store of ranks that torchrun or Slurm has started, which exists before and after any process group.

    Args:
        timeout_s: of the first call: how long to wait until all ranks have come.

    Raises:
        UsageError: ``MASTER_ADDR`` or ``MASTER_PORT`` is missing or wrong.
        CapabilityError: not all have come.
    """
    if not _outside_stores:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        except ValueError as error:
            raise UsageError(f"RANK and WORLD_SIZE are set, so ranks were started outside: {error}") from error
        except RuntimeError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise CapabilityError(
                f"rank {os.environ['RANK']}: not all {os.environ['WORLD_SIZE']} ranks met at {address} within "
                f"{timeout_s:g} s ({str(error).splitlines()[0]})"
            ) from error
        _outside_stores.append(store)
    return _outside_stores[0]


def _check_every_machine(identity: RankIdentity, backend: str, store: dist.Store) -> None:
    """Let every rank refuse if one must: machines may differ, and the others would wait for it to join the group."""
    refusal = ""
    try:
        _check_gpus(identity.local_rank + 1, backend)  # Local ranks count from 0: so many reach up to this one.
        use_private_caches()  # It refuses caches that others can write to.
    except CapabilityError as error:
        refusal = str(error)
    store.set(f"refusal-{identity.rank}", refusal)
    for rank in range(identity.world_size):
        if refusal := store.get(f"refusal-{rank}").decode():  # It waits until the rank has set it.
            raise CapabilityError(f"rank {rank}: {refusal}")
