"""Another attention in the place of ``torch.nn.functional.scaled_dot_product_attention``, and dropout taken out."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336sys.kernels.attention import flash_attention

# torch's own, whatever stands in its place.
torch_attention = F.scaled_dot_product_attention

_LARGEST_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def as_written() -> None:
    """Let ``torch.nn.functional`` have its own attention."""
    F.scaled_dot_product_attention = torch_attention


def replace_attention(name: str) -> None:
    """Let all models of the process that call torch's attention compute it this way, by a name of ``ATTENTION``.

    ``reference`` and ``sdpa`` leave them as they are.
    """
    if _drops:
        chosen = our_attention if name == "flash" else torch_attention
    else:
        chosen = _our_attention_keeping_all if name == "flash" else _torch_attention_keeping_all
    F.scaled_dot_product_attention = chosen


def our_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """This project's attention in the signature of torch's; what it cannot do, torch's does."""
    if why_not_ours(query, key, value, attn_mask, dropout_p, enable_gqa) is not None:
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if scale is not None:
        # Ours divides the scores by sqrt(D).
        query = query * (scale * math.sqrt(query.shape[-1]))
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    return flash_attention(query, key, value, is_causal=is_causal)


def why_not_ours(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> str | None:
    """Why a call goes to torch's attention, or None."""
    if attn_mask is not None:
        return "with a mask, which our kernels have none of but the causal one"
    if dropout_p > 0:
        return f"with dropout {dropout_p:g}, which our kernels have none of"
    if query.shape[-1] > _LARGEST_HEAD_DIM or query.shape[-1] != value.shape[-1]:
        return f"of head dimensions {query.shape[-1]} and {value.shape[-1]}: ours are equal and at most 256"
    if query.dtype not in _DTYPES:
        return f"of {query.dtype}, which our kernels do not compute in"
    batch, heads = query.shape[:-3], query.shape[-3:-2]
    other_heads = key.shape[-3:-2] if not enable_gqa else heads
    if (batch, heads) != (key.shape[:-3], other_heads) or key.shape[:-1] != value.shape[:-1]:
        return "whose query, key and value have other batches or heads"
    return None


@contextlib.contextmanager
def watched_attention(called: Callable[..., None], *, computes: bool = True) -> Iterator[None]:
    """Within this, each call of attention is told, with its arguments.

    Args:
        computes: else it does next to nothing: what comes out has the right shape, and gradients for query, key and
            value.
    """
    attention = F.scaled_dot_product_attention

    def watch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        called(query, key, value, attn_mask, dropout_p if _drops else 0.0, is_causal, enable_gqa)
        if computes:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
        mean = (value + key.mean(-1, keepdim=True)).mean(-2, keepdim=True)
        return mean + query.mean(-1, keepdim=True)

    with mock.patch.object(F, "scaled_dot_product_attention", watch):
        yield


_DROPOUTS = {
    name: getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}

_drops = True


def without_dropout() -> None:
    """From now on no model of this process drops anything: what is checked must be the same twice."""
    _let_drop(False)


@contextlib.contextmanager
def nothing_dropped() -> Iterator[None]:
    """As :func:`without_dropout`, within this alone; attention is chosen when a model is built."""
    before = _drops
    _let_drop(False)
    try:
        yield
    finally:
        _let_drop(before)


def _let_drop(drops: bool) -> None:
    global _drops
    _drops = drops
    for name, function in _DROPOUTS.items():
        setattr(F, name, function if drops else _kept)


def _kept(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _our_attention_keeping_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return our_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)


def _torch_attention_keeping_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return torch_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
