"""Optimizer-state sharding (ZeRO stage 1); ``docs/sharded_optimizer.md`` describes it.

- ``optimizer.py``: ``ShardedOptimizer``, used like any other optimizer. What is in its parameter
  groups, and do ranks agree on it (``groups.py``)?
- ``local.py``: what must a way of sharing out the work be able to do? There are whole parameters, and slices
  (``slices.py``), which also averages gradients. What does this rank update, and by which classes of optimizers?
- ``exchange.py``: how do updated parameters reach all ranks while the next forward pass runs?
- ``checkpoint.py``: how is the state put together, and cut up for another number of ranks?
"""

from cs336sys.parallel.sharded_optimizer.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
