"""FlashAttention-2 in PyTorch alone: what the Triton kernels do, in operations that can be read and printed.

Memory grows linearly with the sequence: scores exist for one tile at a time, and the backward pass computes them again
from the logsumexp. Slow, and accurate: float64 inputs are computed in float64, all others in float32.

Source: Dao, "FlashAttention-2" (2023); algorithms and equations are numbered as in the course's 2026 handout.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from cs336sys.kernels.attention.validation import check_attention_inputs
from cs336sys.kernels.autograd import once_differentiable

# Queries and keys of a tile. Square tiles of 64, 128, 256 and 512 took 46, 37, 41 and 71 ms for forward and backward of
# 4 x 1024 x 64, causal, float32, on one CPU core.
CPU_TILE = (128, 128)
# A matmul of 1024 x 1024 x 64 is 0.13 GFLOP, 2.2 us at the 60 TFLOP/s of an H200 in float32: with smaller tiles the
# GPU would only wait for launches, of about 5 us each.
GPU_TILE = (1024, 1024)


def _tile_shape(device: torch.device) -> tuple[int, int]:
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def _tiles(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _visible_keys(rows: slice, num_keys: int, is_causal: bool) -> int:
    """How many keys some query of ``rows`` sees: if causal, none beyond the last query's own."""
    return min(num_keys, rows.stop) if is_causal else num_keys


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """What to subtract from scores before exp: -inf, of a row that saw only -inf, would make -inf - -inf = NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _scores(
    scaled_query: torch.Tensor, key: torch.Tensor, rows: slice, columns: slice, is_causal: bool
) -> torch.Tensor:
    """One tile of Q K^T / sqrt(d), masked only if it crosses the diagonal."""
    scores = scaled_query[..., rows, :] @ key[..., columns, :].mT
    if is_causal and columns.stop - 1 > rows.start:
        query_index = torch.arange(rows.start, rows.stop, device=scores.device)
        key_index = torch.arange(columns.start, columns.stop, device=scores.device)
        scores.masked_fill_(key_index > query_index[:, None], -math.inf)
    return scores


def _tiled_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1: the output (..., S_q, D) in the inputs' dtype, and the logsumexp (..., S_q)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query)
    logsumexp = torch.empty(query.shape[:-1], dtype=dtype, device=query.device)
    query, key, value = query.to(dtype) / math.sqrt(query.shape[-1]), key.to(dtype), value.to(dtype)
    query_tile, key_tile = _tile_shape(query.device)

    for rows in _tiles(query.shape[-2], query_tile):
        out_tile = torch.zeros_like(query[..., rows, :])
        row_sum = torch.zeros_like(out_tile[..., :1])
        row_max = torch.full_like(row_sum, -math.inf)
        for columns in _tiles(_visible_keys(rows, key.shape[-2], is_causal), key_tile):
            scores = _scores(query, key, rows, columns, is_causal)
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - _finite(new_max))
            rescale = torch.exp(row_max - _finite(new_max))
            row_sum = rescale * row_sum + weights.sum(dim=-1, keepdim=True)
            out_tile = rescale * out_tile + weights @ value[..., columns, :]
            row_max = new_max
        # The sum is 0 where all scores are -inf: such a row's output is 0 / 1.
        out[..., rows, :] = out_tile / row_sum.masked_fill(row_sum == 0.0, 1.0)
        logsumexp[..., rows] = (row_max + torch.log(row_sum)).squeeze(-1)
    return out, logsumexp


def _backward_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What equations 13 to 19 read, in the logsumexp's dtype: Q / sqrt(d), K, V, L, dO and D = rowsum(dO * O)."""
    dtype = logsumexp.dtype
    scaled_query, grad_out = query.to(dtype) / math.sqrt(query.shape[-1]), grad_out.to(dtype)
    delta = (grad_out * out).sum(dim=-1, keepdim=True)
    return scaled_query, key.to(dtype), value.to(dtype), logsumexp.unsqueeze(-1), grad_out, delta


def _gradients(
    scaled_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    delta: torch.Tensor,
    rows: slice,
    columns: slice,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one tile of scores adds to the gradients of its queries, keys and values."""
    scores = _scores(scaled_query, key, rows, columns, is_causal)  # equation 13
    probabilities = torch.exp(scores - _finite(logsumexp[..., rows, :]))  # equation 14
    grad_value = probabilities.mT @ grad_out[..., rows, :]  # equation 15
    grad_probabilities = grad_out[..., rows, :] @ value[..., columns, :].mT  # equation 16
    grad_scores = probabilities * (grad_probabilities - delta[..., rows, :])  # equation 17
    grad_query = grad_scores @ key[..., columns, :] / math.sqrt(key.shape[-1])  # equation 18
    grad_key = grad_scores.mT @ scaled_query[..., rows, :]  # equation 19
    return grad_query, grad_key, grad_value


def _tiled_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Algorithm 2: the gradients of query, key and value, in the inputs' dtype."""
    operands = _backward_operands(query, key, value, out, logsumexp, grad_out)
    grad_query, grad_key, grad_value = (
        torch.zeros(tensor.shape, dtype=logsumexp.dtype, device=tensor.device) for tensor in (query, key, value)
    )
    query_tile, key_tile = _tile_shape(query.device)
    for rows in _tiles(query.shape[-2], query_tile):
        for columns in _tiles(_visible_keys(rows, key.shape[-2], is_causal), key_tile):
            grad_query_tile, grad_key_tile, grad_value_tile = _gradients(*operands, rows, columns, is_causal)
            grad_query[..., rows, :] += grad_query_tile
            grad_key[..., columns, :] += grad_key_tile
            grad_value[..., columns, :] += grad_value_tile
    return tuple(gradient.to(query.dtype) for gradient in (grad_query, grad_key, grad_value))


def _untiled_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value from one tile that is the whole matrix."""
    operands = _backward_operands(query, key, value, out, logsumexp, grad_out)
    gradients = _gradients(*operands, slice(0, query.shape[-2]), slice(0, key.shape[-2]), is_causal)
    return tuple(gradient.to(query.dtype) for gradient in gradients)


@functools.cache
def _compiled_backward() -> Callable[..., tuple[torch.Tensor, ...]]:
    # Not at import: torch.compile loads the compiler, which takes seconds.
    return torch.compile(_untiled_backward)


class FlashAttentionTorch(torch.autograd.Function):
    """``FlashAttentionTorch.apply(query, key, value, is_causal=False)``: FlashAttention-2, both passes tiled.

    Keeps the inputs, the output and the logsumexp (..., S_q) for backward. Differentiable once. Autocast does not lower
    its precision.

    Args:
        query: (..., S_q, D), of any floating dtype and strides.
        key: (..., S_k, D).
        value: (..., S_k, D).
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``; if S_q > S_k the later queries see all keys.

    Returns:
        (..., S_q, D), in the inputs' dtype. A query whose scores are all -inf gives zeros.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: dtypes differ or are not floating.
        RuntimeError: it is differentiated twice, or transformed by ``torch.func``.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False
    ) -> torch.Tensor:
        check_attention_inputs(query, key, value, for_kernel=False)
        with torch.autocast(query.device.type, enabled=False):
            out, logsumexp = _tiled_forward(query, key, value, is_causal)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        with torch.autocast(grad_out.device.type, enabled=False):
            return *_tiled_backward(query, key, value, out, logsumexp, grad_out, ctx.is_causal), None


class FlashAttentionCompiledBackward(FlashAttentionTorch):
    """As :class:`FlashAttentionTorch`, with the handout's backward: equations 13 to 19 untiled, by ``torch.compile``.

    Its backward takes memory of S_q x S_k. The first one compiles, which takes seconds.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            return *_compiled_backward()(*ctx.saved_tensors, grad_out, ctx.is_causal), None
