"""Imports of torch's compiler, which wait until somebody needs it, and of Triton: whether it can be, and its repair."""

import functools
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_COMPILER = "torch._dynamo"

# The attribute of a function that holds what torch calls instead of it; without it, torch asks its compiler.
_ATTRIBUTE = "__dynamo_disable"

# Functions that hold themselves there until the compiler is imported.
_excluded: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class _CompilerWatch:
    """Removes the attributes when the compiler is imported; finds no module."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: object = None) -> None:
        if name == _COMPILER:
            for function in list(_excluded):
                vars(function).pop(_ATTRIBUTE, None)
            _excluded.clear()


def importing_no_compiler(disabled: Function) -> Function:
    """Return a function that ``torch._disable_dynamo`` has wrapped, which now imports no compiler when it is called.

    At its first call torch would import the compiler to exclude it, 1.1 of the 3 CPU seconds in which a rank starts and
    takes a first step. Here that waits until somebody else imports the compiler; before, nothing is compiled.
    """
    function = getattr(disabled, "__wrapped__", None)
    if function is None or _COMPILER in sys.modules:  # a torch that wraps in another way, or nothing left to save
        return disabled
    if _CompilerWatch not in sys.meta_path:
        sys.meta_path.insert(0, _CompilerWatch)
    # Torch's wrapper calls what this attribute holds, here the function itself, and asks the compiler only without it.
    # A wrapper of ours that decides at each call would itself be compiled.
    vars(function)[_ATTRIBUTE] = function
    _excluded.add(function)  # Once there is a compiler, _CompilerWatch removes the attribute.
    return disabled


class TritonFinder:
    """A finder that turns whatever importing Triton raises into an ImportError, the only error that torch handles."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return Triton's spec with a loader that raises ImportErrors; None for other modules."""
        spec = PathFinder.find_spec(name, path) if name == "triton" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except Exception as error:
                raise ImportError(f"{type(error).__name__}: {error}") from error

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@functools.cache
def why_no_triton() -> str | None:
    """Return what is needed to import Triton and missing here, as the end of a sentence; None if nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    try:
        import triton.language  # noqa: F401
    except Exception as error:
        # A broken installation fails in many ways: a missing library, a clash of versions.
        cause = error.__cause__ or error  # TritonFinder has made an ImportError of it.
        message = (str(cause).splitlines() or ["no message"])[0]
        return f"the package triton, whose import fails here ({type(cause).__name__}: {message}): install it again"
    return None


def repair_interpreter() -> None:
    """Let kernels loop in the interpreter of Triton 3.6 with numpy 2.4, which converts no array of one dimension.

    Triton 3.7 reads loop bounds as this does.
    """
    is_off = os.environ.get("TRITON_INTERPRET", "").lower() in ("", "0", "false", "off", "no", "n")
    if is_off or why_no_triton() is not None:
        return
    import triton

    if not triton.__version__.startswith("3.6."):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_scalar_bounds(tensor, scope):
        patch(tensor, scope)
        # range() asks its bounds for this.
        scope.set_attr(tensor, "__index__", lambda bound: int(bound.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_scalar_bounds
