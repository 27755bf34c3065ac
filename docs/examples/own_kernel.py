"""Put your attention beside ours: checked in every call, timed, in one table.

    python own_kernel.py

The same from the command line, on a GPU:

    cs336sys flash --kernel own_kernel.py:attention --implementation auto,sdpa-flash --baseline sdpa-flash
"""

import math

import torch
from torch import Tensor

BLOCK = 64


def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Softmax attention of (batch, heads, context, head_dim), a block of keys at a time (Milakov, Gimelshein 2018)."""
    scale, context = query.shape[-1] ** -0.5, query.shape[2]
    largest = torch.full_like(query[..., :1], -math.inf, dtype=torch.float32)
    total, out = torch.zeros_like(largest), torch.zeros_like(query, dtype=torch.float32)
    rows = torch.arange(context, device=query.device)[:, None]
    for start in range(0, context, BLOCK):
        block = slice(start, start + BLOCK)
        scores = (scale * query @ key[:, :, block].mT).float()
        if is_causal:
            columns = torch.arange(start, start + scores.shape[-1], device=query.device)
            scores = scores.masked_fill(columns > rows, -math.inf)
        highest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = torch.exp(scores - highest), torch.exp(largest - highest)
        total = kept * total + weights.sum(-1, keepdim=True)
        out = kept * out + weights @ value[:, :, block].float()
        largest = highest
    return (out / total).to(query.dtype)


if __name__ == "__main__":
    from cs336sys import flash

    shape = {"context": 128, "num_heads": 2, "head_dim": 16, "dtype": "fp32", "device": "cpu"}
    results = flash(kernel=[f"{__file__}:attention"], implementation=["eager"], repetition_ms=20, **shape)
    print(results.table())
