"""Calls of modules whose parameters must be gathered first, and the dtypes of their inputs and outputs."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.parallel.fsdp.runner import UnitRunner, version_of
from cs336sys.parallel.fsdp.unit import ShardedUnit
from cs336sys.parallel.wrapped_modules import GATHERS_PARAMETERS


class UnitCall:
    """Replaces a module's call, compiled or not, in the attribute in which ``nn.Module`` looks for a compiled call.

    Gathering and freeing are thus outside of compiled code: they do not break its graph, and all blocks share one.

    Args:
        unit: the unit that the module is of; None for the whole module, if it is of none.
        compute_dtype: the dtype to which floating-point inputs of a unit are cast; None leaves them as they are.
        begin: for the whole module, called before each forward pass.
    """

    def __init__(
        self,
        runner: UnitRunner,
        unit: ShardedUnit | None,
        module: nn.Module,
        compute_dtype: torch.dtype | None,
        begin: Callable[[], None] | None = None,
    ):
        setattr(self, GATHERS_PARAMETERS, True)  # For is_unit(), by which other wrappers refuse the module.
        self._runner = runner
        self._unit = unit
        self.module = module
        self._parts = tuple(module.modules())
        self._compute_dtype = compute_dtype
        self._begin = begin
        self._function: Callable[..., Any] = module._call_impl
        self.install()

    def install(self) -> None:
        """Wrap whatever the module calls at present. Repeat it in case the module has been compiled since."""
        compiled_call = self.module.__dict__.get("_compiled_call_impl")
        if compiled_call is not self:
            self._function = compiled_call or self.module._call_impl
            self.module.__dict__["_compiled_call_impl"] = self

    def remove(self) -> None:
        """Let the module call what it did before."""
        # Compared, because the method object of a module is another one at each access.
        is_compiled = self._function != self.module._call_impl
        self.module.__dict__["_compiled_call_impl"] = self._function if is_compiled else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._begin is None:
            return self._call(args, kwargs)
        with self._runner.forward_pass(self._begin) as hook_output:
            output = self._call(args, kwargs)
            hook_output(output)
        return output

    def _call(self, args: tuple, kwargs: dict) -> Any:
        """Call the function with inputs in the unit's dtype, and carry changes in place over to the caller's."""
        if self._unit is None:
            return self._function(*args, **kwargs)
        if self._compute_dtype is None:
            return self._runner.call(self._unit, self._parts, self._function, args, kwargs)
        cast_args = cast_floating(args, self._compute_dtype)
        cast_kwargs = cast_floating(kwargs, self._compute_dtype) if kwargs else kwargs
        originals, passed = (*args, *kwargs.values()), (*cast_args, *cast_kwargs.values())
        # Lists and dictionaries that were copied, with the copy, and pairs of its parts and the original ones: these
        # keep all parts alive, or an object that the call makes could get the id of a part that it removes (see below).
        containers = [
            (original, copied, list(zip(_values_of(copied), _values_of(original), strict=True)))
            for original, copied in zip(originals, passed, strict=True)
            if copied is not original and isinstance(original, list | dict)
        ]
        copies = list(_tensor_copies(originals, passed))  # With their versions before the call.
        output = self._runner.call(self._unit, self._parts, self._function, cast_args, cast_kwargs)
        # The call may have changed copies in place: the caller expects these changes in its own tensors and containers.
        for original, copied, version in copies:
            if version_of(copied) != version:
                original.copy_(copied)
        for container, changed, parts in containers:
            # The caller's own parts where the call has left copies of them, and parts that the call has added.
            original_of = {id(copied): original for copied, original in parts}
            if isinstance(container, list):
                container[:] = [original_of.get(id(part), part) for part in changed]
            else:
                values = {key: original_of.get(id(part), part) for key, part in changed.items()}
                container.clear()
                container.update(values)
        return output


def compute_in_own_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module of ``torch.nn`` with replicated parameters accept and return ``compute_dtype``.

    Its parameters keep their dtype, and CUDA's layer norm, for one, refuses inputs of another. Modules from elsewhere
    are left as they are: those of ``cs336_basics`` accept any dtype.
    """
    if not type(module).__module__.startswith("torch.nn."):
        return
    parameter_dtype = next(module.parameters()).dtype
    if not parameter_dtype.is_floating_point or parameter_dtype == compute_dtype:
        return
    module.register_forward_pre_hook(lambda _, args: cast_floating(args, parameter_dtype))
    module.register_forward_hook(lambda _, args, output: cast_floating(output, compute_dtype))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Convert all floating-point tensors in a value, also in lists, tuples and dictionaries.

    A part that needs no conversion is returned itself: a module may add to a list that it is given.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        cast = {key: cast_floating(part, dtype) for key, part in value.items()}
        return value if all(map(operator.is_, cast.values(), value.values())) else type(value)(cast)
    if isinstance(value, list | tuple):
        parts = [cast_floating(part, dtype) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        # The first is a named tuple.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _tensor_copies(uncast: Any, cast: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the tensors that were converted, each with its copy and how often the copy was changed."""
    if uncast is cast:
        return
    if isinstance(uncast, Tensor):
        yield uncast, cast, version_of(cast)
    else:
        for original, copied in zip(_values_of(uncast), _values_of(cast), strict=True):
            yield from _tensor_copies(original, copied)


def _values_of(value: Sequence[Any] | dict[Any, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
