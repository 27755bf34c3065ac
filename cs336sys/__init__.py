"""Benchmark, profile and parallelise Transformer training."""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__version__ = "0.1.0"

_HERE = os.path.dirname(os.path.abspath(__file__))
# Of an installed wheel, and of a clone.
_COURSE_FOLDERS = [os.path.join(_HERE, "course"), os.path.join(os.path.dirname(_HERE), "cs336-basics")]


class _OwnCoursePackage:
    """Finds the ``cs336_basics`` that comes with this program, where no other is installed or on the path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _COURSE_FOLDERS) if name == "cs336_basics" else None


sys.meta_path.append(_OwnCoursePackage)


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: ``cs336sys.verify``."""
    if name == "verify":
        # By name: the package itself is plain data, which knows no experiments.
        return importlib.import_module("cs336sys.experiments.verify.library").verify
    raise AttributeError(f"module 'cs336sys' has no attribute '{name}'")
