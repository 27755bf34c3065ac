"""What a module of ``cs336_basics``' names computes once it is fused: its forward pass, by its class's name."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.kernels.embedding import embedding_rows
from cs336sys.kernels.linear import linear_of_copy
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope, rope_qkv
from cs336sys.kernels.swiglu import swiglu, swiglu_linear_of_copy

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _norm_forward(
    norm: Any, x: Tensor, residual: Tensor | None = None, returns_x: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling():
        total, version, y = norm.__dict__.pop("computed", (None, 0, None))
        if residual is None and x is total and x._version == version:
            return (y, x) if returns_x else y
    return rms_norm(x, norm.weight, norm.eps, residual, returns_x=returns_x)


def _embedding_forward(embedding: Any, token_ids: Tensor) -> Tensor:
    return embedding_rows(embedding.weight, token_ids)


def _feed_forward(ffn: Any, x: Tensor) -> Tensor:
    if ffn.gate_up_copy is None:
        return ffn.w2(swiglu(ffn.w1(x), ffn.w3(x)))
    dtype = ffn.gradient_dtype
    gate_up = linear_of_copy(x, ffn.gate_up_copy, ffn.w1.weight, ffn.w3.weight, gradient_dtype=dtype)
    return swiglu_linear_of_copy(gate_up, ffn.down_copy, ffn.w2.weight, dtype)


def _block_forward(block: Any, x: Tensor) -> Tensor:
    normalized, x = block.ln1(x, returns_x=True)
    normalized, x = block.ln2(block.attn(normalized), residual=x)
    out, norm = block.ffn(normalized), block.__dict__.get("next_norm")
    if norm is None or torch.compiler.is_compiling():
        return x + out
    y, total = norm(out, residual=x)
    norm.__dict__["computed"] = total, total._version, y
    return total


# One function for all modules that compute alike: compiled code is theirs together.
@functools.cache
def rotation_forward(theta: float) -> Callable:
    def forward(rotation: Any, x: Tensor, pos_ids: Tensor | None = None) -> Tensor:
        return rope(x, pos_ids, theta=theta)

    return forward


@functools.cache
def attention_forward(theta: float | None, attention: Attention) -> Callable:
    def forward(attn: Any, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        if attn.qkv_copy is None:
            return type(attn).forward(attn, x, token_positions)
        dtype, weights = attn.gradient_dtype, (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        qkv = linear_of_copy(x, attn.qkv_copy, *weights, gradient_dtype=dtype)
        if theta is None:
            query, key, value = qkv.unflatten(-1, (3, attn.num_heads, -1)).transpose(-4, -2).unbind(-3)
        else:
            query, key, value = rope_qkv(qkv, attn.num_heads, positions=token_positions, theta=theta)
        heads = attention(query, key, value).transpose(-3, -2).flatten(-2)
        return linear_of_copy(heads, attn.output_copy, attn.output_proj.weight, gradient_dtype=dtype)

    return forward


@functools.cache
def attention_of(module: types.ModuleType) -> Attention:
    """Whatever the model's module computes attention with at the time of a call."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        index = torch.arange(query.shape[-2], device=query.device)
        return module.scaled_dot_product_attention(Q=query, K=key, V=value, mask=index[:, None] >= index)

    return attention


FORWARDS: dict[str, Callable] = {
    "RMSNorm": _norm_forward,
    "SwiGLU": _feed_forward,
    "TransformerBlock": _block_forward,
    "Embedding": _embedding_forward,
}


def head_forward(head: Any, hidden: Tensor) -> Tensor:
    """Logits, or the loss where there are targets."""
    if head.targets is None:
        return type(head).forward(head, hidden)
    loss = linear_cross_entropy(hidden, head.weight, head.targets, copy=head.copy, gradient_dtype=head.gradient_dtype)
    assert isinstance(loss, Tensor)
    return loss


def rotation_base(model: nn.Module, path: str, rotation: nn.Module) -> float:
    """The base of a rotation's angles: its own ``theta``, or the model's ``config["rope_theta"]``.

    Raises:
        UsageError: there is none.
    """
    theta = getattr(rotation, "theta", None)
    if theta is None:
        theta = getattr(model, "config", {}).get("rope_theta")
    if not isinstance(theta, int | float):
        raise UsageError(
            f"{path} (RotaryEmbedding) has no theta, and {type(model).__name__} no config['rope_theta']: "
            "fused kernels need the base of the angles"
        )
    return theta
