"""Communication of tensor parallel ranks inside a model: two autograd functions, each its own transpose.

They launch torch's functional collectives, which ``torch.compile`` puts into its graphs.

Sources: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3, the functions f and g; sequence parallelism
(https://arxiv.org/abs/2205.05198), section 4.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import UsageError

# For ``block.compile(options=...)``: gradients of a layer's input are all-reduced as soon as they are there, and waited
# for when they are needed, so that the products for the gradients of weights run meanwhile.
COMPILE_OPTIONS: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share every layer.

    Attributes:
        name: of their process group; an empty one sends nothing (see :class:`.wrapper.TensorParallel`).
        rank, size: of this rank among them, and how many they are.
        sequence_parallel: whether a rank holds the residual stream of its slice of the sequence alone.
    """

    name: str
    rank: int
    size: int
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of each rank's part of a layer, (..., S, d); ``x`` may be a slice, (..., S / size, d).

        Under autocast it is cast here, so that it and its gradient are sent in the precision in which layers compute.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.sequence_parallel:
            return _SequenceSlices.apply(x, self.name, self.size, self.rank, True)  # gathers=True
        return _Sum.apply(x, self.name, False)  # sums_output=False

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' partial outputs of a layer: (..., S, d), or this rank's (..., S / size, d)."""
        if self.sequence_parallel:
            return _SequenceSlices.apply(x, self.name, self.size, self.rank, False)  # gathers=False
        return _Sum.apply(x, self.name, True)  # sums_output=True


class _Sum(torch.autograd.Function):
    """All-reduces the output and hands the gradient on, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, sums_output: bool) -> Tensor:
        ctx.group, ctx.sums_output = group, sums_output
        return all_reduced(x, "sum", group) if sums_output else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad)
        return grad if ctx.sums_output else all_reduced(grad, "sum", ctx.group), None, None


class _SequenceSlices(torch.autograd.Function):
    """All-gathers along the sequence and reduce-scatters the gradient along it, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int, gathers: bool) -> Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.gathers = group, size, rank, gathers
        return _gathered(x, group, size) if gathers else _scattered(x, group, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad)
        group, size, rank = ctx.group, ctx.size, ctx.rank
        return _scattered(grad, group, size, rank) if ctx.gathers else _gathered(grad, group, size), *[None] * 4


def refuse_graph(grad: Tensor) -> None:
    """Refuse a backward pass with ``create_graph=True``. Every backward function of this folder calls it.

    What ranks send each other is in no graph: differentiated again, gradients would lack the other ranks' terms.
    """
    # Compiled code refuses by itself.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and grad.requires_grad:
        raise UsageError(
            "tensor parallel layers are differentiated once: what ranks send in the backward pass is in no graph; take "
            "gradients without create_graph=True"
        )


def all_reduced(x: Tensor, operation: str, group: str) -> Tensor:
    """Return ``x`` reduced over the group by ``sum`` or ``max``, in new memory; without a name, a view of ``x``."""
    if not group:
        return x.view_as(x)  # A function of autograd may not return its input.
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))


def _gathered(x: Tensor, group: str, size: int) -> Tensor:
    """Join every rank's slice of the sequence, in rank order: (..., S / size, d) -> (..., S, d)."""
    # Without communication, copies of this rank's slice take the places of all others.
    if not group:
        return torch.cat([x] * size, -2)
    functional = torch.ops._c10d_functional
    stacked = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group))
    # Ranks one after another along the first dimension, of size B: (size * B, ..., S / size, d).
    return stacked.unflatten(0, (size, -1)).movedim(0, -3).flatten(-3, -2)


def _scattered(x: Tensor, group: str, size: int, rank: int) -> Tensor:
    """Return this rank's slice of the sequence, summed over ranks: (..., S, d) -> (..., S / size, d)."""
    slices = x.unflatten(-2, (size, -1))
    if not group:
        return slices.select(-3, rank).contiguous()
    functional = torch.ops._c10d_functional
    stacked = slices.movedim(-3, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(functional.reduce_scatter_tensor(stacked, "sum", size, group))
