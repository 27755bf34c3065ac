"""Which of several ranks a process is. No torch, so that a command can ask before it imports any."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Which rank a process is. ``local_rank`` counts on its machine alone and chooses the GPU."""

    rank: int
    world_size: int
    local_rank: int


def started_outside() -> Place | None:
    """This process's place among ranks that torchrun or Slurm started; None if it was started alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return Place(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))
