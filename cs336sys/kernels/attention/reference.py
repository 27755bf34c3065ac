"""Attention in plain PyTorch: the ground truth of the tests, and the baseline that the kernels are measured against.

Both functions keep matrices of S_q x S_k, which is what FlashAttention avoids.
"""

import math

import torch

from cs336sys.kernels.attention.problem import group_size
from cs336sys.kernels.attention.validation import check_attention_inputs, check_window


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False, window: int | None = None
) -> torch.Tensor:
    """Softmax attention in four steps, matmul, mask, softmax, matmul: the baseline of the benchmarks.

    Equations 4 to 6 of the handout, O = softmax(Q K^T / sqrt(D)) V, in the inputs' dtype. For backward, autograd keeps
    the probabilities (..., S_q, S_k), and if causal a boolean mask (S_q, S_k), beside tensors linear in S.

    Args:
        query: (..., H, S_q, D), of any floating dtype, or without heads (..., S_q, D).
        key: (..., H_kv, S_k, D), H_kv a divisor of H: heads of queries side by side share one of keys.
        value: (..., H_kv, S_k, D).
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``; if S_q > S_k the later queries see all keys.
        window: if causal, only the last so many of them, i - window < j <= i.

    Returns:
        (..., S_q, D), in the inputs' dtype. NaN for a query that sees no key, of which a window with S_q > S_k makes
        some.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: dtypes differ or are not floating.
    """
    check_attention_inputs(query, key, value, for_kernel=False)
    check_window(window, is_causal)
    out = torch.softmax(_scores(query, key, is_causal, window), dim=-1) @ value
    return _heads_apart(out, query.shape)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with the logsumexp of its scores, differentiable by autograd any number of times.

    Equations 4 to 6 and 12 of the handout. A query that sees no key, or whose scores are all -inf, gives zeros,
    logsumexp -inf, and passes no gradient on to the scores; NaN in the inputs propagates.

    Args:
        query, key, value, is_causal, window: as in :func:`plain_attention`.
        compute_dtype: what the inputs are converted to first; ``torch.float64`` gives the ground truth.

    Returns:
        The output (..., S_q, D) and the logsumexp (..., S_q), both in ``compute_dtype`` or else in the inputs' dtype.

    Raises:
        ValueError, TypeError: as in :func:`plain_attention`.
    """
    check_attention_inputs(query, key, value, for_kernel=False)
    check_window(window, is_causal)
    if compute_dtype is not None:
        query, key, value = query.to(compute_dtype), key.to(compute_dtype), value.to(compute_dtype)
    scores = _scores(query, key, is_causal, window)
    logsumexp = torch.logsumexp(scores, dim=-1)
    # Filled before softmax as well as after it, or the gradient of such a row would be 0 * NaN.
    sees_nothing = (logsumexp == -math.inf).unsqueeze(-1)
    probabilities = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return _heads_apart(probabilities @ value, query.shape), _heads_apart(logsumexp, query.shape[:-1])


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, window: int | None) -> torch.Tensor:
    """Q K^T / sqrt(D) under its mask: (..., H, S_q, S_k), or with groups of G heads (..., H_kv, G S_q, S_k).

    The queries of a group stand below each other in one matrix, so that keys and values need no copies.
    """
    num_queries, group = query.shape[-2], group_size(query, key)
    if group != 1:
        query = query.reshape(*key.shape[:-2], group * num_queries, query.shape[-1])
    # Scaling the query costs S_q x D multiplications instead of S_q x S_k.
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    if is_causal:
        rows = torch.arange(num_queries, device=query.device)
        if group != 1:
            rows = rows.repeat(group)
        columns = torch.arange(key.shape[-2], device=query.device)
        invisible = columns > rows[:, None]
        if window is not None:
            invisible |= columns <= rows[:, None] - window
        scores.masked_fill_(invisible, -math.inf)
    return scores


def _heads_apart(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return rows if rows.shape == shape else rows.view(shape)
