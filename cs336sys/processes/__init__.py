"""Processes: which rank this one is, and how those that it starts end. No torch, and nothing slow to import.

- ``ranks.py``: which of the ranks started by torchrun or Slurm is this process?
- ``parent.py``: how does a process start others that end with it, and what did they die of?
- ``child.py``: what does a started process do from its first moment to its last?
- ``guard.py``: the program that stands between the two and kills all that a child has started, at any depth.
- ``folders.py``: temporary folders that are removed even when their process is killed.
"""

from cs336sys.processes.ranks import RankIdentity, started_outside

__all__ = ["RankIdentity", "started_outside"]
