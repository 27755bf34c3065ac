"""Brings updated parameters to every rank while the next forward pass already runs."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.machine.late_imports import importing_no_compiler
from cs336sys.parallel.collectives import Broadcasts, SliceGather

# Modules without a forward pass of their own, or with one that only calls their children.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class ExchangeBucket:
    """Parameters, by name, that one operation brings to every rank."""

    parameters: Mapping[str, nn.Parameter]
    operation: Broadcasts | SliceGather
    # How often each parameter had been changed when the operation was launched; empty when it has been waited for.
    _versions: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.operation.start()
        self._versions[:] = [parameter._version for parameter in self.parameters.values()]

    def wait(self) -> None:
        """Wait for the operation, unless that has been done."""
        if not self._versions:
            return
        self.operation.wait()
        launch_versions = self._versions[:]
        self._versions.clear()  # Also before a refusal: the operation has been waited for.
        for (name, parameter), version in zip(self.parameters.items(), launch_versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"{name} was changed while the last step's updates arrived: call wait_for_parameters() of the "
                    "optimizer before changing weights"
                )


# Which exchanges bring parameters to a module. The hooks on users' modules (_wait_...) look here. They are copied and
# pickled with the module by their names: a copy has no entry, so its hooks do nothing.
_exchanges: "weakref.WeakKeyDictionary[nn.Module, list[ParameterExchange]]" = weakref.WeakKeyDictionary()


class ParameterExchange:
    """Starts the operations of all buckets, and waits for a bucket when one of its parameters is needed.

    :meth:`overlap_with` tells which module needs which parameters; the others are waited for at once.

    Attributes:
        is_deferred: whether :meth:`start` leaves launching to :meth:`start_deferred`, or to the first wait.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self._is_pending = False  # Whether start() was called for buckets that are not launched yet.
        self._buckets: list[ExchangeBucket] = []
        # For each part of a module, the buckets that its parameters are in. Hooks find this exchange by the module: a
        # strong reference back would keep both for ever.
        self._awaited: weakref.WeakKeyDictionary[nn.Module, list[ExchangeBucket]] = weakref.WeakKeyDictionary()
        self._awaited_at_once: list[ExchangeBucket] = []  # They have parameters that no module waits for.

    def extend(self, buckets: Iterable[ExchangeBucket]) -> None:
        """Add buckets in the order in which the forward pass needs them."""
        self._buckets.extend(buckets)
        self._find_awaited_buckets()

    def start(self, updated: Iterable[nn.Parameter]) -> None:
        """Launch every bucket, and wait for those with a parameter that no module waits for.

        Args:
            updated: the parameters that some rank has changed. A backward pass of an earlier forward pass needs their
                old values, and raises from now on, as after any optimizer that changes parameters in place.
        """
        self.wait()  # A module that did not run has not waited for its buckets.
        torch.autograd.graph.increment_version(list(updated))
        self._is_pending = True
        if not self.is_deferred:
            self.start_deferred()

    def start_deferred(self) -> None:
        """Launch what :meth:`start` was called for, unless it has been."""
        if self._is_pending:
            self._is_pending = False
            for bucket in self._buckets:
                bucket.start()
            _wait_for(self._awaited_at_once)

    def wait(self) -> None:
        """Return when all parameters may be used: on a GPU, by work queued on the current stream after this."""
        self.start_deferred()
        _wait_for(self._buckets)

    def overlap_with(self, module: nn.Module) -> None:
        """Let each part of ``module`` wait for its parameters when it is called, and state dicts wait for all.

        Called again, it takes note of parts that were added: see ``ShardedOptimizer.overlap_with()``. A module that is
        compiled as a whole is one part. For a data parallel wrapper, the parts are those of the wrapped module. The
        modules in a part wait, too: a model may call ``self.model.decoder(x)`` and never ``self.model``.
        """
        # Code compiled earlier would not contain the hooks; without the module, nothing was compiled.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        while isinstance(wrapped := getattr(module, "module", None), nn.Module):
            module = wrapped
        for part in module.modules():  # Of all modules, because a part may be saved or loaded by itself.
            exchanges = _exchanges.setdefault(part, [])
            if self not in exchanges:
                exchanges.append(self)
                part.register_state_dict_pre_hook(_wait_for_all)
                part.register_load_state_dict_pre_hook(_wait_for_all)
        for part in _waiting_parts(module):
            self._await(part, _wait_before_part)
            for inner in _modules_in(part):
                self._await(inner, _wait_unless_traced)
        self._find_awaited_buckets()

    def _await(self, module: nn.Module, hook: Callable[..., None]) -> None:
        if module not in self._awaited:
            self._awaited[module] = []  # See _find_awaited_buckets().
            # Before hooks that compute with the parameters, as weight_norm's does.
            module.register_forward_pre_hook(hook, prepend=True)

    def _find_awaited_buckets(self) -> None:
        """Find the buckets that each module waits for, in the order of launching, and those that none waits for."""
        ids_of_buckets = [(set(map(id, bucket.parameters.values())), bucket) for bucket in self._buckets]
        awaited_ids: set[int] = set()
        for part, buckets in self._awaited.items():
            part_ids = set(map(id, part.parameters()))
            awaited_ids |= part_ids
            buckets[:] = [bucket for ids, bucket in ids_of_buckets if not ids.isdisjoint(part_ids)]
        self._awaited_at_once = [bucket for ids, bucket in ids_of_buckets if not ids <= awaited_ids]


@torch.no_grad()
def move_into(memory: Tensor, starts: Iterable[int], parameters: Iterable[nn.Parameter]) -> None:
    """Move dense parameters into ``memory``, (n,), from these elements on, each with its elements in the same order."""
    for start, parameter in zip(starts, parameters, strict=True):
        parameter.data = memory.as_strided(parameter.shape, parameter.stride(), start).copy_(parameter)


def _wait_for(buckets: Iterable[ExchangeBucket]) -> None:
    for bucket in buckets:
        bucket.wait()


def _wait_for_all(module: nn.Module, *_: object) -> None:
    for exchange in _exchanges.get(module, ()):
        exchange.wait()


# If the module is compiled, the hook runs before the compiled code.
@importing_no_compiler
@torch._disable_dynamo
def _wait_before_part(module: nn.Module, *_: object) -> None:
    for exchange in _exchanges.get(module, ()):
        _wait_for(exchange._awaited.get(module, ()))


def _wait_unless_traced(module: nn.Module, *_: object) -> None:
    # The part around compiled code has waited, and a call of the hook from that code would break its graph.
    if not torch.compiler.is_compiling():
        _wait_before_part(module)


def _modules_in(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters in a part, except those within compiled modules."""
    # module.compile() sets the first attribute, torch.compile(module) the second.
    if part._compiled_call_impl is None and not hasattr(part, "_orig_mod"):
        for child in part.children():
            if next(child.parameters(), None) is not None:
                yield child
            yield from _modules_in(child)


def _waiting_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that wait for their parameters, see :meth:`ParameterExchange.overlap_with`."""
    if module._compiled_call_impl is not None:
        return [module]
    parts = []
    for child in module.children():
        parts += _waiting_parts(child) if isinstance(child, _CONTAINERS) else [child]
    # A hook on a part without parameters would only break the graph of a compiled block that calls it.
    return [part for part in parts if next(part.parameters(), None) is not None]
