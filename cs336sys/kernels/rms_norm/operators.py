"""rms_norm as an operator with a gradient."""

from typing import Any

import torch

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import define_gradient, define_operator, needs_operators, result_dtype
from cs336sys.kernels.rms_norm import launchers

_forward_operator = define_operator(
    "rms_norm_forward(Tensor x, Tensor weight, Tensor? residual, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    launchers.forward,
    launchers.empty_results,
)
_backward_operator = define_operator(
    "rms_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor weight, Tensor inverse_rms,"
    " ScalarType x_dtype, ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor)",
    launchers.backward,
    launchers.empty_grads,
)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x, weight, residual, *_ = inputs
    _, total, inverse_rms = output
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.returns_x = False
    ctx.save_for_backward(x if residual is None else total, weight, inverse_rms)


def _differentiate(ctx: Any, grad_y: torch.Tensor, grad_total: torch.Tensor | None = None, *_) -> tuple:
    total, weight, inverse_rms = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if residual_dtype is None and not ctx.returns_x:
        grad_total = None
    backward = _backward_operator if needs_operators(grad_y) else launchers.backward
    grad_x, grad_residual, grad_weight = backward(
        grad_y, grad_total, total, weight, inverse_rms, x_dtype, residual_dtype
    )
    if residual_dtype is None:
        return grad_x, grad_weight, None, None, None
    return grad_x, grad_weight, grad_x if residual_dtype == x_dtype else grad_residual, None, None


define_gradient("rms_norm_forward", _differentiate, _save_for_backward)


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, weight, residual, eps, dtype of y, returns_x)``; see :func:`rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
        returns_x: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total, inverse_rms = launchers.forward(x, weight, residual, eps, dtype)
        _save_for_backward(ctx, (x, weight, residual), (y, total, inverse_rms))
        ctx.returns_x = returns_x
        if returns_x:
            return y, x
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor, grad_total: torch.Tensor | None = None) -> tuple:
        return *_differentiate(ctx, grad_y, grad_total), None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    *,
    returns_x: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467, eq. 4).

    With a residual the sum x + residual takes the place of x and is returned, too. Arithmetic is in float32, forward
    and backward, of the sum as it is rounded to its dtype. The backward pass reads y's gradient, x (or the sum), and
    one number a row. Differentiable once, in ``x``, ``weight`` and ``residual``; equal from run to run to the last bit.
    ``torch.compile`` keeps it in one graph. Under ``torch.autocast`` y has its dtype, whatever that of ``x``.

    Args:
        x: (..., d), float32, float16 or bfloat16, with any number of leading dimensions and any strides.
        weight: (d,), of any of these dtypes.
        eps: added to the mean square.
        residual: (..., d), of any of these dtypes.
        returns_x: without a residual, return x beside y. Whatever uses this x instead of the one that was given has its
            gradient added in the pass that computes the norm's; autograd would take a pass of its own.

    Returns:
        y (..., d), contiguous, of the dtype of ``x``; with a residual of the dtype to which the two promote, and beside
        it x + residual.

    Raises:
        ValueError: the shapes do not fit together, the tensors are on different devices, or both a residual and x were
            asked for.
        TypeError: a dtype is not supported.
        CapabilityError: the tensors are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
        RuntimeError: it is differentiated twice.
    """
    if returns_x and residual is not None:
        raise ValueError("with a residual the sum is returned: x cannot be, too")
    dtype = result_dtype(x) if residual is None else result_dtype(x, residual)
    if needs_operators(x):
        # An operator cannot return what it was given; compilers add gradients in passes of their own choice.
        y, total, _ = _forward_operator(x, weight, residual, eps, dtype)
        return (y, x) if returns_x else y if residual is None else (y, total)
    return RMSNorm.apply(x, weight, residual, eps, dtype, returns_x)
