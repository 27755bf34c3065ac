"""Calls of modules whose parameters must be gathered first, and the dtypes of their inputs and outputs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.parallel.fsdp.runner import UnitRunner
from cs336sys.parallel.fsdp.unit import ShardedUnit


class UnitCall:
    """Replaces a module's call, compiled or not, in the attribute in which ``nn.Module`` looks for a compiled call.

    Gathering and freeing are thus outside of compiled code: they do not break its graph, and all blocks share one.
    """

    def __init__(self, runner: UnitRunner, unit: ShardedUnit, module: nn.Module, compute_dtype: torch.dtype | None):
        self._runner = runner
        self._unit = unit
        self.module = module
        self._parts = tuple(module.modules())
        self._compute_dtype = compute_dtype
        self._function: Callable[..., Any] = module._call_impl
        self.install()

    def install(self) -> None:
        """Wrap whatever the module calls at present. Repeat it in case the module has been compiled since."""
        current = self.module.__dict__.get("_compiled_call_impl")
        if current is not self:
            self._function = current or self.module._call_impl
            self.module.__dict__["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compute_dtype is None:
            return self._runner.call(self._unit, self._parts, self._function, args, kwargs)
        cast = cast_floating((args, kwargs), self._compute_dtype)
        with _changed_alike((*args, *kwargs.values()), (*cast[0], *cast[1].values())):
            return self._runner.call(self._unit, self._parts, self._function, *cast)


def is_unit(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("_compiled_call_impl"), UnitCall)


def compute_in_own_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module of ``torch.nn`` with replicated parameters accept and return ``compute_dtype``.

    Its parameters keep their dtype, and CUDA's layer norm, for one, refuses inputs of another. Modules from elsewhere
    are left as they are: those of ``cs336_basics`` accept any dtype.
    """
    if not type(module).__module__.startswith("torch.nn."):
        return
    own = next((parameter.dtype for parameter in module.parameters(recurse=False)), None)
    if own is None or not own.is_floating_point or own == compute_dtype:
        return
    module.register_forward_pre_hook(lambda _, args: cast_floating(args, own))
    module.register_forward_hook(lambda _, args, output: cast_floating(output, compute_dtype))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """The value with all floating-point tensors in it converted, including those in lists, tuples and dictionaries.

    What needs no conversion is itself: a module may add to a list that it is given.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        cast = {key: cast_floating(part, dtype) for key, part in value.items()}
        return value if _are_same(cast.values(), value.values()) else type(value)(cast)
    if isinstance(value, list | tuple):
        parts = [cast_floating(part, dtype) for part in value]
        if _are_same(parts, value):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@contextlib.contextmanager
def _changed_alike(given: Sequence[Any], cast: Sequence[Any]) -> Iterator[None]:
    """Change lists and dictionaries that were given as those are changed here that were converted in their place."""
    converted = [
        (original, copied, list(_parts(original)), list(_parts(copied)))
        for original, copied in zip(given, cast, strict=True)
        if copied is not original and isinstance(original, list | dict)
    ]
    yield
    for original, copied, parts, copied_parts in converted:
        of_copy = {id(copied_part): part for copied_part, part in zip(copied_parts, parts, strict=True)}
        if isinstance(original, list):
            original[:] = [of_copy.get(id(part), part) for part in copied]
        else:
            changed = {key: of_copy.get(id(part), part) for key, part in copied.items()}
            original.clear()
            original.update(changed)


def _parts(value: list[Any] | dict[Any, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _are_same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(left, right, strict=True))
