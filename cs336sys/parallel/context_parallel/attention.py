"""Causal attention of a rank's tokens to those of all ranks, in two ways.

In *ring attention*, keys and values travel around the ranks, one block ahead of the computation. Source: Liu, Zaharia,
Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023). Zigzag order and the backward
pass with the logsumexp over all keys: as in zhuzilin/ring-flash-attention and torch's own ``context_parallel``.

Rank ``r`` of ``W`` holds chunks ``r`` and ``2 W - 1 - r`` of the ``2 W`` of a sequence (``docs/parallelism.md`` draws
them). Its own two are plain causal attention. Of the block of a rank before it, all its queries see the first chunk and
none sees the second; of the block of a rank behind it, the queries of its second chunk see everything and the others
nothing. So every block but its own costs it half a square, whatever its rank, and no block needs a mask.

In *all-to-all attention*, ranks trade their tokens of all heads for all tokens of their heads, and back. Source: Jacobs
et al., "DeepSpeed Ulysses" (2023).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cs336sys.accounting.sharding.partition import require_heads
from cs336sys.errors import UsageError
from cs336sys.parallel.context_parallel.group import Arriving, ContextGroup


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
    weight.masked_fill_(block_logsumexp == -math.inf, 0.0)  # -inf - -inf is NaN where neither has seen a key.
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


class BlockAttention(Protocol):
    """Attention of some queries to one block of the keys, where the softmax goes over more keys than these.

    Shapes: query (..., H, S_q, D), key and value (..., H_kv, S_k, D), of any strides; logsumexp and delta
    (..., H, S_q), in float32, or float64 of float64 inputs.
    :func:`cs336sys.kernels.attention.flash_attention` and ``flash_attention_backward`` are such a pair.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output over these keys alone, (..., H, S_q, D), and the logsumexp of their scores; no autograd."""
        ...

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        logsumexp: Tensor,
        delta: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of dq, and its dk and dv; logsumexp is over all keys, and delta = rowsum(dO * O)."""
        ...


_BLOCKS, _GRADIENTS = "keys and values", "the gradients of keys and values"

_IS_CAUSAL, _IS_FULL = True, False  # Values of ``is_causal``.


class RingAttention:
    """Causal attention of a rank's queries to the keys of all ranks.

    Differentiable once. A backward pass holds gradients of two blocks next to its own, in float32. All ranks must call
    it, and differentiate it, in the same order; under activation checkpoints it communicates again.

    Args:
        context: with a zigzag split.
        attention: of one block.

    Raises:
        UsageError: the split is in rank order.
    """

    def __init__(self, context: ContextGroup, attention: BlockAttention):
        if not context.split.is_zigzag:
            raise UsageError("ring attention needs a zigzag split: in rank order the last rank would work most")
        self.context = context
        self.attention = attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks.

        Args:
            query: (..., H, S_r, D), of this rank's tokens in the order of ``context.positions()``; any strides.
            key: (..., H_kv, S_r, D), H_kv a divisor of H where ``attention`` can do that.
            value: (..., H_kv, S_r, D).

        Returns:
            (..., H, S_r, D) in the dtype of the inputs, which under autocast is autocast's.

        Raises:
            UsageError: the tensors do not have as many tokens as this rank holds, or one width; in the first call on
                every rank: they have other shapes there; or in a backward pass, it has ``create_graph=True``.
            RuntimeError: another rank died or timed out.
        """
        query, key, value = self.context.checked("ring attention", query, key, value)
        # Blocks in PyTorch's operations would have their scores and logsumexps rounded by autocast, too.
        with torch.autocast(query.device.type, enabled=False):
            return _RingAttention.apply(query, key, value, self)


class _Ring:
    """One pass around the ring: which block comes when, and which of this rank's queries see which of its keys."""

    def __init__(self, context: ContextGroup):
        self._context, self._chunks = context, context.split.chunks
        self._rank, self.world_size = context.rank, context.world_size

    def owner(self, step: int) -> int:
        """Return whose block is here in a step; this rank's own in step 0."""
        return (self._rank - step) % self.world_size

    def seen(self, step: int) -> tuple[slice, slice]:
        """Return, for a later step, this rank's queries that see any key of the block, and the keys that they see."""
        if step <= self._rank:  # The block is an earlier rank's.
            return slice(None), slice(0, len(self._chunks[self.owner(step)][0]))
        return self.own_chunks[1], slice(None)

    @property
    def own_chunks(self) -> tuple[slice, slice]:
        """Return the two chunks of this rank in its slice."""
        cut = len(self._chunks[self._rank][0])
        return slice(0, cut), slice(cut, None)

    def pass_on(self, block: Tensor, step: int, contents: str) -> Arriving:
        """Send the block of a step to the next rank, and receive that of the next step."""
        arriving = (*block.shape[:-2], self._context.split.lengths[self.owner(step + 1)], block.shape[-1])
        return self._context.to_next(block, arriving, contents)


class _RingAttention(torch.autograd.Function):
    """``_RingAttention.apply(query, key, value, ring attention)``, which computes on a block while the next travels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: RingAttention) -> Tensor:
        ring, attention = _Ring(settings.context), settings.attention
        # Launched before the computation, whose result it does not need: the two run side by side.
        arriving = ring.pass_on(torch.stack((key, value)), step=0, contents=_BLOCKS) if ring.world_size > 1 else None
        out, logsumexp = attention.forward(query, key, value, _IS_CAUSAL)
        if arriving is not None:
            whole = out.to(logsumexp.dtype)
            for step in range(1, ring.world_size):
                block = arriving.wait()
                if step + 1 < ring.world_size:
                    arriving = ring.pass_on(block, step, _BLOCKS)
                queries, keys = ring.seen(step)
                seeing_query = query[..., queries, :]
                if seeing_query.shape[-2]:  # A sequence of fewer tokens than chunks leaves some empty.
                    block_key, block_value = block[..., keys, :]
                    partial = attention.forward(seeing_query, block_key, block_value, _IS_FULL)
                    merge_block(whole[..., queries, :], logsumexp[..., queries], *partial)
            out = whole.to(query.dtype)
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the part of a block while the next travels, and gradients of keys and values on their way home."""
        # torch's once_differentiable accepts create_graph=True where the gradient is in no graph, as that of a sum.
        if torch.is_grad_enabled():
            raise UsageError(
                "ring attention is differentiable once, so create_graph=True is refused: all-to-all attention is as "
                "differentiable as the attention it is given"
            )
        query, key, value, out, logsumexp = ctx.saved_tensors
        ring, attention = _Ring(ctx.settings.context), ctx.settings.attention
        wide = logsumexp.dtype
        delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
        if ring.world_size == 1:
            return *attention.backward(query, key, value, grad_out, logsumexp, delta, _IS_CAUSAL), None
        arriving = ring.pass_on(torch.stack((key, value)), step=0, contents=_BLOCKS)
        # Of this rank's block, all queries with the keys of the first chunk now, and the rest alongside the last hop.
        # Gradients come in the order of query, key and value; those of a block are of its keys and its values.
        first, second = ring.own_chunks
        keys_and_values = key[..., first, :], value[..., first, :]
        computed = attention.backward(query, *keys_and_values, grad_out, logsumexp, delta, _IS_CAUSAL)
        grad_query = computed[0].to(wide)
        own_gradients = torch.empty((2, *key.shape), dtype=wide, device=key.device)
        own_gradients[0][..., first, :], own_gradients[1][..., first, :] = computed[1:]
        # The gradients of a block follow it around the ring a step later, until they are back at its owner.
        following: Arriving | None = None
        for step in range(1, ring.world_size):
            block = arriving.wait()
            if step + 1 < ring.world_size:
                arriving = ring.pass_on(block, step, _BLOCKS)
            queries, keys = ring.seen(step)
            seeing_query, seeing_grad = query[..., queries, :], grad_out[..., queries, :]
            seen_gradients = None
            if seeing_query.shape[-2]:  # Chunks may be empty, see forward().
                rows = logsumexp[..., queries], delta[..., queries]
                seen_gradients = attention.backward(seeing_query, *block[..., keys, :], seeing_grad, *rows, _IS_FULL)
            gradients = torch.zeros_like(block, dtype=wide) if following is None else following.wait()
            if seen_gradients is not None:
                grad_query[..., queries, :] += seen_gradients[0]
                gradients[0][..., keys, :] += seen_gradients[1]
                gradients[1][..., keys, :] += seen_gradients[2]
            following = ring.pass_on(gradients, step, _GRADIENTS)
        # Queries of the second chunk see its keys as well; those of the first do not.
        if query[..., second, :].shape[-2]:  # It may be empty.
            late = (tensor[..., second, :] for tensor in (query, key, value, grad_out))
            computed = attention.backward(*late, logsumexp[..., second], delta[..., second], _IS_CAUSAL)
            grad_query[..., second, :] += computed[0]
            own_gradients[0][..., second, :], own_gradients[1][..., second, :] = computed[1:]
        assert following is not None
        own_gradients += following.wait()
        return grad_query.to(query.dtype), own_gradients[0].to(key.dtype), own_gradients[1].to(value.dtype), None


# Causal attention of query (..., H, S, D), key and value (..., H_kv, S, D).
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AllToAllAttention:
    """Causal attention of a rank's tokens to those of all ranks, of which each computes some heads.

    As differentiable as ``attention``. Nothing is computed while tensors travel.

    Args:
        context: with a split in rank order.
        attention: of whole sequences.

    Raises:
        UsageError: the split is zigzag.
    """

    def __init__(self, context: ContextGroup, attention: CausalAttention):
        if context.split.is_zigzag:
            raise UsageError("all-to-all attention puts slices side by side in rank order: choose is_zigzag=False")
        self.context = context
        self.attention = attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks, as :class:`RingAttention` does.

        Raises:
            UsageError: the ranks do not divide the heads, or for the tensors as there.
        """
        context = self.context
        world_size, lengths = context.world_size, context.split.lengths
        query, key, value = context.checked("all-to-all attention", query, key, value)
        if min(query.dim(), key.dim()) < 3:
            raise UsageError("all-to-all attention of tensors without heads: give them as (..., heads, tokens, width)")
        require_heads(query.shape[-3], world_size)
        require_heads(key.shape[-3], world_size)
        if world_size == 1:
            return self.attention(query, key, value)
        heads = [tensor.shape[-3] // world_size for tensor in (query, key, value)]
        # (..., W h, S_r, D) -> (W, S_r, ..., h, D), side by side in h: one message for each rank.
        parts = [tensor.unflatten(-3, (world_size, -1)).movedim((-4, -2), (0, 1)) for tensor in (query, key, value)]
        packed = torch.cat(parts, dim=-2).flatten(0, 1)
        # All tokens of this rank go to every rank, and those of each rank come here, of different heads.
        rows = [context.length] * world_size
        received = _TradeRows.apply(packed, (rows, lengths), "queries, keys and values", context)
        out = self.attention(*received.movedim(0, -2).split(heads, dim=-3))
        # (..., h, S, D) -> (S, ..., h, D)
        received = _TradeRows.apply(out.movedim(-2, 0), (lengths, rows), "attention's output", context)
        # (W S_r, ..., h, D) -> (..., W h, S_r, D)
        return received.unflatten(0, (world_size, -1)).movedim((0, 1), (-4, -2)).flatten(-4, -3)


class _TradeRows(torch.autograd.Function):
    """``_TradeRows.apply(tensor, (rows for each rank, rows from each), contents, context)``, along the first dimension.

    Its transpose, which gradients go through, is the same the other way round.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: tuple[Sequence[int], Sequence[int]], contents: str, context: ContextGroup
    ) -> Tensor:
        ctx.settings = rows[::-1], contents, context  # For backward(), the way back.
        return context.trade_rows(tensor.contiguous(), rows[0], rows[1], contents).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, contents, context = ctx.settings
        return _TradeRows.apply(gradient, rows, f"the gradients of {contents}", context), None, None, None
