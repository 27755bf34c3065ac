"""linear_cross_entropy for autograd, and as an operator for compilers and dispatch modes."""

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.linear_cross_entropy.launchers import check_arguments, forward, kept_dtype, scale
from cs336sys.kernels.operators import DTYPES, define_gradient, define_operator, needs_operators


def _fake_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    needs_grad_hidden: bool,
    needs_grad_weight: bool,
    copy: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_arguments(hidden, weight, targets, label_smoothing, z_loss, dtype, copy)
    kept = kept_dtype(weight.dtype, dtype, gradient_dtype)
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape[:-1], dtype=torch.float32),
        hidden.new_empty((targets.numel(), hidden.shape[-1]) if needs_grad_hidden else 0),
        hidden.new_empty(weight.shape, dtype=kept) if needs_grad_weight else hidden.new_empty(0),
        hidden.new_empty(() if dtype == torch.float16 else 0, dtype=torch.float32),
    )


_operator = define_operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, float label_smoothing, "
    "float z_loss, ScalarType dtype, bool needs_grad_hidden, bool needs_grad_weight, Tensor? copy, "
    "ScalarType? gradient_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    forward,
    _fake_forward,
)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, *_, needs_hidden, needs_weight, _, gradient_dtype = inputs
    ctx.hidden_shape, ctx.gradient_dtype = hidden.shape, gradient_dtype or weight.dtype
    ctx.needed = needs_hidden, needs_weight
    ctx.save_for_backward(*output[2:])


def _differentiate(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple:
    """For compilers, which write no memory that they keep for backward."""
    grad_hidden, grad_weight, factor = ctx.saved_tensors
    factor = factor * grad_loss if factor.numel() else grad_loss
    return (
        (grad_hidden * factor).view(ctx.hidden_shape) if ctx.needed[0] else None,
        (grad_weight * factor).to(ctx.gradient_dtype) if ctx.needed[1] else None,
        *(None,) * 9,
    )


define_gradient("linear_cross_entropy", _differentiate, _save_for_backward)


@register_flop_formula(torch.ops.cs336sys.linear_cross_entropy)
def _flops(hidden_shape: torch.Size, weight_shape: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2 N d V for the logits, and as many for each gradient."""
    needs_hidden, needs_weight = args[5:7]
    num_products = 1 + needs_hidden + needs_weight
    return 2 * num_products * math.prod(hidden_shape) * weight_shape[0]


class LinearCrossEntropy(torch.autograd.Function):
    """``LinearCrossEntropy.apply(hidden, weight, targets, *options)``; see :func:`linear_cross_entropy`.

    The options: ignore_index, label_smoothing, z_loss, the dtype of the products, whether hidden and the weight need
    gradients, the weight's copy and the dtype of its gradient, or None. Returns the loss and the logsumexp.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = _operator if needs_operators(hidden) else forward
        output = compute(hidden, weight, targets, *options)
        _save_for_backward(ctx, (hidden, weight, targets, *options), output)
        loss, logsumexp = output[:2]
        ctx.mark_non_differentiable(logsumexp)
        return loss, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if needs_operators(grad_loss):
            return _differentiate(ctx, grad_loss)
        grad_hidden, grad_weight, factor = ctx.saved_tensors
        factor = factor * grad_loss if factor.numel() else grad_loss
        # In place only if the graph is freed: a second backward pass would scale the gradients twice, or change
        # those that the first has returned.
        overwrite = not torch._C._autograd._get_current_graph_task_keep_graph()
        needs_hidden, needs_weight = ctx.needed
        return (
            scale(grad_hidden, factor, grad_hidden.dtype, overwrite).view(ctx.hidden_shape) if needs_hidden else None,
            scale(grad_weight, factor, ctx.gradient_dtype, overwrite) if needs_weight else None,
            *(None,) * 9,
        )


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_logsumexp: bool = False,
    copy: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the logits ``hidden @ weight.T``, and the gradients of both, without keeping the logits.

    With x the logits of a token, t its target and L = logsumexp(x), the token's loss in nats is

        (1 - label_smoothing) (L - x_t) + label_smoothing mean_j (L - x_j) + z_loss L^2

    The forward pass makes both gradients, a chunk of tokens at a time: logits by a matrix product, their gradient in
    their place by one kernel, and two more products. Memory beyond inputs and gradients is one chunk of logits,
    at most ``CHUNK_BYTES``, and ``weight`` in the products' dtype where it has another. Backward multiplies the
    gradients by what comes in; if that is 1 it does not touch them, and the host never waits to know. What needs no
    gradient costs none. Under autocast products are in its dtype, and a float32 weight gets a float32 gradient.

    Products are summed in float32. The weight's gradient is summed over chunks in float32, too, except for a bfloat16
    weight of which the float32 sums would not fit beside a chunk in ``CHUNK_BYTES``: its sums are rounded to bfloat16
    after each chunk. Results are equal from run to run. Differentiable once, in ``hidden`` and ``weight``.

    Args:
        hidden: (..., d), float32, float16 or bfloat16, any strides.
        weight: (V, d), of the dtype and on the device of ``hidden``; under autocast either may be in float32.
        targets: (...), int64, in [0, V) or ``ignore_index``. Any other is an IndexError on the CPU and a device-side
            assertion on a GPU, as in torch's cross-entropy.
        ignore_index: targets of this value are left out of the loss and of the mean.
        label_smoothing: the share of the uniform distribution in the targets, 0 to 1.
        z_loss: weight of the squared logsumexp (PaLM, https://arxiv.org/abs/2204.02311, section 5), at least 0.
        return_logsumexp: return the logsumexp as well; no gradient flows through it.
        copy: the weight in the products' dtype, which is read in its place.
        gradient_dtype: in which the weight's gradient is made, None for the weight's dtype; autograd casts it to the
            weight's ``grad_dtype``.

    Returns:
        The loss, a float32 scalar, NaN if no target is counted; or loss and logsumexp, (...), float32, natural.

    Raises:
        ValueError: shapes or devices do not fit together, or an option is out of range.
        TypeError: dtypes differ or are not supported.
        IndexError: a target is out of range, on the CPU.
        CapabilityError: the tensors are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
    """
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # float64 stays what it is, as in autocast's own products.
        hidden = hidden.to(dtype) if hidden.dtype in DTYPES else hidden
        weight = weight.to(dtype) if weight.dtype in DTYPES and weight.dtype != torch.float32 else weight
    elif weight.dtype != dtype:
        raise TypeError(f"hidden and weight must have the same dtype, got {dtype} and {weight.dtype}")
    needed = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight))
    options = ignore_index, label_smoothing, z_loss, dtype, *needed, copy, gradient_dtype
    with torch.autocast(device, enabled=False):
        if torch.compiler.is_compiling():
            loss, logsumexp = _operator(hidden, weight, targets, *options)[:2]
        else:
            loss, logsumexp = LinearCrossEntropy.apply(hidden, weight, targets, *options)
    return (loss, logsumexp.detach()) if return_logsumexp else loss
