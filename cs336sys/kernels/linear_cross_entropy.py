"""A linear layer and the cross-entropy of its logits, of which only one chunk of tokens exists at a time."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import DTYPES, as_rows, check_tensors, define_gradient, define_operator, needs_operators


@triton.jit
def cross_entropy_count_kernel(
    target_ptr, count_ptr, is_allowed_ptr, num_tokens, num_columns, ignore_index, TILE: tl.constexpr
):
    """One program counts the targets that are not ignored, and says whether all of these are in the vocabulary."""
    count = tl.zeros((TILE,), tl.int64)
    outside = tl.zeros((TILE,), tl.int32)
    for start in range(0, num_tokens, TILE):
        token = start + tl.arange(0, TILE)
        target = tl.load(target_ptr + token, mask=token < num_tokens, other=ignore_index)
        is_counted = target != ignore_index
        count += is_counted.to(tl.int64)
        outside += (is_counted & ((target < 0) | (target >= num_columns))).to(tl.int32)
    tl.store(count_ptr, tl.sum(count, axis=0))
    tl.store(is_allowed_ptr, tl.sum(outside, axis=0) == 0)


@triton.jit
def _accumulate(x, maximum, total):
    """The largest logit so far, and the sum of the exponentials of what the others are below it."""
    larger = tl.maximum(maximum, tl.max(x, axis=0))
    # Of logits that are all -inf, no difference to the largest can be taken.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    return larger, total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)


@triton.jit
def _gradient(x, column, target, logsumexp, softmax_factor, target_share, other_share, scale):
    # d loss / d x_j = (1 + 2 z logsumexp) softmax(x)_j - (1 - smoothing) [j = target] - smoothing / V
    gradient = softmax_factor * tl.exp(x - logsumexp) - other_share - tl.where(column == target, target_share, 0.0)
    # Tokens that are left out have a scale of zero, and a gradient of zero whatever their logits are.
    return tl.where(scale == 0.0, 0.0, gradient * scale)


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
    logsumexp_ptr,
    row_stride,
    num_columns,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    AVERAGED: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """Each program turns one token's logits into its loss, and in place into their gradient.

    The row is read from the front to the back, and again from the back to the front: its last tile stays in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    is_target = (target >= 0) & (target < num_columns)
    # Before the first reduction, behind which other threads overwrite it.
    target_logit = tl.load(logits_ptr + target, mask=is_target, other=float("nan")).to(tl.float32)

    tile = tl.arange(0, COLUMN_TILE)
    maximum = -float("inf")
    total = 0.0
    sum_of_logits = 0.0
    last = (tl.cdiv(num_columns, COLUMN_TILE) - 1) * COLUMN_TILE
    for start in range(0, last, COLUMN_TILE):
        x = tl.load(logits_ptr + start + tile).to(tl.float32)
        maximum, total = _accumulate(x, maximum, total)
        if SMOOTHED:
            sum_of_logits += tl.sum(x, axis=0)
    column = last + tile
    in_row = column < num_columns
    # Up to the stride, which is a multiple of what a thread reads at once, and not up to the last column.
    last_x = tl.load(logits_ptr + column, mask=column < row_stride, other=0.0).to(tl.float32)
    x = tl.where(in_row, last_x, -float("inf"))
    maximum, total = _accumulate(x, maximum, total)

    logsumexp = tl.where(maximum == float("inf"), maximum, maximum + tl.log(total))
    tl.store(logsumexp_ptr + row, logsumexp)
    # As of PyTorch's: the softmax of a row with an infinite logit is NaN.
    logsumexp = tl.where(tl.abs(maximum) == float("inf"), float("nan"), logsumexp)
    loss = logsumexp - target_logit + z_loss * logsumexp * logsumexp
    if SMOOTHED:
        sum_of_logits += tl.sum(tl.where(in_row, last_x, 0.0), axis=0)
        loss += label_smoothing * (target_logit - sum_of_logits / num_columns)
    is_counted = target != ignore_index
    tl.store(loss_ptr + row, tl.where(is_counted, loss, 0.0))

    if WITH_GRADIENT:
        scale = tl.where(is_counted, 1.0, 0.0)
        if AVERAGED:
            # At least 1 where a token is counted at all.
            scale /= tl.maximum(tl.load(count_ptr), 1).to(tl.float32)
        softmax_factor = 1.0 + 2.0 * z_loss * logsumexp
        target_share = 1.0 - label_smoothing
        other_share = label_smoothing / num_columns
        gradient = _gradient(x, column, target, logsumexp, softmax_factor, target_share, other_share, scale)
        tl.store(logits_ptr + column, gradient, mask=column < row_stride)
        for done in range(0, last, COLUMN_TILE):
            column = last - COLUMN_TILE - done + tile
            x = tl.load(logits_ptr + column).to(tl.float32)
            gradient = _gradient(x, column, target, logsumexp, softmax_factor, target_share, other_share, scale)
            tl.store(logits_ptr + column, gradient)


@triton.jit
def cross_entropy_scale_kernel(
    x_ptr, output_ptr, factor_ptr, num_elements, num_programs, SAME_MEMORY: tl.constexpr, TILE: tl.constexpr
):
    """output = factor x; in the same memory, a factor of 1 is done without reading it."""
    factor = tl.load(factor_ptr)
    if not SAME_MEMORY or factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * TILE
        for start in range(first, num_elements, num_programs * TILE):
            offset = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + offset, mask=offset < num_elements).to(tl.float32)
            tl.store(output_ptr + offset, x * factor, mask=offset < num_elements)


CHUNK_BYTES = LOGITS_CHUNK_BYTES
# A chunk is this many tokens or a multiple: the rows of a tile of cuBLAS.
CHUNK_ALIGNMENT = 128
# Rows of a chunk begin at multiples of this many logits, so that every row is read 128 bits at a time.
ROW_ALIGNMENT = 64
# cuBLAS is slow at products of which a side is no multiple of this, even if all rows are aligned: 8192 x 2560 x 50,257
# took 19.4 (logits), 16.1 (gradient of hidden) and 4.6 ms (of the weight), and 3.0, 2.9 and 2.8 in two parts.
PRODUCT_ALIGNMENT = 8
# Sums over chunks are kept in float32 next to a bfloat16 gradient if that leaves room for this many tokens.
MIN_CHUNK_TOKENS = 1024

# Logits of a tile, 16 in each thread: 0.95 ms for 4096 x 151,936 on an H200, 0.93 of the copy rate if both reads count
# (2048: 0.98, 8192: 1.11 ms). For 2048 x 10,000 it takes 42 us, a single tile for the whole row 75.
MAX_COLUMN_TILE = 4096
COLUMNS_OF_A_WARP = 512

COUNT_TILE = 4096
SCALE_TILE = 8192
MAX_SCALE_PROGRAMS = 1024


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    copy: torch.Tensor | None = None,
) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) == 0:
        raise ValueError(
            "hidden (..., d) needs a weight of shape (V, d) with at least one row, "
            f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if copy is not None and (copy.shape, copy.dtype, copy.device) != (weight.shape, dtype, weight.device):
        raise ValueError(
            f"the copy of a weight {tuple(weight.shape)} on {weight.device} must be like it and {dtype}, "
            f"got {tuple(copy.shape)} on {copy.device} and {copy.dtype}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} needs targets of shape {tuple(hidden.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be torch.int64, got {targets.dtype}")
    if hidden.dtype != dtype or weight.dtype not in (dtype, torch.float32):
        raise TypeError(f"hidden and weight must have the same dtype, got {hidden.dtype} and {weight.dtype}")
    if targets.device != hidden.device:
        raise ValueError(f"targets must be where hidden is, on {hidden.device}, got {targets.device}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be between 0 and 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is {z_loss}, but must be finite and at least 0")


def _count_targets(targets: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
    """Count targets that are not ignored, as a scalar on their device.

    One that is not in the vocabulary is, as in torch's cross-entropy, an IndexError on the CPU and a device-side
    assertion on a GPU, for which no host waits.
    """
    count = torch.empty((), dtype=torch.int64, device=targets.device)
    is_allowed = torch.empty((), dtype=torch.bool, device=targets.device)
    with torch.cuda.device_of(targets):
        cross_entropy_count_kernel[(1,)](
            targets, count, is_allowed, len(targets), vocab_size, ignore_index, TILE=COUNT_TILE, num_warps=16
        )
    if targets.is_cuda:
        torch._assert_async(is_allowed, f"linear_cross_entropy: a target is not in [0, {vocab_size})")
    elif not is_allowed:
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
        raise IndexError(
            f"target {targets[outside][0].item()} is not in the vocabulary: it must be in [0, {vocab_size}) "
            f"or ignore_index ({ignore_index})"
        )
    return count


def kept_dtype(weight_dtype: torch.dtype, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which the weight's gradient is kept for backward."""
    # float16 sums that are not yet divided by the number of tokens would overflow.
    return torch.float32 if torch.float16 in (dtype, weight_dtype) else gradient_dtype or weight_dtype


def _sums_dtype(
    weight: torch.Tensor, dtype: torch.dtype, kept: torch.dtype, chunk_bytes: int, logits_bytes: int
) -> torch.dtype:
    """The dtype in which the weight's gradient is summed over chunks; ``kept`` is that in which it is kept."""
    if dtype != torch.bfloat16 or kept == torch.float32:
        return torch.float32
    # Rounded after each of eight chunks, 151,936 x 4096 sums were off by 0.0025 of their norm; rounded once, by 0.0016.
    token_bytes = logits_bytes_of_a_token(len(weight), dtype)
    fits = chunk_bytes - 4 * weight.numel() >= MIN_CHUNK_TOKENS * token_bytes
    return torch.float32 if fits and logits_bytes > chunk_bytes else torch.bfloat16


def logits_bytes_of_a_token(vocab_size: int, dtype: torch.dtype) -> int:
    return triton.cdiv(vocab_size, ROW_ALIGNMENT) * ROW_ALIGNMENT * dtype.itemsize


def chunk_tokens(num_tokens: int, chunk_bytes: int, token_bytes: int) -> int:
    """Tokens of a chunk of at most ``chunk_bytes`` of logits; chunks are of about the same size. At least one token."""
    at_most = max(CHUNK_ALIGNMENT, chunk_bytes // token_bytes // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT)
    num_chunks = triton.cdiv(num_tokens, at_most)
    return triton.cdiv(triton.cdiv(num_tokens, num_chunks), CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def _add_product(total: torch.Tensor, grad_logits: torch.Tensor, rows: torch.Tensor, is_first: bool) -> None:
    """total (V, d) (+)= grad_logits (N, V)^T rows (N, d), added up in the dtype of ``total``."""
    beta = 0 if is_first else 1
    if total.dtype == rows.dtype:
        torch.addmm(total, grad_logits.mT, rows, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, grad_logits.mT, rows, out_dtype=total.dtype, beta=beta, out=total)
    else:
        # torch has no product of half types with a float32 result on the CPU.
        torch.addmm(total, grad_logits.mT.to(total.dtype), rows.to(total.dtype), beta=beta, out=total)


def launch_forward(
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
    """Loss, logsumexp, gradients of hidden and weight (empty where not needed), and what these still lack as a factor.

    The factor is 1 over the number of tokens for float16, which could not hold gradients that small, else empty.
    """
    check_arguments(hidden, weight, targets, label_smoothing, z_loss, dtype, copy)
    check_tensors("linear_cross_entropy", cross_entropy_forward_kernel, hidden=hidden, weight=weight)
    vocab_size, width = weight.shape
    targets = targets.reshape(-1).contiguous()
    num_tokens = len(targets)
    count = _count_targets(targets, vocab_size, ignore_index)
    rows = as_rows(hidden)
    compute_weight = weight.to(dtype) if copy is None else copy

    losses, logsumexp = (torch.empty(num_tokens, dtype=torch.float32, device=hidden.device) for _ in range(2))
    grad_hidden = torch.empty((num_tokens, width) if needs_grad_hidden else 0, dtype=dtype, device=hidden.device)
    token_bytes, chunk_bytes = logits_bytes_of_a_token(vocab_size, dtype), CHUNK_BYTES
    grad_weight, kept = hidden.new_empty(0), kept_dtype(weight.dtype, dtype, gradient_dtype)
    if needs_grad_weight:
        sums_dtype = _sums_dtype(weight, dtype, kept, chunk_bytes, num_tokens * token_bytes)
        if kept == torch.bfloat16 and sums_dtype == torch.float32:
            chunk_bytes -= 4 * weight.numel()
        grad_weight = torch.empty(weight.shape, dtype=sums_dtype, device=hidden.device)
        if num_tokens == 0:
            grad_weight.zero_()

    step = chunk_tokens(max(1, num_tokens), chunk_bytes, token_bytes)
    row_stride = token_bytes // dtype.itemsize
    aligned = vocab_size // PRODUCT_ALIGNMENT * PRODUCT_ALIGNMENT
    parts = [part for part in (slice(0, aligned), slice(aligned, vocab_size)) if part.stop > part.start]
    buffer = torch.empty((min(step, num_tokens), row_stride), dtype=dtype, device=hidden.device)
    column_tile = min(MAX_COLUMN_TILE, max(COLUMNS_OF_A_WARP, triton.next_power_of_2(vocab_size)))
    for start in range(0, num_tokens, step):
        chunk = slice(start, min(start + step, num_tokens))
        logits = buffer[: chunk.stop - start, :vocab_size]
        for part in parts:
            torch.mm(rows[chunk], compute_weight[part].mT, out=logits[:, part])
        with torch.cuda.device_of(hidden):
            cross_entropy_forward_kernel[(len(logits),)](
                logits,
                targets[chunk],
                count,
                losses[chunk],
                logsumexp[chunk],
                row_stride,
                vocab_size,
                ignore_index,
                label_smoothing,
                z_loss,
                SMOOTHED=label_smoothing > 0,
                WITH_GRADIENT=needs_grad_hidden or needs_grad_weight,
                AVERAGED=dtype != torch.float16,
                COLUMN_TILE=column_tile,
                num_warps=column_tile // COLUMNS_OF_A_WARP,
                enable_fp_fusion=True,
            )
        for part in parts:
            if needs_grad_hidden:
                grad = grad_hidden[chunk]
                if part.start == 0:
                    torch.mm(logits[:, part], compute_weight[part], out=grad)
                else:
                    torch.addmm(grad, logits[:, part], compute_weight[part], out=grad)
            if needs_grad_weight:
                _add_product(grad_weight[part], logits[:, part], rows[chunk], is_first=start == 0)
    del buffer

    if kept == torch.bfloat16:
        grad_weight = grad_weight.to(kept)
    factor = torch.empty(0, dtype=torch.float32, device=hidden.device)
    if dtype == torch.float16:
        # Without a token to be counted all gradients are zero, and stay so.
        factor = count.clamp(min=1).to(torch.float32).reciprocal()
    return losses.sum() / count, logsumexp.view(hidden.shape[:-1]), grad_hidden, grad_weight, factor


def launch_scale(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, overwrite: bool) -> torch.Tensor:
    """``factor`` times the gradient in ``dtype``, in its own memory where that is allowed and possible."""
    overwrite = overwrite and gradient.dtype == dtype
    output = gradient if overwrite else torch.empty_like(gradient, dtype=dtype)
    num_programs = min(MAX_SCALE_PROGRAMS, triton.cdiv(gradient.numel(), SCALE_TILE))
    if num_programs:
        with torch.cuda.device_of(gradient):
            cross_entropy_scale_kernel[(num_programs,)](
                gradient,
                output,
                factor,
                gradient.numel(),
                num_programs,
                SAME_MEMORY=overwrite,
                TILE=SCALE_TILE,
                num_warps=8,
            )
    return output


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
    launch_forward,
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
        compute = _operator if needs_operators(hidden) else launch_forward
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
            launch_scale(grad_hidden, factor, grad_hidden.dtype, overwrite).view(ctx.hidden_shape)
            if needs_hidden
            else None,
            launch_scale(grad_weight, factor, ctx.gradient_dtype, overwrite) if needs_weight else None,
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
    weight of which the float32 sums would not fit next to a chunk in ``CHUNK_BYTES``: its sums are rounded to bfloat16
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


def reference_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_logsumexp: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch, with all logits at once, for any dtypes: the ground truth of the tests."""
    logits = functional.linear(hidden, weight).reshape(-1, len(weight))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat_targets = targets.flatten()
    loss = functional.cross_entropy(logits, flat_targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
    logsumexp = logits.logsumexp(-1)
    if z_loss:
        loss = loss + z_loss * logsumexp[flat_targets != ignore_index].square().mean()
    return (loss, logsumexp.detach().view(targets.shape)) if return_logsumexp else loss
