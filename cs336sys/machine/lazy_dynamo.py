"""Excludes functions from torch's compiler without importing it."""

import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_COMPILER = "torch._dynamo"

# The attribute of a function that holds what torch calls instead of it; without it, torch asks its compiler.
_ATTRIBUTE = "__dynamo_disable"

# Functions that hold themselves there until the compiler is imported.
_excluded: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class _CompilerWatch(MetaPathFinder):
    """Removes the attributes when the compiler is imported; finds no module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == _COMPILER:
            for function in list(_excluded):
                vars(function).pop(_ATTRIBUTE, None)
            _excluded.clear()


_watch = _CompilerWatch()


def importing_no_compiler(disabled: Function) -> Function:
    """Return a function that ``torch._disable_dynamo`` has wrapped, which now imports no compiler when it is called.

    At its first call torch would import the compiler to exclude it, 1.1 of the 3 CPU seconds in which a rank starts and
    takes a first step. Here that waits until somebody else imports the compiler; before, nothing is compiled.
    """
    function = getattr(disabled, "__wrapped__", None)
    if function is None or _COMPILER in sys.modules:  # a torch that wraps in another way, or nothing left to save
        return disabled
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    # Torch's wrapper calls what this attribute holds, here the function itself, and asks the compiler only without it.
    # A wrapper of ours that decides at each call would itself be compiled.
    vars(function)[_ATTRIBUTE] = function
    _excluded.add(function)  # Once there is a compiler, _watch removes the attribute.
    return disabled
