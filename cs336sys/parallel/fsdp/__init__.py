"""Fully sharded data parallel training (ZeRO stage 3); ``docs/fsdp.md`` follows a step.

- ``wrapper.py``: ``FSDP``, what users call.
- ``plan.py``: which parameters are sharded, and which are gathered together, as a unit?
- ``parameter.py``: how is one parameter cut, how does each rank get its slices, and what do modules hold in its place
  while it is not gathered?
- ``unit.py``: where are the parameters of a unit in memory, how are they gathered and freed, and how do gradients reach
  their slices?
- ``runner.py``: when are units gathered, freed and reduced? It is told by ``calls.py`` that a module is called, and
  by ``gather_order.py`` which units come next.
- ``checkpoint.py``: how are all ranks saved, and loaded by another number of ranks? Without running code from the file
  (``parallel/safe_unpickle.py``).
"""

from cs336sys.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
