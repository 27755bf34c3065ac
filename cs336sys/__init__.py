"""Benchmark, profile and parallelise Transformer training."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: ``cs336sys.verify``."""
    if name == "verify":
        # By name: the package itself is plain data, which knows no experiments.
        return importlib.import_module("cs336sys.experiments.verify.library").verify
    raise AttributeError(f"module 'cs336sys' has no attribute '{name}'")
