"""Linear layers that read their weights side by side in one tensor, and half-precision copies of weights."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import as_rows, define_call


def _multiply(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply grad (..., d_out)^T x (..., d_in) -> (d_out, d_in), summed in float32 and rounded once, to ``dtype``."""
    grad_rows, rows = as_rows(grad), as_rows(x)
    if dtype == rows.dtype:
        return grad_rows.mT @ rows
    if rows.is_cuda:
        return torch.mm(grad_rows.mT, rows, out_dtype=dtype)
    # torch has no product of half types with a float32 result on the CPU.
    return grad_rows.mT.to(dtype) @ rows.to(dtype)


# The gradient (d_out, d_in) of a linear layer's weight, from grad, x and dtype; see :func:`linear_of_copy`.
weight_gradient = define_call(
    "linear_weight_gradient(Tensor grad, Tensor x, ScalarType dtype) -> Tensor",
    _multiply,
    fake=lambda grad, x, dtype: torch.empty((grad.shape[-1], x.shape[-1]), dtype=dtype, device=x.device),
)


@register_flop_formula(torch.ops.cs336sys.linear_weight_gradient)
def _product_flops(grad_shape: torch.Size, x_shape: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(grad_shape) * x_shape[-1]


class LinearOfCopy(torch.autograd.Function):
    """``LinearOfCopy.apply(x, copy, gradient_dtype, *weights)``; see :func:`linear_of_copy`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor, gradient_dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, copy)
        ctx.rows_of_weights = [len(weight) for weight in weights]
        ctx.gradient_dtype = gradient_dtype
        return torch.nn.functional.linear(x, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, copy = ctx.saved_tensors
        grad_weight = weight_gradient(grad, x, ctx.gradient_dtype)
        return grad @ copy, None, None, *grad_weight.split(ctx.rows_of_weights)


def linear_of_copy(x: Tensor, copy: Tensor, *weights: Tensor, gradient_dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x @ copy.T``, where ``copy`` has the rows of all ``weights``: several layers in one product.

    Gradients go to x and to the weights: the latter straight from the product, which sums in float32, as views of one
    tensor. Differentiable once.

    Args:
        x: (..., d_in), of the dtype of ``copy``; under ``torch.autocast`` it is cast.
        copy: (sum of d_out, d_in).
        weights: (d_out, d_in) each, of one dtype. They are not read.
        gradient_dtype: of the weights' gradients as the product writes them, None for the dtype of the weights;
            autograd casts them to the weights' ``grad_dtype``.
    """
    device_type = x.device.type
    gradient_dtype = gradient_dtype or weights[0].dtype
    if not torch.is_autocast_enabled(device_type):
        return LinearOfCopy.apply(x, copy, gradient_dtype, *weights)
    # Autocast to another dtype than the copy's would cast x and the copy once more.
    with torch.autocast(device_type, enabled=False):
        return LinearOfCopy.apply(x.to(copy.dtype), copy, gradient_dtype, *weights)


class WeightCopies:
    """Copies of weights, kept up to date with what PyTorch writes into the weights.

    Iterating over it gives each weight with its copy.

    Args:
        are_separate: whether copies have memory of their own; else the weights lie in them.

    Attributes:
        tensors: the copies that have memory of their own.
    """

    def __init__(self, *, are_separate: bool) -> None:
        self._are_separate = are_separate
        self.tensors: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._pairs)

    def add(self, weights: Sequence[Tensor], copy: Tensor) -> None:
        """Add a copy (rows of all weights, d) that holds these weights (rows, d) one after another."""
        if self._are_separate:
            self.tensors.append(copy)
        self._pairs += zip(weights, copy.split([len(weight) for weight in weights]), strict=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all weights."""
        if self._are_separate and self._pairs:
            weights, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_(copies, weights)
        self._versions = self._versions_now()

    def refresh_changed(self) -> None:
        """Copy all weights if PyTorch has written into one since; the host does not wait for the GPU."""
        if self._versions != self._versions_now():
            self.refresh()

    @torch.no_grad()
    def differences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight, and its copy's difference from the rounded weight: zeros if the copy is up to date."""
        for weight, copy in self._pairs:
            rounded = weight.to(copy.dtype)
            difference = (copy - rounded).float()
            if not weight.is_cuda:
                # Triton's interpreter cuts off instead of rounding.
                difference[difference.abs() <= torch.finfo(copy.dtype).eps * rounded.float().abs()] = 0
            yield weight, difference

    def _versions_now(self) -> list[tuple[int, int]]:
        """Return which tensor each weight is, and how often PyTorch has written into it."""
        return [(id(weight), weight._version) for weight, _ in self._pairs]
