"""Context parallelism: ranks share every sequence, each computes its slice, and attention makes them whole.

>>> split = SequenceSplit(length, world_size)            # zigzag: causal work is even
>>> context = ContextGroup(split)                        # of the default process group
>>> attention = RingAttention(context, block_attention)  # (query, key, value), each (..., heads, own tokens, head dim)
>>> tokens, targets = tokens[:, context.positions()], targets[:, context.positions()]
>>> loss = context.loss_weight * mean_loss(model(tokens), targets)    # the mean of the ranks' losses is that of all

Everything but attention works on tokens one by one: the model needs ``context.positions()`` for its rotary embeddings,
and gradients averaged over the ranks, by :class:`~cs336sys.parallel.ddp.BucketedDDP` or its like.
"""

from cs336sys.accounting.sharding.partition import SequenceSplit
from cs336sys.parallel.context_parallel.attention import AllToAllAttention, BlockAttention, RingAttention
from cs336sys.parallel.context_parallel.group import ContextGroup

__all__ = ["AllToAllAttention", "BlockAttention", "ContextGroup", "RingAttention", "SequenceSplit"]
