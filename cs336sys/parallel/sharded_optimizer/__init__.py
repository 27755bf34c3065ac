"""Optimizer-state sharding: what :mod:`cs336sys.parallel.sharded_optimizer.optimizer` offers."""

from cs336sys.parallel.sharded_optimizer.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
