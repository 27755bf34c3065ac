"""Lets the user's code import a ``cs336_basics`` of its own, where this process has another already."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from cs336sys.course_package import PACKAGE, first_folder

# Of files of the user's that were loaded. Elsewhere they come last on ``sys.path``.
user_folders: list[str] = []

# The user's, once it has been imported: found again by what is imported later, while functions run.
_theirs: dict[str, ModuleType] = {}


@contextlib.contextmanager
def their_course_package() -> Iterator[None]:
    """Within this, ``import cs336_basics`` finds the one beside the user's file, or the first on ``sys.path``.

    Outside it finds ours again.

    A course package of the user's has the same name as ours, with which this process has begun. If it is ours that
    comes first, it is the very modules that are in use, not a copy of them.
    """
    ours = _taken_out()
    first = first_folder(user_folders)
    if first is not None and PACKAGE in _theirs and str(first) in _theirs[PACKAGE].__path__:
        sys.modules.update(_theirs)
    finder = _Finder(ours)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _theirs.clear()
        _theirs.update({name: module for name, module in _taken_out().items() if module is not ours.get(name)})
        for name, module in _theirs.items():
            # torch.compile looks modules up by the name that they give themselves.
            module.__name__ = f"user_code_{name}"
            sys.modules[module.__name__] = module
        sys.modules.update(ours)


@contextlib.contextmanager
def their_course_package_apart() -> Iterator[None]:
    """Within this, a package of the user's is imported anew, and forgotten afterwards."""
    kept = dict(_theirs)
    _theirs.clear()
    try:
        yield
    finally:
        _theirs.clear()
        _theirs.update(kept)
        sys.modules.update({module.__name__: module for module in kept.values()})


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, ours: dict[str, ModuleType]):
        self._ours = ours

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        if name == PACKAGE and (first := first_folder(user_folders)) is not None:
            path = [str(first.parent)]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None and name != PACKAGE:
            # An editable install would answer with a module of ours where their package lacks one.
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        known = self._ours.get(name)
        if spec is not None and known is not None and spec.origin is not None and spec.origin == known.__file__:
            return importlib.machinery.ModuleSpec(
                name, _Known(known), origin=spec.origin, is_package=hasattr(known, "__path__")
            )
        return spec


class _Known(importlib.abc.Loader):
    """Gives a module that exists."""

    def __init__(self, module: ModuleType):
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
