"""Scaling the loss for fp16 where ranks hold slices of the gradients: all ranks skip a step, or none does."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import group_device, max_over_ranks, require_process_group
from cs336sys.parallel.gradient_slices import is_slice


class _UpdatesSlices(Protocol):
    """An optimizer that updates slices of the parameters in its groups, as ``ShardedOptimizer`` with ``flat=True``."""

    @property
    def updates_slices(self) -> bool: ...

    @property
    def own_tensors(self) -> Sequence[Tensor]:
        """What it updates, with the gradients."""

    def finish_gradient_synchronization(self) -> None: ...


class ShardedGradScaler(torch.amp.GradScaler):
    """Scales the loss, and skips a step on all ranks where a gradient overflowed on any (Micikevicius et al. 2018).

    It is used like ``torch.amp.GradScaler``, with the same calls on every rank, after gradients are averaged::

        scaler.scale(loss_function(sharded(inputs), targets)).backward()
        sharded.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()

    A rank sees overflow in what it holds: with :class:`~cs336sys.parallel.fsdp.FSDP`, and with
    :class:`~cs336sys.parallel.sharded_optimizer.ShardedOptimizer` and ``flat=True``, in its slices alone. A plain
    scaler would step on one rank and not on the other, and scale their losses differently from then on; these two
    refuse it. Where every rank holds whole averaged gradients, both scalers do the same. Unscaling takes one all-reduce
    of one byte for each optimizer. ``torch.distributed.fsdp`` has a scaler of this name that does not know of slices
    within an optimizer, nor agree on overflow when the optimizer is a fused one.
    """

    def __init__(self, *args: Any, **settings: Any):
        """Arguments are those of ``torch.amp.GradScaler``.

        Raises:
            UsageError: there is no process group, and the scaler is enabled.
        """
        super().__init__(*args, **settings)
        if self.is_enabled():
            require_process_group(type(self).__name__)

    # Called by unscale_() and, for fused optimizers, which unscale themselves, by step().
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if getattr(optimizer, "updates_slices", False):
            sliced = cast(_UpdatesSlices, optimizer)
            sliced.finish_gradient_synchronization()
            optimizer = cast(torch.optim.Optimizer, SimpleNamespace(param_groups=[{"params": sliced.own_tensors}]))
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank may have nothing of these parameters.
        found = found or {found_inf.device: found_inf}
        anywhere = torch.stack([own.to(group_device()) for own in found.values()]).amax().to(torch.uint8)
        max_over_ranks(anywhere)
        for own in found.values():
            own.copy_(anywhere)
        return found


@functools.cache
def refuse_other_scalers() -> None:
    """Let scalers that decide on each rank alone refuse optimizers of slices, from now on and in this process.

    Their methods are wrapped, because nobody else can tell: a scaler asks nothing of gradients or of the optimizer, and
    does not call it on the rank that skips.
    """
    for name in ("unscale_", "_check_inf_per_device"):
        setattr(torch.amp.GradScaler, name, _refusing(getattr(torch.amp.GradScaler, name)))


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Any:
        if scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler) and _updates_slices(optimizer):
            raise UsageError(
                f"{type(scaler).__name__} would skip a step on the rank that finds an overflow and not on the others, "
                "because each has slices of the gradients: choose "
                "cs336sys.parallel.gradient_scaler.ShardedGradScaler, or bf16"
            )
        return method(scaler, optimizer)

    return checked


def _updates_slices(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "updates_slices", False) or any(
        is_slice(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )
