"""A linear layer and the cross-entropy of its logits, of which only one chunk of tokens exists at a time."""

import math
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.kernels.operators import (
    DTYPES,
    as_rows,
    check_tensors,
    define_call,
    define_function,
    define_gradient,
    needs_operators,
)


@triton.jit
def _accumulate(x, maximum, total):
    """Return the maximum of all logits so far, x among them, and the sum of exp(logit - maximum)."""
    new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
    # Where all logits are -inf, the difference to their maximum would be NaN.
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    return new_maximum, total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)


@triton.jit
def _load_logits(pointers, mask, other, softcap, CAPPED: tl.constexpr):
    """Load logits in float32; if CAPPED as softcap * tanh(x / softcap), to the precision of float32 near 0 as well."""
    x = tl.load(pointers, mask=mask, other=other).to(tl.float32)
    if CAPPED:
        ratio = x / softcap
        square = ratio * ratio
        decay = tl.exp(-2.0 * tl.abs(ratio))
        tanh = (1.0 - decay) / (1.0 + decay)
        # Near 0, where this difference loses digits, by the Taylor series of tanh.
        series = 1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315)))
        x = softcap * tl.where(square < 0.01, ratio * series, tl.where(ratio < 0.0, -tanh, tanh))
    return x


@triton.jit
def _load_class_weights(class_weight_ptr, column, num_columns, WEIGHTED: tl.constexpr):
    weights = 1.0
    if WEIGHTED:
        weights = tl.load(class_weight_ptr + column, mask=column < num_columns, other=0.0)
    return weights


@triton.jit
def _reduce_row(
    logits_ptr, class_weight_ptr, origin, tile, last_start, num_columns, row_stride, softcap,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """Reduce a row of logits x to its maximum and its sums; the tile at ``last_start``, read last, is returned as well.

    ``tile``: 0, 1, ... for the columns of a tile. ``origin``: the target's logit, which label smoothing subtracts.

    Returns:
        x of the last tile; the maximum of the row; the sum of exp(x - maximum); the class weights of the last tile, 1
        without weights or label smoothing; the sum of weight (x - origin), 0 without label smoothing.
    """
    maximum = -float("inf")
    total = 0.0
    sum_of_logits = 0.0
    for start in range(0, last_start, COLUMN_TILE):
        x = _load_logits(logits_ptr + start + tile, mask=None, other=None, softcap=softcap, CAPPED=CAPPED)
        maximum, total = _accumulate(x, maximum, total)
        if SMOOTHED:
            weights = _load_class_weights(class_weight_ptr, start + tile, num_columns, WEIGHTED)
            sum_of_logits += tl.sum(weights * (x - origin), axis=0)
    column = last_start + tile
    in_row = column < num_columns
    # Up to the stride, where what a thread reads at once ends, too, as it need not at the last column; masked below.
    last_x = _load_logits(logits_ptr + column, mask=column < row_stride, other=0.0, softcap=softcap, CAPPED=CAPPED)
    x = tl.where(in_row, last_x, -float("inf"))
    maximum, total = _accumulate(x, maximum, total)
    weights = _load_class_weights(class_weight_ptr, column, num_columns, SMOOTHED and WEIGHTED)
    if SMOOTHED:
        sum_of_logits += tl.sum(tl.where(in_row, weights * (last_x - origin), 0.0), axis=0)
    return x, maximum, total, weights, sum_of_logits


@triton.jit
def _share_loss(
    loss, origin_loss, sum_of_logits, target_weight, total_weight_ptr, num_columns, label_smoothing,
    SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Return the loss of a token, and the factors of target, class weight and softmax in :func:`_logit_gradient`.

    ``origin_loss`` is the loss if the target's logit were the origin, ``sum_of_logits`` that of weight (x - origin).
    """
    target_share = target_weight
    softmax_share = target_weight
    other_share = 0.0
    if SMOOTHED:
        other_share = label_smoothing / num_columns
        total_weight = num_columns.to(tl.float32)
        if WEIGHTED:
            total_weight = tl.load(total_weight_ptr)
        target_share *= 1.0 - label_smoothing
        softmax_share = target_share + other_share * total_weight
        loss = target_share * loss + other_share * (total_weight * origin_loss - sum_of_logits)
    elif WEIGHTED:
        loss *= target_weight
    return loss, target_share, other_share, softmax_share


# What all columns of a row have in common.
Shares = namedtuple("Shares", "target maximum softmax_factor target_share other_share scale softcap")


@triton.jit
def _logit_gradient(x, column, weights, shares, CAPPED: tl.constexpr):
    """Return d loss / d x_j = softmax_share softmax(x)_j - target_share [j = target] - other_share weight_j, scaled."""
    # Not exp(x - logsumexp): maximum + log(sum) would have no digits left for log(sum) where all logits are large.
    softmax = shares.softmax_factor * tl.exp(x - shares.maximum)
    gradient = softmax - shares.other_share * weights - tl.where(column == shares.target, shares.target_share, 0.0)
    if CAPPED:
        gradient *= 1.0 - (x / shares.softcap) * (x / shares.softcap)
    # Ignored tokens have a scale of zero, and a gradient of zero even where their logits are not finite.
    return tl.where(shares.scale == 0.0, 0.0, gradient * shares.scale)


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, target_ptr, divisor_ptr, loss_ptr, logsumexp_ptr, class_weight_ptr, total_weight_ptr, grad_loss_ptr,
    row_stride, num_columns, ignore_index, label_smoothing, z_loss, softcap, SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, WITH_GRADIENT: tl.constexpr, AVERAGED: tl.constexpr,
    SCALED: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """Turn one token's logits into its loss, and in place into their gradient, in each program.

    The row is read from the front to the back, and again from the back to the front: its last tile stays in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    is_target = (target >= 0) & (target < num_columns)
    # Loaded before the first reduction: once past it, other threads overwrite the row.
    target_logit = _load_logits(logits_ptr + target, mask=is_target, other=float("nan"), softcap=softcap, CAPPED=CAPPED)
    target_weight = 1.0
    if WEIGHTED:
        target_weight = tl.load(class_weight_ptr + target, mask=is_target, other=0.0)
    # Label smoothing sums the logits' differences to this one, which are small where all logits are large.
    origin = tl.where(target_logit == -float("inf"), 0.0, target_logit)

    tile = tl.arange(0, COLUMN_TILE)
    last_start = (tl.cdiv(num_columns, COLUMN_TILE) - 1) * COLUMN_TILE
    x, maximum, total, weights, sum_of_logits = _reduce_row(
        logits_ptr, class_weight_ptr, origin, tile, last_start, num_columns, row_stride, softcap,
        SMOOTHED, CAPPED, WEIGHTED, COLUMN_TILE,
    )  # fmt: skip
    log_total = tl.log(total)
    tl.store(logsumexp_ptr + row, tl.where(maximum == float("inf"), maximum, maximum + log_total))
    # As in PyTorch, the softmax of a row with an infinite logit is NaN.
    maximum = tl.where(tl.abs(maximum) == float("inf"), float("nan"), maximum)
    logsumexp = maximum + log_total
    # The losses as logsumexp - logit, log_total last: added to a large maximum it would lose its digits.
    loss, target_share, other_share, softmax_share = _share_loss(
        maximum - target_logit + log_total, maximum - origin + log_total, sum_of_logits, target_weight,
        total_weight_ptr, num_columns, label_smoothing, SMOOTHED, WEIGHTED,
    )  # fmt: skip
    is_counted = target != ignore_index
    tl.store(loss_ptr + row, tl.where(is_counted, loss + z_loss * logsumexp * logsumexp, 0.0))

    if WITH_GRADIENT:
        scale = 1.0
        if AVERAGED:
            divisor = tl.load(divisor_ptr).to(tl.float32)
            scale /= tl.where(divisor == 0.0, 1.0, divisor)
        if SCALED:
            scale *= tl.load(grad_loss_ptr + row)
        scale = tl.where(is_counted, scale, 0.0)
        softmax_factor = (softmax_share + 2.0 * z_loss * logsumexp) / total
        column = last_start + tile  # Stored up to the stride, as _reduce_row() loads it.
        shares = Shares(target, maximum, softmax_factor, target_share, other_share, scale, softcap)
        tl.store(logits_ptr + column, _logit_gradient(x, column, weights, shares, CAPPED), mask=column < row_stride)
        for columns_done in range(0, last_start, COLUMN_TILE):
            column = last_start - COLUMN_TILE - columns_done + tile
            x = _load_logits(logits_ptr + column, mask=None, other=None, softcap=softcap, CAPPED=CAPPED)
            weights = _load_class_weights(class_weight_ptr, column, num_columns, SMOOTHED and WEIGHTED)
            tl.store(logits_ptr + column, _logit_gradient(x, column, weights, shares, CAPPED))


@triton.jit
def cross_entropy_scale_kernel(
    x_ptr, output_ptr, factor_ptr, num_elements, num_programs, SAME_MEMORY: tl.constexpr, TILE: tl.constexpr
):
    """Compute output = factor x; in the same memory a factor of 1 reads and writes nothing."""
    factor = tl.load(factor_ptr)
    if not SAME_MEMORY or factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * TILE
        for start in range(first, num_elements, num_programs * TILE):
            offset = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + offset, mask=offset < num_elements).to(tl.float32)
            tl.store(output_ptr + offset, x * factor, mask=offset < num_elements)


CHUNK_BYTES = LOGITS_CHUNK_BYTES
CHUNK_ALIGNMENT = 128  # A chunk is this many tokens or a multiple: the rows of a tile of cuBLAS.
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

SCALE_TILE = 8192
MAX_SCALE_PROGRAMS = 1024


REDUCTIONS = ("mean", "sum", "none")


class LossOptions(NamedTuple):
    """The operator's arguments after its three tensors, in its order; see :func:`linear_cross_entropy`.

    ``dtype`` is that of the products. ``grad_loss`` has a number for each token, by which its gradients are multiplied.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    dtype: torch.dtype
    needs_grad_hidden: bool
    needs_grad_weight: bool
    copy: Tensor | None = None
    gradient_dtype: torch.dtype | None = None
    reduction: str = "mean"
    softcap: float | None = None
    class_weight: Tensor | None = None
    grad_loss: Tensor | None = None

    @property
    def is_averaged(self) -> bool:
        return self.reduction == "mean"

    @property
    def is_deferred(self) -> bool:
        """Return whether gradients wait for backward, which has a factor for each token."""
        return self.reduction == "none" and self.grad_loss is None

    @property
    def makes_gradients(self) -> tuple[bool, bool]:
        """Return whether this call makes the gradient of hidden and that of the weight."""
        return self.needs_grad_hidden and not self.is_deferred, self.needs_grad_weight and not self.is_deferred


def check_arguments(hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> None:
    """Refuse, in one sentence, tensors that do not fit together and options out of range."""
    dtype, copy, class_weight = options.dtype, options.copy, options.class_weight
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
    if hidden.dtype != dtype or weight.dtype not in (dtype, torch.float32):  # float32: under autocast.
        raise TypeError(f"hidden and weight must have the same dtype, got {hidden.dtype} and {weight.dtype}")
    if targets.device != hidden.device:
        raise ValueError(f"targets must be where hidden is, on {hidden.device}, got {targets.device}")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {options.label_smoothing}, but must be between 0 and 1")
    if not 0 <= options.z_loss < math.inf:
        raise ValueError(f"z_loss is {options.z_loss}, but must be finite and at least 0")
    if options.gradient_dtype not in (None, *DTYPES):
        choices = ", ".join(map(str, DTYPES))
        raise TypeError(f"gradient_dtype {options.gradient_dtype} is not supported: choose None or one of {choices}")
    if options.reduction not in REDUCTIONS:
        raise ValueError(f"reduction {options.reduction!r} does not exist: choose one of {', '.join(REDUCTIONS)}")
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise ValueError(f"softcap is {options.softcap}, but must be finite and greater than 0, or None for no cap")
    if class_weight is None:
        return
    if (class_weight.shape, class_weight.device) != (weight.shape[:1], weight.device):
        raise ValueError(
            f"class_weight must have shape {tuple(weight.shape[:1])} on {weight.device}, "
            f"got {tuple(class_weight.shape)} on {class_weight.device}"
        )
    if class_weight.dtype != torch.float32 or class_weight.requires_grad:
        raise TypeError(
            f"class_weight must be torch.float32 without a gradient, got {class_weight.dtype}"
            + " that requires one" * class_weight.requires_grad
        )
    if options.z_loss:  # The kernel multiplies no z_loss by a class weight.
        raise ValueError(f"z_loss {options.z_loss} cannot be combined with class_weight: choose z_loss=0 or no weights")


def kept_dtype(weight_dtype: torch.dtype, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which the weight's gradient is kept for backward."""
    # float16 sums that are not yet divided by the number of tokens would overflow.
    return torch.float32 if torch.float16 in (dtype, weight_dtype, gradient_dtype) else gradient_dtype or weight_dtype


def _allocate_grad_weight(
    weight: Tensor, kept: torch.dtype, num_tokens: int, options: LossOptions
) -> tuple[Tensor, int]:
    """Return memory for sums of the weight's gradient, empty if not needed, and the bytes left for a chunk's logits.

    They are fewer where the sums are in float32 and are rounded to a second tensor of dtype ``kept`` in the end.
    """
    _, makes_grad_weight = options.makes_gradients
    if not makes_grad_weight:
        return torch.empty(0, dtype=options.dtype, device=weight.device), CHUNK_BYTES
    sums_dtype, sums_bytes = torch.float32, 4 * weight.numel()
    # Rounded after each of eight chunks, 151,936 x 4096 sums were off by 0.0025 of their norm; rounded once, by 0.0016.
    if options.dtype == kept == torch.bfloat16:
        token_bytes = logits_bytes_of_a_token(len(weight), options.dtype)
        sums_fit = CHUNK_BYTES - sums_bytes >= MIN_CHUNK_TOKENS * token_bytes
        has_several_chunks = num_tokens * token_bytes > CHUNK_BYTES
        sums_dtype = torch.float32 if sums_fit and has_several_chunks else torch.bfloat16
    allocate = torch.empty if num_tokens else torch.zeros  # Without tokens no product writes it.
    has_wide_sums = kept == torch.bfloat16 and sums_dtype == torch.float32
    grad_weight = allocate(weight.shape, dtype=sums_dtype, device=weight.device)
    return grad_weight, CHUNK_BYTES - (sums_bytes if has_wide_sums else 0)


def logits_bytes_of_a_token(vocab_size: int, dtype: torch.dtype) -> int:
    return triton.cdiv(vocab_size, ROW_ALIGNMENT) * ROW_ALIGNMENT * dtype.itemsize


def chunk_tokens(num_tokens: int, chunk_bytes: int, token_bytes: int) -> int:
    """Return the tokens of a chunk, about as many in each: ``CHUNK_ALIGNMENT``, or more if ``chunk_bytes`` allow it."""
    most_tokens = max(CHUNK_ALIGNMENT, chunk_bytes // token_bytes // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT)
    num_chunks = triton.cdiv(num_tokens, most_tokens)
    return triton.cdiv(triton.cdiv(num_tokens, num_chunks), CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def _add_product(total: Tensor, grad_logits: Tensor, rows: Tensor, is_first: bool) -> None:
    """Add grad_logits (N, V)^T rows (N, d) to total (V, d), in the dtype of ``total``; write it if ``is_first``."""
    beta = 0 if is_first else 1
    if total.dtype == rows.dtype:
        torch.addmm(total, grad_logits.mT, rows, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, grad_logits.mT, rows, out_dtype=total.dtype, beta=beta, out=total)
    else:
        # torch has no product of half types with a float32 result on the CPU.
        torch.addmm(total, grad_logits.mT.to(total.dtype), rows.to(total.dtype), beta=beta, out=total)


def launch_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute loss and gradients, a chunk of tokens at a time; ``arguments``: :class:`LossOptions`.

    Returns:
        Loss, logsumexp, gradients of hidden and weight (empty where not needed), and the factor that these still lack
        (empty if it is 1).
    """
    options = LossOptions(*arguments)
    check_arguments(hidden, weight, targets, options)
    check_tensors("linear_cross_entropy", cross_entropy_forward_kernel, hidden=hidden, weight=weight)
    dtype = options.dtype
    needs_grad_hidden, needs_grad_weight = options.makes_gradients
    vocab_size, width = weight.shape
    targets = targets.reshape(-1).contiguous()
    num_tokens = len(targets)
    divisor, total_weight = _count_weights(targets, vocab_size, options)
    factor, grad_loss = _split_factor(divisor, options)
    rows = as_rows(hidden)
    compute_weight = weight.to(dtype) if options.copy is None else options.copy

    losses, logsumexp = (torch.empty(num_tokens, dtype=torch.float32, device=hidden.device) for _ in range(2))
    grad_hidden = torch.empty((num_tokens, width) if needs_grad_hidden else 0, dtype=dtype, device=hidden.device)
    kept = kept_dtype(weight.dtype, dtype, options.gradient_dtype)
    grad_weight, chunk_bytes = _allocate_grad_weight(weight, kept, num_tokens, options)

    token_bytes = logits_bytes_of_a_token(vocab_size, dtype)
    tokens_of_chunk = chunk_tokens(max(1, num_tokens), chunk_bytes, token_bytes)  # Divides by the number of chunks.
    aligned_size = vocab_size // PRODUCT_ALIGNMENT * PRODUCT_ALIGNMENT  # cuBLAS is slow at other sizes: two products.
    parts = [part for part in (slice(0, aligned_size), slice(aligned_size, vocab_size)) if part.stop > part.start]
    buffer_shape = min(tokens_of_chunk, num_tokens), token_bytes // dtype.itemsize  # Rows are padded to ROW_ALIGNMENT.
    buffer = torch.empty(buffer_shape, dtype=dtype, device=hidden.device)
    for start in range(0, num_tokens, tokens_of_chunk):
        chunk = slice(start, min(start + tokens_of_chunk, num_tokens))
        logits = buffer[: chunk.stop - start, :vocab_size]
        for part in parts:
            torch.mm(rows[chunk], compute_weight[part].mT, out=logits[:, part])
        scales = None if grad_loss is None else grad_loss[chunk]
        _launch_kernel(logits, targets[chunk], losses[chunk], logsumexp[chunk], scales, divisor, total_weight, options)
        for part in parts:
            if needs_grad_hidden:
                grad = grad_hidden[chunk]
                if part.start == 0:
                    torch.mm(logits[:, part], compute_weight[part], out=grad)
                else:
                    torch.addmm(grad, logits[:, part], compute_weight[part], out=grad)
            if needs_grad_weight:
                _add_product(grad_weight[part], logits[:, part], rows[chunk], is_first=start == 0)

    if needs_grad_weight:  # Sums of a gradient that is kept in bfloat16 may be in float32.
        grad_weight = grad_weight.to(kept)
    loss = losses.sum() / divisor if options.is_averaged else losses.sum()
    if options.reduction == "none":
        loss = losses.view(hidden.shape[:-1])
    return loss, logsumexp.view(hidden.shape[:-1]), grad_hidden, grad_weight, factor


def _count_weights(targets: Tensor, vocab_size: int, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return the sum of the targets' weights, by which a mean is divided, and the sum of all class weights.

    A target outside the vocabulary is, as in torch's cross-entropy, an IndexError on the CPU and a device-side
    assertion on a GPU, for which the host does not wait.
    """
    is_counted = targets != options.ignore_index
    is_outside = is_counted & ((targets < 0) | (targets >= vocab_size))
    if targets.is_cuda:
        torch._assert_async(~is_outside.any(), f"linear_cross_entropy: a target is not in [0, {vocab_size})")
    elif is_outside.any():
        raise IndexError(
            f"target {targets[is_outside][0].item()} is not in the vocabulary: it must be in [0, {vocab_size}) "
            f"or ignore_index ({options.ignore_index})"
        )
    if options.class_weight is None:
        count = is_counted.sum()
        return count, count  # The second stands in for a sum that the kernel does not read.
    weights = options.class_weight[targets.where(is_counted, 0)].where(is_counted, 0)
    return weights.sum(), options.class_weight.sum()


def _split_factor(divisor: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """Return the factor by which backward is to multiply gradients, empty if it is 1, and ``grad_loss`` without it.

    Of float16, which could not hold gradients that small, it is 1 / divisor, or the largest of ``grad_loss``.
    """
    factor, grad_loss = torch.empty(0, dtype=torch.float32, device=divisor.device), options.grad_loss
    if options.dtype == torch.float16 and options.is_averaged:
        # Without a token that counts all gradients are zero, and stay so times 1.
        factor = divisor.to(torch.float32).reciprocal().where(divisor != 0, 1)
    if grad_loss is not None:
        # The gradient of a sum is one number that is read as many: of stride 0.
        grad_loss = grad_loss.reshape(-1).to(torch.float32).contiguous()
        if options.dtype == torch.float16 and len(grad_loss):
            factor = grad_loss.abs().max()
            grad_loss = (grad_loss / factor).where(factor != 0, 0)
    return factor, grad_loss


def _launch_kernel(
    logits: Tensor, targets: Tensor, losses: Tensor, logsumexp: Tensor, grad_loss: Tensor | None,
    divisor: Tensor, total_weight: Tensor, options: LossOptions,  # The first two: of _count_weights().
) -> None:  # fmt: skip
    """Write losses and logsumexps of a chunk (tokens,), and into its logits (tokens, V) their gradients."""
    vocab_size, class_weight = logits.shape[1], options.class_weight
    column_tile = min(MAX_COLUMN_TILE, max(COLUMNS_OF_A_WARP, triton.next_power_of_2(vocab_size)))
    with torch.cuda.device_of(logits):
        cross_entropy_forward_kernel[(len(logits),)](
            logits, targets, divisor, losses, logsumexp,
            None if class_weight is None else class_weight.contiguous(), total_weight, grad_loss,
            logits.stride(0), vocab_size, options.ignore_index, options.label_smoothing, options.z_loss,
            options.softcap or 0.0,  # Not read unless CAPPED.
            SMOOTHED=options.label_smoothing > 0,
            CAPPED=options.softcap is not None,
            WEIGHTED=class_weight is not None,
            WITH_GRADIENT=any(options.makes_gradients),
            AVERAGED=options.is_averaged and options.dtype != torch.float16,  # Left to backward by _split_factor().
            SCALED=grad_loss is not None,
            COLUMN_TILE=column_tile,
            num_warps=column_tile // COLUMNS_OF_A_WARP,
            enable_fp_fusion=True,  # Without it triton 3.9 warns that it will not be the default.
        )  # fmt: skip


def launch_scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """Return ``factor`` times the gradient in ``dtype``, in its own memory where that is allowed and possible."""
    overwrite = overwrite and gradient.dtype == dtype
    output = gradient if overwrite else torch.empty_like(gradient, dtype=dtype)
    num_programs = min(MAX_SCALE_PROGRAMS, triton.cdiv(gradient.numel(), SCALE_TILE))
    if num_programs:
        with torch.cuda.device_of(gradient):
            cross_entropy_scale_kernel[(num_programs,)](
                gradient, output, factor, gradient.numel(), num_programs,
                SAME_MEMORY=overwrite, TILE=SCALE_TILE, num_warps=8,
            )  # fmt: skip
    return output


def _fake_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return results like those of :func:`launch_forward`, without values."""
    options = LossOptions(*arguments)
    check_arguments(hidden, weight, targets, options)
    kept = kept_dtype(weight.dtype, options.dtype, options.gradient_dtype)
    makes_hidden, makes_weight = options.makes_gradients
    has_factor = options.dtype == torch.float16 and (options.is_averaged or options.grad_loss is not None)
    return (
        hidden.new_empty(hidden.shape[:-1] if options.reduction == "none" else (), dtype=torch.float32),  # Loss.
        hidden.new_empty(hidden.shape[:-1], dtype=torch.float32),  # Logsumexp.
        hidden.new_empty((targets.numel(), hidden.shape[-1]) if makes_hidden else 0),  # Gradient of hidden.
        hidden.new_empty(weight.shape, dtype=kept) if makes_weight else hidden.new_empty(0),  # Of the weight.
        hidden.new_empty(() if has_factor else 0, dtype=torch.float32),  # What these still lack.
    )


_compute = define_call(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, float label_smoothing, "
    "float z_loss, ScalarType dtype, bool needs_grad_hidden, bool needs_grad_weight, Tensor? copy=None, "
    "ScalarType? gradient_dtype=None, str reduction='mean', float? softcap=None, Tensor? class_weight=None, "
    "Tensor? grad_loss=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch_forward,
    fake=_fake_forward,
)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, *arguments = inputs
    options = LossOptions(*arguments)
    ctx.hidden_shape, ctx.gradient_dtype = hidden.shape, options.gradient_dtype or weight.dtype
    ctx.options = options._replace(copy=None, class_weight=None)  # Tensors are kept by save_for_backward() alone.
    ctx.mark_non_differentiable(*output[1:])  # Gradients that backward returns would else have this node behind them.
    ctx.set_materialize_grads(False)  # Zeros for the results that are gradients would be as large as these.
    if options.is_deferred:
        ctx.save_for_backward(hidden, weight, targets, options.copy, options.class_weight)
    else:
        ctx.save_for_backward(*output[2:])


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's arguments: none if nothing has read the loss."""
    options = ctx.options
    no_gradients = (None,) * (1 + len(options))  # Of targets and options.
    if grad_loss is None:
        return None, None, *no_gradients
    are_compiled = needs_operators(grad_loss)
    if options.is_deferred:
        hidden, weight, targets, copy, class_weight = ctx.saved_tensors
        options = options._replace(copy=copy, class_weight=class_weight, grad_loss=grad_loss)
        _, _, grad_hidden, grad_weight, factor = _compute(hidden, weight, targets, *options)
        overwrite = True  # They were made for this pass alone.
    else:
        grad_hidden, grad_weight, factor = ctx.saved_tensors
        factor = factor * grad_loss if factor.numel() else grad_loss  # An empty factor is 1.
        # A second backward pass would scale gradients in place twice, or change those that the first has returned.
        overwrite = not torch._C._autograd._get_current_graph_task_keep_graph()
    if factor.numel() and are_compiled:  # Compilers may not write to memory kept for backward.
        grad_hidden, grad_weight = grad_hidden * factor, grad_weight * factor
    elif factor.numel():
        grad_hidden = launch_scale(grad_hidden, factor, grad_hidden.dtype, overwrite)
        grad_weight = launch_scale(grad_weight, factor, ctx.gradient_dtype, overwrite)
    return (
        grad_hidden.view(ctx.hidden_shape) if options.needs_grad_hidden else None,
        grad_weight.to(ctx.gradient_dtype) if options.needs_grad_weight else None,
        *no_gradients,
    )


define_gradient("linear_cross_entropy", _differentiate, _save_for_backward)


@register_flop_formula(torch.ops.cs336sys.linear_cross_entropy)
def _flops(
    hidden_shape: torch.Size, weight_shape: torch.Size, targets_shape: torch.Size, *arguments: Any, **kwargs: Any
) -> int:
    """Count 2 N d V for the logits, and as many for each gradient."""
    options = LossOptions(*arguments)
    num_products = 1 if options.is_deferred else 1 + options.needs_grad_hidden + options.needs_grad_weight
    return 2 * num_products * math.prod(hidden_shape) * weight_shape[0]


# Dispatch modes see this function, too, and in it the operator; compilers see the operator alone.
LinearCrossEntropy = define_function("LinearCrossEntropy", _compute, _differentiate, _save_for_backward, twice=False)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    return_logsumexp: bool = False,
    copy: Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the cross-entropy of the logits ``hidden @ weight.T``, without keeping the logits.

    With x the logits of a token, t its target, L = logsumexp(x) and w the class weights, the token's loss in nats is

        (1 - label_smoothing) w_t (L - x_t) + label_smoothing mean_j w_j (L - x_j) + z_loss L^2

    The forward pass makes both gradients, a chunk of tokens at a time, with at most ``CHUNK_BYTES`` of logits; backward
    multiplies them by what comes in. With reduction "none" backward makes them, from logits that it computes again.
    Under autocast products are in its dtype, and a float32 weight gets a float32 gradient. Products are summed in
    float32, and so is the weight's gradient over chunks, but for a bfloat16 weight of which such sums would not fit
    next to a chunk. Results are equal from run to run. Differentiable once, in ``hidden`` and ``weight``.

    Args:
        hidden: (..., d), float32, float16 or bfloat16, any strides.
        weight: (V, d), of the dtype and on the device of ``hidden``; under autocast either may be in float32.
        targets: (...), int64, in [0, V) or ``ignore_index``. Any other is an IndexError on the CPU and a device-side
            assertion on a GPU, as in torch's cross-entropy.
        ignore_index: targets of this value are left out of the loss and of the mean.
        label_smoothing: the share of the uniform distribution in the targets, 0 to 1.
        z_loss: weight of the squared logsumexp (PaLM, https://arxiv.org/abs/2204.02311, section 5), at least 0.
        reduction: "mean", with ``class_weight`` the sum divided by the targets' weights; "sum"; or "none", a loss for
            each token, 0 where it is left out. As in torch.
        softcap: logits are softcap * tanh(logits / softcap), as in Gemma 2; None leaves them as they are.
        class_weight: (V,), float32, a factor for each target's loss, as torch's ``weight``; not with ``z_loss``.
        return_logsumexp: return the logsumexp as well; no gradient flows through it.
        copy: the weight in the products' dtype, which is read in place of the weight.
        gradient_dtype: of the weight's gradient as it is made, None for the weight's dtype; autograd casts it to the
            weight's ``grad_dtype``.

    Returns:
        The loss in float32, a scalar or with reduction "none" (...); as a mean NaN if no target is counted. Or loss and
        logsumexp of the capped logits, (...), float32, natural.

    Raises:
        ValueError: shapes or devices do not fit together, or an option is out of range.
        IndexError: a target is out of range, on the CPU.
        TypeError, CapabilityError, RuntimeError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    device_type, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        # float64 stays what it is, as in autocast's own products.
        hidden = hidden.to(dtype) if hidden.dtype in DTYPES else hidden
        weight = weight.to(dtype) if weight.dtype in DTYPES and weight.dtype != torch.float32 else weight
    elif weight.dtype != dtype:
        raise TypeError(f"hidden and weight must have the same dtype, got {dtype} and {weight.dtype}")
    needs_hidden, needs_weight = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight))
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, dtype, needs_hidden, needs_weight, copy, gradient_dtype, reduction,
        softcap, class_weight,
    )  # fmt: skip
    with torch.autocast(device_type, enabled=False):
        compute = _compute if torch.compiler.is_compiling() else LinearCrossEntropy.apply
        loss, logsumexp, *_ = compute(hidden, weight, targets, *options)
    return (loss, logsumexp.detach()) if return_logsumexp else loss
