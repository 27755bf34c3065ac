"""The kernels of linear_cross_entropy: what is not a matrix product."""

import triton
import triton.language as tl


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
