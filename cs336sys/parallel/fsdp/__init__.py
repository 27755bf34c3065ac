"""Fully sharded data parallel training (ZeRO stage 3).

``docs/fsdp.md`` follows a step, and ``docs/architecture.md`` a weight through these files. ``checkpoint.py`` saves all
ranks, for any number of ranks to load.
"""

from cs336sys.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
