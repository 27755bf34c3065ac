"""Rotations as operators with a gradient."""

from typing import Any

import torch

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import define_gradient, define_operator, needs_operators, result_dtype
from cs336sys.kernels.rope.launchers import (
    compute,
    compute_grad_qkv,
    compute_qkv,
    empty_grad_qkv,
    empty_qkv,
    empty_rotated,
)

_operator = define_operator(
    "rope(Tensor x, Tensor? positions, float theta, bool inverse, SymInt[]? strides, ScalarType dtype) -> Tensor",
    compute,
    empty_rotated,
)


def _save_for_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, positions, ctx.theta, ctx.inverse, *_ = inputs
    ctx.dtype, ctx.strides = x.dtype, output.stride()
    ctx.save_for_backward(positions)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple:
    (positions,) = ctx.saved_tensors
    rotate = _operator if needs_operators(grad) else Rope.apply
    # The transposed rotation is the rotation back; written as x was, so that a projection's gradient is contiguous.
    grad_x = rotate(grad, positions, ctx.theta, not ctx.inverse, ctx.strides, ctx.dtype)
    return grad_x, None, None, None, None, None


define_gradient("rope", _differentiate, _save_for_backward)


class Rope(torch.autograd.Function):
    """``Rope.apply(x, positions, theta, inverse, strides of y, dtype of y)``; see :func:`rope`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        theta: float,
        inverse: bool,
        strides: tuple[int, ...] | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        y = compute(x, positions, theta, inverse, strides, dtype)
        _save_for_backward(ctx, (x, positions, theta, inverse), y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _differentiate(ctx, grad)


def rope(x: torch.Tensor, positions: torch.Tensor | None = None, *, theta: float = 10_000.0) -> torch.Tensor:
    """Rotates the pair ``(x[2i], x[2i + 1])`` at position p by the angle ``p theta^(-2i / D)``.

    RoFormer (https://arxiv.org/abs/2104.09864), eq. 34, with neighbours as pairs. Angles are exact to float32 at any
    position, arithmetic is in float32, and nothing but the positions is kept for the backward pass. A projection
    (B, S, H D) is rotated as it lies, ``projection.unflatten(-1, (H, D)).transpose(1, 2)``: the result has the same
    layout, in which attention reads it, and so has the gradient. ``torch.compile`` keeps it in one graph. Under
    ``torch.autocast`` the result has its dtype.

    Args:
        x: (..., S, D), D even, float32, float16 or bfloat16, of any strides.
        positions: int32 or int64, broadcasts to (..., S); None stands for 0 to S - 1.
        theta: base of the angles.

    Returns:
        Of the shape and dtype of ``x``; of its strides where it is dense, and else of the same order of dimensions.

    Raises:
        ValueError: D is odd, or shapes or devices do not fit together.
        TypeError: a dtype is not supported.
        CapabilityError: the tensors are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
    """
    rotate = _operator if needs_operators(x) else Rope.apply
    return rotate(x, positions, theta, False, None, result_dtype(x))


_qkv_operator = define_operator(
    "rope_qkv(Tensor qkv, Tensor? positions, int num_heads, int num_key_value_heads, float theta, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    compute_qkv,
    empty_qkv,
)
_grad_qkv_operator = define_operator(
    "rope_qkv_backward(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor? positions, float theta,"
    " ScalarType dtype) -> Tensor",
    compute_grad_qkv,
    empty_grad_qkv,
)


def _save_qkv_for_backward(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    qkv, positions, _, _, ctx.theta, _ = inputs
    ctx.dtype = qkv.dtype
    ctx.save_for_backward(positions)


def _differentiate_qkv(ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor) -> tuple:
    (positions,) = ctx.saved_tensors
    backward = _grad_qkv_operator if needs_operators(grad_query) else compute_grad_qkv
    grad_qkv = backward(grad_query, grad_key, grad_value, positions, ctx.theta, ctx.dtype)
    return grad_qkv, None, None, None, None, None


define_gradient("rope_qkv", _differentiate_qkv, _save_qkv_for_backward)


class RopeQKV(torch.autograd.Function):
    """``RopeQKV.apply(qkv, positions, heads, key and value heads, theta, dtype)``; see :func:`rope_qkv`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        results = compute_qkv(*arguments)
        _save_qkv_for_backward(ctx, arguments, results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return _differentiate_qkv(ctx, *grads)


def rope_qkv(
    qkv: torch.Tensor,
    num_heads: int,
    num_key_value_heads: int | None = None,
    positions: torch.Tensor | None = None,
    *,
    theta: float = 10_000.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query and key, rotated by :func:`rope`, and value, out of one fused projection and each in memory of its own.

    The backward pass writes the projection's whole gradient at once, which slicing it would add up from three.
    Differentiable once.

    Args:
        qkv: (..., S, (H + 2 H_kv) D): the heads of the query, then those of key and value, D even; any strides.
        num_heads: H.
        num_key_value_heads: H_kv; None stands for H.
        positions: int32 or int64, broadcasts to (..., S); None stands for 0 to S - 1.
        theta: base of the angles.

    Returns:
        (..., H, S, D), (..., H_kv, S, D) and (..., H_kv, S, D), in memory (..., S, H, D) as attention reads them.

    Raises:
        ValueError: D is odd, the heads do not divide the projection, or shapes or devices do not fit together.
        TypeError: a dtype is not supported.
        CapabilityError: the tensors are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
        RuntimeError: it is differentiated twice.
    """
    if num_key_value_heads is None:
        num_key_value_heads = num_heads
    split = _qkv_operator if needs_operators(qkv) else RopeQKV.apply
    return split(qkv, positions, num_heads, num_key_value_heads, theta, result_dtype(qkv))
