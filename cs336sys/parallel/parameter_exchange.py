"""Brings parameters that other ranks have updated back to every rank, while the next forward pass already runs."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cs336sys.parallel.collectives import Broadcasts, SliceGather

# Modules without a forward pass of their own, or with one that only calls their children.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class ExchangeBucket:
    """Parameters that one operation completes on every rank."""

    parameters: Sequence[nn.Parameter]
    operation: Broadcasts | SliceGather


class ParameterExchange:
    """Starts the operations of all buckets, and waits for a bucket when one of its parameters is needed.

    Which module needs which parameters is told by :meth:`overlap_with`; what no module was said to need is waited for
    at once.
    """

    def __init__(self) -> None:
        self._buckets: list[ExchangeBucket] = []
        self._under_way: dict[nn.Parameter, ExchangeBucket] = {}
        self._awaited_later: set[nn.Parameter] = set()

    def extend(self, buckets: Iterable[ExchangeBucket]) -> None:
        """Add buckets, in the order in which the forward pass needs them."""
        self._buckets += buckets

    def start(self) -> None:
        """Launch every bucket; wait for those with a parameter that no module waits for."""
        for bucket in self._buckets:
            bucket.operation.start()
            self._under_way.update(dict.fromkeys(bucket.parameters, bucket))
        self.wait(parameter for parameter in list(self._under_way) if parameter not in self._awaited_later)

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Return when these parameters (None: all) may be used: on a GPU, by what is queued after this on its stream.

        Raises:
            RuntimeError: another rank died or timed out; a note names the parameters.
        """
        for parameter in list(self._under_way) if parameters is None else parameters:
            bucket = self._under_way.get(parameter)
            if bucket is not None:
                bucket.operation.wait()
                for arrived in bucket.parameters:
                    del self._under_way[arrived]

    def overlap_with(self, module: nn.Module) -> None:
        """Let each part of ``module`` wait for its parameters when it is called, and its state dicts for all.

        The parts are its children; in place of a container, the container's children. What is compiled as a whole is
        one part. Data parallel wrappers are looked through.
        """
        if "torch._dynamo" in sys.modules:
            # What was compiled before would go on without the hooks.
            torch.compiler.reset()
        while isinstance(getattr(module, "module", None), nn.Module):
            module = module.module
        for part in _parts(module):
            needed = list(part.parameters())
            self._awaited_later.update(needed)
            _call_first(part, functools.partial(self._wait_if_under_way, needed))
        module.register_state_dict_pre_hook(lambda *_: self.wait())
        module.register_load_state_dict_pre_hook(lambda *_: self.wait())

    def _wait_if_under_way(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._under_way:
            self.wait(parameters)


def _parts(module: nn.Module) -> list[nn.Module]:
    if module._compiled_call_impl is not None:
        return [module]
    parts = []
    for child in module.children():
        parts += _parts(child) if isinstance(child, _CONTAINERS) else [child]
    return parts


def _call_first(module: nn.Module, call: Callable[[], None]) -> None:
    """Call something whenever the module is called, before its forward pass."""
    compiled = module._compiled_call_impl
    if compiled is None:
        # If the module is compiled later, this is no part of the graph.
        module.register_forward_pre_hook(torch.compiler.disable(lambda *_: call()))
        return

    def call_both(*args: Any, **kwargs: Any) -> Any:
        call()
        return compiled(*args, **kwargs)

    # A hook would be within what is compiled, which it would cut in two.
    module._compiled_call_impl = call_both
