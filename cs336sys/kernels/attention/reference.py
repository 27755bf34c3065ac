"""Attention in PyTorch alone: the plain form, and FlashAttention-2 in operations that can be read."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336sys.kernels.attention.problem import (
    check_attention_inputs,
    check_mask,
    check_scale,
    group_size,
    is_aligned_at_end,
    score_scale,
)
from cs336sys.kernels.autograd import once_differentiable


class ScoreRule(NamedTuple):
    """Scores are scale Q K^T; query i sees those of keys j with i + diagonal - window < j <= i + diagonal."""

    scale: float
    is_causal: bool
    window: int | None
    diagonal: int

    def hide(self, scores: Tensor, first_query: int, first_key: int, num_queries: int) -> None:
        """Overwrite with -inf what queries do not see in a tile of scores (..., G queries, keys), G heads stacked."""
        if not self.is_causal:
            return
        last_keys = torch.arange(num_queries, device=scores.device)[:, None] + (first_query + self.diagonal)
        keys = torch.arange(first_key, first_key + scores.shape[-1], device=scores.device)
        invisible = keys > last_keys
        if self.window is not None:
            invisible |= keys <= last_keys - self.window
        group = scores.shape[-2] // max(1, num_queries)
        scores.masked_fill_(invisible if group == 1 else invisible.repeat(group, 1), -math.inf)


def score_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int | None,
    scale: float | None = None,
    causal_alignment: str = "start",
) -> ScoreRule:
    """Check a call of attention in PyTorch, and return its rule; arguments are those of :func:`reference_attention`."""
    check_attention_inputs(query, key, value, for_kernel=False)
    check_mask(window, is_causal)
    check_scale(scale)
    aligned_at_end = is_aligned_at_end(causal_alignment, is_causal, query, key)
    diagonal = key.shape[-2] - query.shape[-2] if aligned_at_end else 0
    return ScoreRule(score_scale(query, scale), is_causal, window, diagonal)


# The ground truth of the tests, and the baseline of the kernels: both keep matrices of S_q x S_k.


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    window: int | None = None,
    causal_alignment: str = "start",
) -> Tensor:
    """Compute softmax attention in four steps, matmul, mask, softmax, matmul: the baseline of the benchmarks.

    Equations 4 to 6 of the handout, O = softmax(Q K^T / sqrt(D)) V, in the inputs' dtype. For backward, autograd keeps
    the probabilities (..., S_q, S_k), and if causal a boolean mask (S_q, S_k), next to tensors linear in S.

    Args:
        query, key, value, is_causal, window, causal_alignment: as in
            :func:`cs336sys.kernels.attention.flash_attention`, but of any floating dtype and any D.

    Returns:
        (..., S_q, D), in the inputs' dtype. NaN for a query that sees no key, of which a window with S_q > S_k makes
        some.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: dtypes differ or are not floating.
    """
    rule = score_rule(query, key, value, is_causal, window, causal_alignment=causal_alignment)
    out = torch.softmax(_scores(query, key, rule), dim=-1) @ value
    return _unstack_heads(out, query.shape)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    scale: float | None = None,
    causal_alignment: str = "start",
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with the logsumexp of its scores, differentiable by autograd any number of times.

    Equations 4 to 6 and 12 of the handout. A query that sees no key, or whose scores are all -inf, gives zeros,
    logsumexp -inf, and passes no gradient on to the scores; NaN in the inputs propagates.

    Args:
        query, key, value, is_causal, window: as in :func:`plain_attention`.
        scale, causal_alignment: as in :func:`cs336sys.kernels.attention.flash_attention`.
        compute_dtype: what the inputs are converted to first; ``torch.float64`` gives the ground truth.

    Returns:
        The output (..., S_q, D) and the logsumexp (..., S_q), both in ``compute_dtype`` or else in the inputs' dtype.

    Raises:
        ValueError, TypeError: as in :func:`plain_attention`.
    """
    rule = score_rule(query, key, value, is_causal, window, scale, causal_alignment)
    if compute_dtype is not None:
        query, key, value = query.to(compute_dtype), key.to(compute_dtype), value.to(compute_dtype)
    scores = _scores(query, key, rule)
    logsumexp = torch.logsumexp(scores, dim=-1)
    # Filled before softmax as well as after it, or the gradient of such a row would be 0 * NaN.
    sees_nothing = (logsumexp == -math.inf).unsqueeze(-1)
    probabilities = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return _unstack_heads(probabilities @ value, query.shape), _unstack_heads(logsumexp, query.shape[:-1])


def _scores(query: Tensor, key: Tensor, rule: ScoreRule) -> Tensor:
    """Return scale Q K^T under its mask: (..., H, S_q, S_k), or with groups of G heads (..., H_kv, G S_q, S_k).

    The queries of a group are stacked in one matrix, so that keys and values need no copies.
    """
    num_queries, group = query.shape[-2], group_size(query, key)
    if group != 1:
        query = query.reshape(*key.shape[:-2], group * num_queries, query.shape[-1])
    # Scaling the query costs S_q x D multiplications instead of S_q x S_k.
    scores = (query * rule.scale) @ key.mT
    rule.hide(scores, first_query=0, first_key=0, num_queries=num_queries)  # Writes -inf into scores.
    return scores


def _unstack_heads(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows if rows.shape == shape else rows.view(shape)


# FlashAttention-2 (Dao, 2023; algorithms and equations as in the course's 2026 handout): scores exist for one tile at a
# time, and the backward pass computes them again. float64 inputs are computed in float64, all others in float32.

# Queries and keys of a tile. Square tiles of 64, 128, 256 and 512 took 46, 37, 41 and 71 ms for forward and backward of
# 4 x 1024 x 64, causal, float32, on one CPU core.
CPU_TILE = (128, 128)
# A matmul of 1024 x 1024 x 64 is 0.13 GFLOP, 2.2 us at the 60 TFLOP/s of an H200 in float32: with smaller tiles the
# GPU would only wait for launches, of about 5 us each.
GPU_TILE = (1024, 1024)


def _tile_shape(device: torch.device) -> tuple[int, int]:
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def _visible_key_tiles(rows: slice, num_keys: int, size: int, rule: ScoreRule) -> list[slice]:
    """Return the tiles of the keys that some query of ``rows`` sees."""
    first_visible = 0 if rule.window is None else max(0, rows.start + rule.diagonal - rule.window + 1)
    end = min(num_keys, rows.stop + rule.diagonal) if rule.is_causal else num_keys
    first_tile = first_visible // size * size
    return [slice(start, min(start + size, num_keys)) for start in range(first_tile, end, size)]


def _finite_or_zero(maximum: Tensor) -> Tensor:
    """Return what to subtract from scores before exp: -inf, for a row that saw only -inf, would make NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _tile_scores(scaled_query: Tensor, key: Tensor, rows: slice, columns: slice, rule: ScoreRule) -> Tensor:
    """Return one tile of scale Q K^T, masked only if it crosses the diagonal or the far end of a window."""
    scores = _stack_group_rows(scaled_query, rows) @ key[..., columns, :].mT
    crosses_diagonal = columns.stop - 1 > rows.start + rule.diagonal
    crosses_window = rule.window is not None and columns.start <= rows.stop - 1 + rule.diagonal - rule.window
    if crosses_diagonal or crosses_window:
        rule.hide(scores, rows.start, columns.start, rows.stop - rows.start)
    return scores


def _split_heads_by_key(tensor: Tensor, key: Tensor, dims: int = 2) -> Tensor:
    """View (..., H, S_q, D) as (..., H_kv, H / H_kv, S_q, D); ``dims``: behind H, 1 where there is no D."""
    leading = key.shape[:-2]
    if tensor.shape[:-dims] == leading:
        return tensor.unsqueeze(-dims - 1)
    return tensor.unflatten(-dims - 1, (leading[-1], tensor.shape[-dims - 1] // leading[-1]))


def _stack_group_rows(grouped: Tensor, rows: slice) -> Tensor:
    """Stack these queries of the G heads that share a key's: (..., G, S_q, D) to (..., G rows, D)."""
    return grouped[..., rows, :].flatten(-3, -2)


def _tiled_forward(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute algorithm 1: the output (..., S_q, D) in the inputs' dtype, and the logsumexp (..., S_q)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query)
    logsumexp = torch.empty(query.shape[:-1], dtype=dtype, device=query.device)
    # Views: what is written to them is written to out and logsumexp.
    grouped_out, grouped_logsumexp = _split_heads_by_key(out, key), _split_heads_by_key(logsumexp, key, dims=1)
    query = _split_heads_by_key(query.to(dtype) * rule.scale, key)
    key, value = key.to(dtype), value.to(dtype)
    group = query.shape[-3]
    query_tile, key_tile = _tile_shape(query.device)

    for start in range(0, query.shape[-2], query_tile):
        rows = slice(start, min(start + query_tile, query.shape[-2]))
        out_tile = torch.zeros_like(_stack_group_rows(query, rows))
        row_sum = torch.zeros_like(out_tile[..., :1])
        row_max = torch.full_like(row_sum, -math.inf)
        for columns in _visible_key_tiles(rows, key.shape[-2], key_tile, rule):
            scores = _tile_scores(query, key, rows, columns, rule)
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - _finite_or_zero(new_max))
            rescale = torch.exp(row_max - _finite_or_zero(new_max))
            row_sum = rescale * row_sum + weights.sum(dim=-1, keepdim=True)
            out_tile = rescale * out_tile + weights @ value[..., columns, :]
            row_max = new_max
        # The sum is 0 where all scores are -inf: such a row's output is 0 / 1.
        out_tile = out_tile / row_sum.masked_fill(row_sum == 0.0, 1.0)
        grouped_out[..., rows, :] = out_tile.unflatten(-2, (group, -1))
        grouped_logsumexp[..., rows] = (row_max + torch.log(row_sum)).squeeze(-1).unflatten(-1, (group, -1))
    return out, logsumexp


def tiled_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    rule: ScoreRule,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Compute algorithm 2: gradients of query, key and value in the inputs' dtype; ``delta`` is D = rowsum(dO * O).

    ``tile``: queries and keys of a tile; None: those of the device.
    """
    dtype, result_dtype = logsumexp.dtype, query.dtype
    grad_query, grad_key, grad_value = (
        torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) for tensor in (query, key, value)
    )
    scaled_query = _split_heads_by_key(query.to(dtype) * rule.scale, key)
    grad_out = _split_heads_by_key(grad_out.to(dtype), key)
    logsumexp, delta = (_split_heads_by_key(tensor.to(dtype).unsqueeze(-1), key) for tensor in (logsumexp, delta))
    key, value = key.to(dtype), value.to(dtype)
    # A view: what is added to it is added to grad_query.
    grouped_grad_query = _split_heads_by_key(grad_query, key)
    group = grouped_grad_query.shape[-3]
    query_tile, key_tile = tile or _tile_shape(query.device)
    for start in range(0, query.shape[-2], query_tile):
        rows = slice(start, min(start + query_tile, query.shape[-2]))
        grad_out_tile = _stack_group_rows(grad_out, rows)
        for columns in _visible_key_tiles(rows, key.shape[-2], key_tile, rule):
            scores = _tile_scores(scaled_query, key, rows, columns, rule)  # equation 13
            probabilities = torch.exp(scores - _finite_or_zero(_stack_group_rows(logsumexp, rows)))  # equation 14
            grad_value[..., columns, :] += probabilities.mT @ grad_out_tile  # equation 15
            grad_probabilities = grad_out_tile @ value[..., columns, :].mT  # equation 16
            grad_scores = probabilities * (grad_probabilities - _stack_group_rows(delta, rows))  # equation 17
            grad_query_tile = grad_scores @ key[..., columns, :] * rule.scale  # equation 18
            grouped_grad_query[..., rows, :] += grad_query_tile.unflatten(-2, (group, -1))
            grad_key[..., columns, :] += grad_scores.mT @ _stack_group_rows(scaled_query, rows)  # equation 19
    return tuple(gradient.to(result_dtype) for gradient in (grad_query, grad_key, grad_value))


@functools.cache
def _compiled_backward() -> Callable[..., tuple[Tensor, ...]]:
    # Not at import: torch.compile loads the compiler, which takes seconds.
    return torch.compile(tiled_backward)


class FlashAttentionTorch(torch.autograd.Function):
    """``FlashAttentionTorch.apply(query, key, value, is_causal=False)``: FlashAttention-2, both passes tiled.

    Keeps the inputs, the output and the logsumexp (..., S_q) for backward. Differentiable once. Autocast does not lower
    its precision.

    Arguments and results are those of :func:`cs336sys.kernels.attention.flash_attention`, for any floating dtype and
    any D. A query that sees no key, or whose scores are all -inf, gives zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        window: int | None = None,
        return_logsumexp: bool = False,
        scale: float | None = None,
        causal_alignment: str = "start",
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.rule = score_rule(query, key, value, is_causal, window, scale, causal_alignment)
        with torch.autocast(query.device.type, enabled=False):
            out, logsumexp = _tiled_forward(query, key, value, ctx.rule)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        if not return_logsumexp:
            return out
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad_out, tiled_backward, tile=None)


class FlashAttentionCompiledBackward(FlashAttentionTorch):
    """:class:`FlashAttentionTorch` with the handout's backward: equations 13 to 19 untiled, by ``torch.compile``.

    Its backward takes memory of S_q x S_k. The first one compiles, which takes seconds.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, *_ = ctx.saved_tensors
        whole_matrix = max(1, query.shape[-2]), max(1, key.shape[-2])
        return _differentiate(ctx, grad_out, _compiled_backward(), tile=whole_matrix)


def _differentiate(
    ctx: Any, grad_out: Tensor, backward: Callable[..., tuple[Tensor, ...]], tile: tuple[int, int] | None
) -> tuple[Tensor | None, ...]:
    """Return what a ``backward`` of autograd does: the gradients of forward's arguments."""
    query, key, value, out, logsumexp = ctx.saved_tensors
    with torch.autocast(grad_out.device.type, enabled=False):
        delta = (grad_out.to(logsumexp.dtype) * out).sum(dim=-1)
        gradients = backward(query, key, value, logsumexp, grad_out, delta, ctx.rule, tile)
    # None for each argument of forward behind the tensors.
    return *gradients, None, None, None, None, None
