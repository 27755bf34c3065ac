"""Benchmark, profile and parallelise Transformer training."""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from cs336sys.machine.late_imports import TritonFinder

__version__ = "0.2.0"

_HERE = os.path.dirname(os.path.abspath(__file__))
# Of an installed wheel, and of a clone.
_COURSE_FOLDERS = [os.path.join(_HERE, "course"), os.path.join(os.path.dirname(_HERE), "cs336-basics")]


class _OwnCoursePackage:
    """Finds the ``cs336_basics`` that comes with this program, where no other is installed or on the path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _COURSE_FOLDERS) if name == "cs336_basics" else None


sys.meta_path.append(_OwnCoursePackage)
sys.meta_path.insert(0, TritonFinder)

# Public names, and the modules that they are imported from when asked for. ``kernels`` is the package of kernels; the
# function of the command is ``cs336sys.api.kernels``. The types are in ``__init__.pyi``.
_LAZY = {
    **dict.fromkeys(
        (
            *("bench", "nsys", "memprof", "attn", "flash", "allreduce", "ddp", "shard", "trace", "precision", "losses"),
            *("tune", "doctor", "account", "read", "compare"),
            *("Results", "Tables", "Interrupted"),
        ),
        "cs336sys.api",
    ),
    "verify": "cs336sys.commands.verify.library",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from cs336sys.settings.course_package import telling_import_errors

        # By name, because the layers (tests/test_layers.py) let this package, which all import, import no commands.
        with telling_import_errors():
            return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cs336sys' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(_LAZY)
