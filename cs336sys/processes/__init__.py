"""Processes: which rank this one is, and how those that it starts end. No torch, and nothing slow to import."""

import os
from dataclasses import dataclass

from cs336sys.errors import UsageError


@dataclass(frozen=True)
class RankIdentity:
    """The rank of a process. ``local_rank`` counts the ranks of one machine, and selects the GPU."""

    rank: int
    world_size: int
    local_rank: int


def is_first_rank() -> bool:
    """Return whether this process reports: it was started alone, or is rank 0 of torchrun's or Slurm's processes."""
    identity = started_outside()
    return identity is None or identity.rank == 0


def started_outside() -> RankIdentity | None:
    """Return the identity of a rank that torchrun or Slurm started, else None; a UsageError names a wrong variable."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = _read_variable("RANK"), _read_variable("WORLD_SIZE")
    if rank >= world_size:
        raise UsageError(f"RANK={rank}: must be less than WORLD_SIZE, {world_size}")
    # Without it, all ranks are taken to be on one machine.
    local_rank = _read_variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    return RankIdentity(rank, world_size, local_rank)


def _read_variable(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text}: must be a whole number, as torchrun sets it; unset it to let this command start the ranks"
        )
    return int(text)
