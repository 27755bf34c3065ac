"""Decorate autograd functions of the kernels."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def once_differentiable(backward: Callable) -> Callable:
    """Let the ``backward`` of a ``torch.autograd.Function`` refuse to be differentiated itself, by create_graph=True.

    ``torch.autograd.function.once_differentiable`` refuses only when the incoming gradient requires a gradient. After
    ``output.sum()`` it does not, and a second derivative would silently lack this function's share.
    """

    @functools.wraps(backward)
    def first_order_backward(ctx, *grad_outputs):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx).__name__.removesuffix('Backward')} is differentiable once: it has no second derivative, "
                "so create_graph=True is refused"
            )
        return backward(ctx, *grad_outputs)

    return first_order_backward


def refuse_transforms(function: str, remedy: str, *tensors: torch.Tensor) -> None:
    """Refuse derivatives in forward mode and transforms by torch.func, which would lose the tangent in silence."""
    if torch.compiler.is_compiling():  # Compiled code is not checked.
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{function} cannot be transformed by torch.func (grad, vmap, jvp, ...): {remedy}")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(f"{function} has no derivative in forward mode: {remedy}")
