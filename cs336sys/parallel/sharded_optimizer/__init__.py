"""Optimizer-state sharding (ZeRO stage 1); ``docs/sharded_optimizer.md`` describes it."""

from cs336sys.parallel.sharded_optimizer.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
