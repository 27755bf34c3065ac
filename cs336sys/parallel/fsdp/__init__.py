"""Fully sharded data parallel training: what :mod:`cs336sys.parallel.fsdp.wrapper` offers."""

from cs336sys.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
