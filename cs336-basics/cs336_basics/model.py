"""A decoder-only Transformer language model: pre-norm blocks, RMSNorm, rotary embeddings, SwiGLU, no biases.

In the shapes, seq is the length of a sequence and head_dim is d_model / num_heads. Parameters are made on the ambient
device (``with torch.device("cuda")``) and in the default dtype.
"""

import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from cs336_basics.nn_utils import at_least_fp32, softmax


def _truncated_normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=std, a=-3 * std, b=3 * std))


class Linear(nn.Module):
    """``x W^T``: (..., d_in) -> (..., d_out), with ``weight`` (d_out, d_in).

    Its entries start out normal with variance 2 / (d_in + d_out) (Glorot & Bengio 2010, eq. 12), cut off at three
    standard deviations.
    """

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight = _truncated_normal(d_out, d_in, std=math.sqrt(2 / (d_in + d_out)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def extra_repr(self) -> str:
        return f"d_in={self.weight.shape[1]}, d_out={self.weight.shape[0]}"


class Embedding(nn.Module):
    """Row ``i`` of ``weight`` for token ``i``: int64 (...) -> (..., d_model), with ``weight`` (vocab_size, d_model)."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.weight = _truncated_normal(vocab_size, d_model, std=1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]

    def extra_repr(self) -> str:
        return f"vocab_size={self.weight.shape[0]}, d_model={self.weight.shape[1]}"


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467, eq. 4).

    (..., hidden_size) -> (..., hidden_size) in the dtype of ``x``; fp16 and bf16 are computed in fp32, because in fp16
    the square of 256 overflows.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        inverse_rms = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (self.weight * (wide * inverse_rms)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Rotates the pair ``(x[2i], x[2i + 1])`` at position ``p`` by the angle ``p * theta^(-2i / dim)``.

    RoFormer (https://arxiv.org/abs/2104.09864), eq. 34: pairs are neighbours and stay where they are, so the module
    multiplies the complex numbers ``x[2i] + x[2i + 1] j`` by ``exp(j * angle)``. The product of a rotated query and a
    rotated key depends on their distance alone.

    The cosines and sines are a non-persistent buffer, which one module shares with all blocks of a model. It stays in
    fp32 when the model is converted, and is computed anew when the model changes device, so it is right also after
    ``to_empty`` of a model made on the meta device.

    Args:
        context_length: positions 0 to context_length - 1 are prepared.
        dim: head dimension, even.
        theta: base of the angles.

    Raises:
        ValueError: ``dim`` is odd.
    """

    cos_sin: Tensor

    def __init__(self, context_length: int, dim: int, theta: float = 10_000.0):
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary embeddings rotate pairs, so the head dimension must be even, not {dim}")
        self.context_length = context_length
        self.dim = dim
        self.theta = theta
        self.register_buffer("cos_sin", self._cos_sin(), persistent=False)

    def _cos_sin(self, device: torch.device | None = None) -> Tensor:
        """(2, context_length, dim / 2), fp32."""
        # In fp64, because an fp32 product of position and frequency is off by 0.001 rad at position 32,768.
        frequencies = self.theta ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float64) / self.dim)
        angles = torch.outer(torch.arange(self.context_length, device=device, dtype=torch.float64), frequencies)
        return torch.stack((angles.cos(), angles.sin())).float()

    def _apply(self, fn, recurse=True):
        device = fn(self.cos_sin).device
        if device != self.cos_sin.device:
            self.cos_sin = self._cos_sin(device)
        return self

    def forward(self, x: Tensor, pos_ids: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (..., seq, dim).
            pos_ids: position of each token, integers that broadcast to (..., seq); None stands for 0 to seq - 1.

        Returns:
            ``x`` rotated in fp32, in its own shape and dtype.

        Raises:
            ValueError: ``pos_ids`` is None and the sequence is longer than ``context_length``.
        """
        if pos_ids is None:
            _check_length(x.size(-2), self.context_length)
            cos, sin = self.cos_sin[:, : x.size(-2)]
        else:
            cos, sin = self.cos_sin[:, pos_ids]
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, dim={self.dim}, theta={self.theta}"


def _check_length(length: int, context_length: int) -> None:
    if length > context_length:
        raise ValueError(f"the sequence has {length} tokens, but the model's context_length is {context_length}")


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, elementwise (https://arxiv.org/abs/1702.03118)."""
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    """``w2(silu(w1(x)) * w3(x))``: (..., d_model) -> (..., d_model) (https://arxiv.org/abs/2002.05202, eq. 6)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def scaled_dot_product_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """``softmax(Q K^T / sqrt(d_k)) V`` (Attention Is All You Need, https://arxiv.org/abs/1706.03762, eq. 1).

    Args:
        Q: queries, (..., queries, d_k).
        K: keys, (..., keys, d_k).
        V: values, (..., keys, d_v).
        mask: bool, broadcasts to (..., queries, keys): False where a query must not see a key.

    Returns:
        (..., queries, d_v). A query that may see no key at all has no weights: its row is NaN.
    """
    # Scaling Q is cheaper than scaling the scores, and keeps them in the range of fp16.
    scores = (Q * Q.size(-1) ** -0.5) @ K.mT
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return softmax(scores, dim=-1) @ V


def _head_dim(d_model: int, num_heads: int) -> int:
    if d_model % num_heads:
        raise ValueError(f"{num_heads} heads do not divide d_model {d_model}")
    return d_model // num_heads


class CausalMultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what is before it (Attention Is All You Need, 3.2.2).

    ``cs336_basics.model.scaled_dot_product_attention`` is looked up at each call and gets the keyword arguments Q, K, V
    and mask, so assigning another function to that name replaces the attention of every model.

    Args:
        d_model: width of input and output.
        num_heads: must divide ``d_model``.
        positional_encoder: rotates queries and keys; None for attention without positions.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``.
    """

    def __init__(self, d_model: int, num_heads: int, positional_encoder: RotaryEmbedding | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = _head_dim(d_model, num_heads)
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.positional_encoder = positional_encoder

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (batch, seq, d_model).
            token_positions: integers that broadcast to (batch, seq), for the rotation; None stands for 0 to seq - 1.

        Returns:
            (batch, seq, d_model).
        """
        Q, K, V = (self._split_heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.positional_encoder is not None:
            if token_positions is not None:
                token_positions = token_positions.unsqueeze(-2)  # one for all heads
            Q = self.positional_encoder(Q, token_positions)
            K = self.positional_encoder(K, token_positions)
        index = torch.arange(x.size(-2), device=x.device)
        heads = scaled_dot_product_attention(Q=Q, K=K, V=V, mask=index[:, None] >= index)
        return self.output_proj(heads.transpose(-3, -2).flatten(-2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """(batch, seq, d_model) -> (batch, num_heads, seq, head_dim)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)


class TransformerBlock(nn.Module):
    """A pre-norm block: ``x + attn(ln1(x))``, then ``x + ffn(ln2(x))``; (batch, seq, d_model) in and out."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, positional_encoder: RotaryEmbedding | None):
        super().__init__()
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, positional_encoder)
        self.ffn = SwiGLU(d_model, d_ff)
        self.ln1 = RMSNorm(d_model)
        self.ln2 = RMSNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class BasicsTransformerLM(nn.Module):
    """Token ids, int64 (batch, seq) -> logits of the token that follows each, (batch, seq, vocab_size).

    Args:
        vocab_size: number of token ids.
        context_length: longest sequence.
        d_model: width of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads of a block; must divide ``d_model``.
        d_ff: inner width of the feed-forward network.
        rope_theta: base of the rotary embeddings; None for a model without positions.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, or leaves an odd head dimension to rotary embeddings.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float | None = 10_000.0,
    ):
        super().__init__()
        self.config = {
            "vocab_size": vocab_size,
            "context_length": context_length,
            "d_model": d_model,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "d_ff": d_ff,
            "rope_theta": rope_theta,
        }
        self.context_length = context_length
        head_dim = _head_dim(d_model, num_heads)
        self.token_embeddings = Embedding(vocab_size, d_model)
        self.positional_encoder = None if rope_theta is None else RotaryEmbedding(context_length, head_dim, rope_theta)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, self.positional_encoder) for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model)
        self.lm_head = Linear(d_model, vocab_size)

    def get_num_params(self) -> int:
        """Number of parameters, embeddings and head included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError when the sequence is longer than ``context_length``."""
        _check_length(x.size(-1), self.context_length)
        x = self.token_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))

    @torch.no_grad()
    def generate(
        self,
        x: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
    ) -> Tensor:
        """Samples a continuation of each prompt token by token, each from the last ``context_length`` tokens.

        Args:
            x: prompts, int64 (batch, seq), or one of (seq,).
            max_new_tokens: most tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from the ``top_k`` likeliest tokens only; None for all.
            eos_token_id: ends a continuation; rows that end before others are filled up with it.

        Returns:
            The new tokens without the prompt, int64 (batch, new tokens), batch 1 for a prompt of (seq,). The column in
            which the last row ends is left out: a single continuation does not contain ``eos_token_id``.

        Raises:
            ValueError: the prompt is empty, ``temperature`` is negative, or ``top_k`` is below 1.
        """
        if x.size(-1) == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if temperature < 0:
            raise ValueError(f"temperature {temperature}: must be at least 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k {top_k}: must be at least 1")
        if temperature == 0:
            temperature, top_k = 1.0, 1
        tokens = x.unsqueeze(0) if x.dim() == 1 else x
        prompt_length = tokens.size(-1)
        ended = torch.zeros_like(tokens[:, :1], dtype=torch.bool)
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.context_length :])[:, -1].float()
            if top_k is not None:
                kept, indices = logits.topk(min(top_k, logits.size(-1)))
                logits = torch.full_like(logits, float("-inf")).scatter(-1, indices, kept)
            next_tokens = torch.multinomial(softmax(logits / temperature), num_samples=1)
            if eos_token_id is not None:
                ended |= next_tokens == eos_token_id
                if ended.all():
                    break
                next_tokens = next_tokens.masked_fill(ended, eos_token_id)
            tokens = torch.cat((tokens, next_tokens), dim=-1)
        return tokens[:, prompt_length:]

    @classmethod
    def from_pretrained(cls, pretrained_model_path: str | os.PathLike) -> "BasicsTransformerLM":
        """The model saved in a folder as ``model_config.json`` (its ``config``) and ``model.pt`` (its state dict).

        ``torch.compile`` puts ``_orig_mod.`` before the names of a state dict: it is removed.
        """
        folder = Path(pretrained_model_path)
        model = cls(**json.loads((folder / "model_config.json").read_text()))
        weights = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
        model.load_state_dict({name.removeprefix("_orig_mod."): weight for name, weight in weights.items()})
        return model
