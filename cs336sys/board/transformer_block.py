"""A Transformer block as one node of autograd's graph, which chooses what to keep for its backward pass.

The backward pass is written out: norms and the gate's product, which cost little, are always computed again, products
that add to the same gradient add it up themselves, and gate and up are kept or not, block by block. See docs/board.md.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.board.cublaslt_autotune import product
from cs336sys.errors import UsageError
from cs336sys.kernels.attention import flash_attention
from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.fuse import rotation_base
from cs336sys.kernels.operators import as_rows
from cs336sys.kernels.rope import rope
from cs336sys.kernels.swiglu import swiglu

# (query, key, value), each (B, H, S, D), to (B, H, S, D), causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_causal_attention: Attention = functools.partial(flash_attention, is_causal=True)


@dataclass(frozen=True)
class BlockSettings:
    """Settings of a block, besides its weights."""

    num_heads: int  # H.
    epsilons: tuple[float, float] = (1e-5, 1e-5)  # Of the first and of the second norm.
    theta: float | None = 10_000.0  # Base of the rotation's angles; None for no rotation.
    attention: Attention = _causal_attention
    # Keep them for the backward pass, 2 T d_ff elements; else it computes them by two products.
    keeps_gate_and_up: bool = True


class TransformerBlock(torch.autograd.Function):
    """``TransformerBlock.apply(settings, x, norm1, q, k, v, o, norm2, gate, up, down)``; :func:`transformer_block`."""

    @staticmethod
    def forward(ctx: Any, settings: BlockSettings, x: Tensor, *weights: Tensor) -> Tensor:
        """Compute the block; tensors are deleted as soon as they are not needed, which lowers the peak of memory."""
        norm1, q, k, v, o, norm2, gate_weight, up_weight, down = weights
        # The operators also return what the backward pass needs: a norm's sum with its residual, and the inverse RMS.
        ops, is_trained = torch.ops.cs336sys, any(ctx.needs_input_grad)
        rows, (eps1, eps2) = as_rows(x), settings.epsilons
        normalized, _, inverse1 = ops.rms_norm_forward(rows, norm1, residual=None, eps=eps1, dtype=x.dtype)
        heads = []
        for weight, is_rotated in ((q, True), (k, True), (v, False)):
            # One after the other, so that one projection at a time exists with its rotation.
            projection = _split_heads(product(normalized, weight.mT), x, settings.num_heads)
            if is_rotated and settings.theta is not None:
                projection = rope(projection, theta=settings.theta)
            heads.append(projection)
        del normalized, projection
        with torch.set_grad_enabled(is_trained):
            # A graph of attention's own, which keeps query, key, value, output and logsumexp.
            heads = [projection.detach().requires_grad_(is_trained) for projection in heads]
            attended = settings.attention(*heads)
        projected = product(_merge_heads(attended.detach()), o.mT)
        normalized, total, inverse2 = ops.rms_norm_forward(projected, norm2, residual=rows, eps=eps2, dtype=x.dtype)
        del projected
        gate, up = product(normalized, gate_weight.mT), product(normalized, up_weight.mT)
        del normalized
        out = product(swiglu(gate, up), down.mT, total)
        if is_trained:
            kept = (gate, up) if settings.keeps_gate_and_up else (None, None)
            ctx.save_for_backward(x, inverse1, total, inverse2, *kept, *weights)
            ctx.settings, ctx.attention = settings, (heads, attended)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Return the gradients of x and of the weights, by the equations of docs/board.md; deletes as forward does."""
        x, inverse1, total, inverse2, gate, up, *weights = ctx.saved_tensors
        norm1, q, k, v, o, norm2, gate_weight, up_weight, down = weights
        # The first two are of settings and x.
        _, needs_q, needs_k, needs_v, needs_o, _, needs_gate, needs_up, needs_down = ctx.needs_input_grad[2:]
        settings: BlockSettings = ctx.settings
        ops, rows, (eps1, eps2) = torch.ops.cs336sys, as_rows(x), settings.epsilons
        # Of backward(retain_graph=True): attention's own graph is needed again then.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()

        grad = as_rows(grad).contiguous()
        normalized, *_ = ops.rms_norm_forward(total, norm2, residual=None, eps=eps2, dtype=x.dtype)
        if gate is None:
            gate, up = product(normalized, gate_weight.mT), product(normalized, up_weight.mT)
        grad_activated = product(grad, down)
        grad_gate, grad_up, activated = ops.swiglu_backward(gate, up, grad_activated, recomputes=True)
        del grad_activated, gate, up
        grad_down = product(grad.mT, activated) if needs_down else None
        del activated
        grad_gate_weight = product(grad_gate.mT, normalized) if needs_gate else None
        grad_up_weight = product(grad_up.mT, normalized) if needs_up else None
        grad_normalized = product(grad_up, up_weight, product(grad_gate, gate_weight), in_place=True)
        del grad_gate, grad_up, normalized
        # Of total, the sum of attention's output and x, which also goes on around the feed-forward network.
        grad_total, _, grad_norm2 = ops.rms_norm_backward(
            grad_normalized, grad, total, norm2, inverse2, x_dtype=x.dtype, residual_dtype=x.dtype
        )

        heads, attended = ctx.attention
        grad_o = product(grad_total.mT, _merge_heads(attended.detach())) if needs_o else None
        grad_attended = _split_heads(product(grad_total, o), x, settings.num_heads)
        grad_heads = list(torch.autograd.grad(attended, heads, grad_attended, retain_graph=keeps_graph))
        del heads, attended, grad_attended
        if not keeps_graph:
            ctx.attention = None  # The node lives as long as the loss; attention's graph and its tensors need not.
        if settings.theta is not None:
            rotate_back = functools.partial(ops.rope, positions=None, theta=settings.theta, inverse=True, strides=None)
            for query_or_key in (0, 1):
                grad_heads[query_or_key] = rotate_back(grad_heads[query_or_key], dtype=x.dtype)
        grad_q, grad_k, grad_v = (_merge_heads(grad_head) for grad_head in grad_heads)
        del grad_heads
        normalized, *_ = ops.rms_norm_forward(rows, norm1, residual=None, eps=eps1, dtype=x.dtype)
        grad_weights = [
            product(grad_head.mT, normalized) if is_needed else None
            for grad_head, is_needed in ((grad_q, needs_q), (grad_k, needs_k), (grad_v, needs_v))
        ]
        grad_normalized = product(grad_k, k, product(grad_q, q), in_place=True)
        grad_normalized = product(grad_v, v, grad_normalized, in_place=True)
        grad_x, _, grad_norm1 = ops.rms_norm_backward(
            grad_normalized, grad_total, rows, norm1, inverse1, x_dtype=x.dtype, residual_dtype=x.dtype
        )
        return (
            None, grad_x.view(x.shape), grad_norm1, *grad_weights, grad_o,
            grad_norm2, grad_gate_weight, grad_up_weight, grad_down,
        )  # fmt: skip


def _split_heads(rows: Tensor, like: Tensor, num_heads: int) -> Tensor:
    """View (B S, H D) as (B, H, S, D); ``like`` (B, S, d) has the dimensions of B."""
    return rows.view(*like.shape[:-1], num_heads, -1).transpose(-3, -2)


def _merge_heads(heads: Tensor) -> Tensor:
    """Reshape (B, H, S, D) to (B S, H D): a view where the heads of a token lie side by side."""
    return as_rows(heads.transpose(-3, -2).flatten(-2))


def transformer_block(x: Tensor, weights: tuple[Tensor, ...], settings: BlockSettings) -> Tensor:
    """Compute a pre-norm block: ``t = x + attention(norm(x))``, then ``t + down(silu(gate) * up)`` of ``norm(t)``.

    Besides the weights, it keeps for the backward pass, of T tokens: x, t, query, key, value and attention's output,
    each (T, d), attention's logsumexp, a float32 number a token for either norm, and if so set gate and up, each
    (T, d_ff). Results are the same to the last bit whatever is kept. Differentiable once.

    Args:
        x: (B, S, d), contiguous, float32, float16 or bfloat16, as the result is.
        weights: norm1 (d,); q, k, v, o (d, d); norm2 (d,); gate, up (d_ff, d); down (d, d_ff): matrices in the dtype of
            ``x``.

    Raises:
        TypeError: a matrix has another dtype than ``x``.
        UsageError: under autocast, whose casts the written-out backward pass lacks.
    """
    if torch.is_autocast_enabled(x.device.type):
        raise UsageError("a block that chooses what to keep computes in the dtype of its weights: switch autocast off")
    for weight in weights:
        if weight.dim() == 2 and weight.dtype != x.dtype:
            raise TypeError(f"x is in {x.dtype} and a matrix in {weight.dtype}: a block computes in one dtype")
    return TransformerBlock.apply(settings, x.contiguous(), *weights)


def choose_kept(model: nn.Module, blocks_with_gate_and_up: int, attention: Attention | None = None) -> None:
    """Let every block of a fused Transformer run as :func:`transformer_block`; the last so many keep gate and up.

    :func:`~cs336sys.kernels.fuse.fuse` must have been called before; its handle undoes this, too.

    Args:
        blocks_with_gate_and_up: from 0 to the number of blocks.
        attention: causal; None is :func:`~cs336sys.kernels.attention.flash_attention`.

    Raises:
        UsageError: there is no block, or not that many, or they are not fused.
    """
    blocks: list[Any] = [module for module in model.modules() if type(module).__name__ == "TransformerBlock"]
    if not blocks or not 0 <= blocks_with_gate_and_up <= len(blocks):
        raise UsageError(f"{blocks_with_gate_and_up} blocks to keep gate and up in: the model has {len(blocks)}")
    # fuse() gives every part of a block a forward of its own.
    parts = [part for block in blocks for part in (block, block.ln1, block.attn, block.ln2, block.ffn)]
    if any("forward" not in part.__dict__ for part in parts):
        raise UsageError("what blocks keep can be chosen where all of them are fused: call fuse(model) first")
    for index, block in enumerate(blocks):
        rotation = block.attn.positional_encoder
        settings = BlockSettings(
            num_heads=block.attn.num_heads,
            epsilons=(block.ln1.eps, block.ln2.eps),
            theta=None if rotation is None else rotation_base(model, f"block {index}", rotation),
            attention=attention or _causal_attention,
            # The backward pass begins with the last; when it is done with one, there is room for those of another.
            keeps_gate_and_up=index >= len(blocks) - blocks_with_gate_and_up,
        )
        block.__dict__["forward"] = types.MethodType(functools.partial(_forward, settings), block)


def _forward(settings: BlockSettings, block: Any, x: Tensor) -> Tensor:
    """Compute a block of cs336_basics by :func:`transformer_block`, with the weights that it has now."""
    attn, ffn = block.attn, block.ffn
    matrices = (attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj)
    weights = (
        block.ln1.weight, *(layer.weight for layer in matrices),
        block.ln2.weight, ffn.w1.weight, ffn.w3.weight, ffn.w2.weight,
    )  # fmt: skip
    return transformer_block(x, weights, settings)
