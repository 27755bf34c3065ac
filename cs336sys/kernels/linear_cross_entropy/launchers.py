"""Loss and gradients of linear_cross_entropy, a chunk of tokens at a time."""

import math

import torch
import triton

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.kernels.linear_cross_entropy.kernels import (
    cross_entropy_count_kernel,
    cross_entropy_forward_kernel,
    cross_entropy_scale_kernel,
)
from cs336sys.kernels.operators import as_rows, check_tensors

CHUNK_BYTES = LOGITS_CHUNK_BYTES
# A chunk is this many tokens or a multiple: the rows of a tile of cuBLAS.
CHUNK_ALIGNMENT = 128
# Rows of a chunk begin at multiples of this many logits, so that every row is read 128 bits at a time.
ROW_ALIGNMENT = 64
# cuBLAS is slow at products of which a side is no multiple of this, even if all rows are aligned: 8192 x 2560 x 50,257
# took 19.4 (logits), 16.1 (gradient of hidden) and 4.6 ms (of the weight), and 3.0, 2.9 and 2.8 in two parts.
PRODUCT_ALIGNMENT = 8
# Sums over chunks are kept in float32 beside a bfloat16 gradient if that leaves room for this many tokens.
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
    """How many are not ignored, as a scalar where they are.

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


def forward(
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


def scale(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, overwrite: bool) -> torch.Tensor:
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
