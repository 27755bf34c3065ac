"""Decorate autograd functions of the kernels."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the ``backward`` of a ``torch.autograd.Function`` that must not be differentiated itself.

    ``torch.autograd.function.once_differentiable`` refuses only when the incoming gradient requires a gradient. After
    ``output.sum()`` it does not, and a second derivative would silently lack this function's share.

    Raises:
        RuntimeError: on a backward pass with ``create_graph=True``.
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
