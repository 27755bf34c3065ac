"""Functions that torch's compiler leaves out, without importing it to tell it so."""

import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_COMPILER = "torch._dynamo"

# Where torch looks for what it calls in a function's place; if there is nothing, it asks its compiler.
_ATTRIBUTE = "__dynamo_disable"

# What calls itself in its own place until the compiler is imported.
_spared: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class _CompilerWatch(MetaPathFinder):
    """Sees the compiler being imported, and finds nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == _COMPILER:
            for function in list(_spared):
                vars(function).pop(_ATTRIBUTE, None)
            _spared.clear()


_watch = _CompilerWatch()


def importing_no_compiler(left_out: Function) -> Function:
    """Let what ``torch._disable_dynamo`` has made of a function be called without importing torch's compiler.

    At the first call torch would import it, to have the function left out of what it compiles: 1.1 of the 3 CPU seconds
    in which a rank starts and takes a first step. Here that waits until somebody else imports it; before, nothing is
    compiled.
    """
    function = getattr(left_out, "__wrapped__", None)
    if function is None or _COMPILER in sys.modules:
        return left_out
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    # Nothing that asks at each call: the compiler would take that for code to compile.
    vars(function)[_ATTRIBUTE] = function
    _spared.add(function)
    return left_out
