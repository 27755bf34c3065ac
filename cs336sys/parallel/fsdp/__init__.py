"""Fully sharded data parallel training (ZeRO stage 3); ``docs/fsdp.md`` follows a step.

- ``wrapper.py``: ``FSDP``, what users call.
- ``plan.py``: which parameters are sharded, and which are gathered together, as a unit?
- ``parameter.py``: how is one parameter cut, and how does each rank get its slices?
- ``unit.py``: where are the parameters of a unit in memory, and how are they gathered and freed?
- ``runner.py``: when are units gathered, freed and reduced? It is told by ``calls.py`` that a module is called, and
  by ``gather_order.py`` which units come next; ``gather_timing.py`` measures whether they arrive in time.
- ``stand_in.py``: what do modules hold in place of weights that are not gathered?
- ``left_tensors.py``: where may a call have left tensors from which a backward pass comes back?
- ``gradients.py``: how do gradients become means, and reach their slices?
- ``checkpoint.py``: how are all ranks saved, and loaded by another number of ranks? Without running code from the file
  (``plain_data.py``).
"""

from cs336sys.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
