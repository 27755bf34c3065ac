"""All-to-all attention: ranks trade their tokens of all heads for all tokens of their heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336sys.accounting.sharding.partition import require_heads
from cs336sys.errors import UsageError
from cs336sys.parallel.context_parallel.group import ContextGroup

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
        """Return the attention of this rank's queries to the keys of all ranks.

        Args:
            query: (..., H, S_r, D), of this rank's tokens; any strides.
            key: (..., H_kv, S_r, D), H_kv a divisor of H where ``attention`` can do that.
            value: (..., H_kv, S_r, D).

        Returns:
            (..., H, S_r, D) in the dtype of the inputs, which under autocast is autocast's.

        Raises:
            UsageError: the ranks do not divide the heads; the tensors do not have as many tokens as this rank holds, or
                one width; or in the first call on every rank: they have other shapes there.
            RuntimeError: another rank died or timed out.
        """
        context = self.context
        world_size, lengths = context.world_size, context.split.lengths
        query, key, value = context.checked("all-to-all attention", query, key, value)
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
        received = _TradeRows.apply(packed, rows, lengths, "queries, keys and values", context)
        out = self.attention(*received.movedim(0, -2).split(heads, dim=-3))
        # (..., h, S, D) -> (S, ..., h, D)
        received = _TradeRows.apply(out.movedim(-2, 0), lengths, rows, "attention's output", context)
        # (W S_r, ..., h, D) -> (..., W h, S_r, D)
        return received.unflatten(0, (world_size, -1)).movedim((0, 1), (-4, -2)).flatten(-4, -3)


class _TradeRows(torch.autograd.Function):
    """``_TradeRows.apply(tensor, rows for each rank, rows from each, contents, context)``, along the first dimension.

    Its transpose, which gradients go through, is the same the other way round.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        rows: Sequence[int],
        received_rows: Sequence[int],
        contents: str,
        context: ContextGroup,
    ) -> Tensor:
        ctx.settings = received_rows, rows, contents, context  # For backward(), the way back.
        return context.trade_rows(tensor.contiguous(), rows, received_rows, contents).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received_rows, rows, contents, context = ctx.settings
        back = _TradeRows.apply(gradient, received_rows, rows, f"the gradients of {contents}", context)
        return back, None, None, None, None
