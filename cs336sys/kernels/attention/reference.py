"""Attention in plain PyTorch: the ground truth of the tests, and the baseline that the kernels are measured against.

Both functions keep matrices of S_q x S_k, which is what FlashAttention avoids.
"""

import math

import torch

from cs336sys.kernels.attention.validation import check_attention_inputs


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """Softmax attention in four steps, matmul, mask, softmax, matmul: the baseline of the benchmarks.

    Equations 4 to 6 of the handout, O = softmax(Q K^T / sqrt(D)) V, in the inputs' dtype. For backward, autograd keeps
    the probabilities (..., S_q, S_k), and if causal a boolean mask (S_q, S_k), beside tensors linear in S.

    Args:
        query: (..., S_q, D), of any floating dtype.
        key: (..., S_k, D).
        value: (..., S_k, D).
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``; if S_q > S_k the later queries see all keys.

    Returns:
        (..., S_q, D), in the inputs' dtype.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: dtypes differ or are not floating.
    """
    check_attention_inputs(query, key, value, for_kernel=False)
    return torch.softmax(_scores(query, key, is_causal), dim=-1) @ value


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with the logsumexp of its scores, differentiable by autograd any number of times.

    Equations 4 to 6 and 12 of the handout. A query whose scores are all -inf gives zeros, logsumexp -inf, and passes
    no gradient on to the scores; NaN in the inputs propagates.

    Args:
        query, key, value, is_causal: as in :func:`plain_attention`.
        compute_dtype: what the inputs are converted to first; ``torch.float64`` gives the ground truth.

    Returns:
        The output (..., S_q, D) and the logsumexp (..., S_q), both in ``compute_dtype`` or else in the inputs' dtype.

    Raises:
        ValueError, TypeError: as in :func:`plain_attention`.
    """
    check_attention_inputs(query, key, value, for_kernel=False)
    if compute_dtype is not None:
        query, key, value = query.to(compute_dtype), key.to(compute_dtype), value.to(compute_dtype)
    scores = _scores(query, key, is_causal)
    logsumexp = torch.logsumexp(scores, dim=-1)
    # Filled before softmax as well as after it, or the gradient of such a row would be 0 * NaN.
    sees_nothing = (logsumexp == -math.inf).unsqueeze(-1)
    probabilities = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return probabilities @ value, logsumexp


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> torch.Tensor:
    # Scaling the query costs S_q x D multiplications instead of S_q x S_k.
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores.masked_fill_(columns > rows[:, None], -math.inf)
    return scores
