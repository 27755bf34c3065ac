"""Puts together attention over blocks of keys: what makes ring attention exact."""

import math

import torch
from torch import Tensor


def merge_block(out: Tensor, logsumexp: Tensor, block_out: Tensor, block_logsumexp: Tensor) -> None:
    """Take one more block of keys into the attention of some queries, in place.

    ``L = log(exp(L_1) + exp(L_2))``, ``O = exp(L_1 - L) O_1 + exp(L_2 - L) O_2``, in which the second weight is
    ``sigmoid(L_2 - L_1)`` and the first what is left of 1 (Liu et al. 2023; FlashAttention-2, section 3.1).

    Args:
        out: (..., S_q, D) over the keys so far, float32 or float64.
        logsumexp: (..., S_q) of their scores, of the dtype of ``out``; -inf for a query that has seen no key.
        block_out: (..., S_q, D) over the keys of the block, of any dtype.
        block_logsumexp: (..., S_q).
    """
    weight = torch.sigmoid(block_logsumexp - logsumexp)
    # -inf - -inf is NaN where neither has seen a key.
    weight.masked_fill_(block_logsumexp == -math.inf, 0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))
