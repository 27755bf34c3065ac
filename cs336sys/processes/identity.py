"""Which of several ranks this process is, as torchrun or Slurm say it."""

import os
from dataclasses import dataclass


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
