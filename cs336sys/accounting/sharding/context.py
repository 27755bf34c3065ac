"""Context parallelism on paper: how ranks split a sequence, and what each sends for it.

- ``context-ring``: ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889). A rank holds two chunks of the
  ``2 W`` that a sequence is cut into, the ``r``-th from either end (*zigzag*), so that causal attention costs every
  rank the same. Keys and values travel around the ring, and in the backward pass the gradients of both, in fp32.
- ``context-all-to-all``: DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). A rank holds the
  ``r``-th of ``W`` chunks, and trades its tokens of all heads for all tokens of its heads and, after attention, back.
"""

from cs336sys.accounting.sharding.partition import SequenceSplit
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.settings.strategies import STRATEGIES


def split_of(strategy: str, size: ModelSize, world_size: int) -> SequenceSplit:
    """Return a strategy's split of the size's sequences; torch's ``context_parallel`` splits as our ring does."""
    return SequenceSplit(size.context, world_size, is_zigzag=not STRATEGIES[strategy].trades_heads)


def attention_sent_bytes(strategy: str, size: ModelSize, world_size: int, precision: str, checkpointing: str) -> int:
    """Return the bytes that the busiest rank sends for attention in a step of all layers.

    On a ring, in ``W - 1`` hops of each pass it sends on the keys and values of ranks ``r``, ``r - 1``, ...; in
    ``W - 1`` more of the backward pass the fp32 sums, so far, of the gradients of ranks ``r - 1``, ``r - 2``, ..., on
    their way to those. With equal slices and ``2 t`` bytes of a token's key and value, ``g`` of their gradients:
    ``(W - 1) S / W (2 t passes + g)`` a layer.

    All to all, in a forward pass it sends its tokens of the other ranks' heads (query, key and value), then the other
    ranks' tokens of its own heads (the output); in a backward pass the gradients of the same the other way round. With
    equal slices: ``(W - 1) / W^2 S 4 t`` a layer and pass.

    Args:
        strategy: one that splits sequences; torch's counts as the ring.
        size: its batch is that of the ranks that share sequences.
        precision: what attention computes in.
        checkpointing: ``none``, or ``block``, which computes attention twice.
    """
    split = split_of(strategy, size, world_size)
    passes = 3 if checkpointing == "block" else 2  # With the backward pass.
    token_bytes = size.batch_size * size.d_model * ELEMENT_BYTES[precision]  # Of a query, an output, a key or a value.
    gradient_bytes = 2 * 4 * size.batch_size * size.d_model

    def ring_bytes(rank: int) -> int:
        key_value_tokens = size.context - split.lengths[(rank + 1) % world_size]  # That rank's have come round.
        return 2 * token_bytes * key_value_tokens * passes + gradient_bytes * (size.context - split.lengths[rank])

    def all_to_all_bytes(rank: int) -> int:
        local_tokens = split.lengths[rank]
        to_others, from_others = (
            (world_size - 1) * local_tokens * token_bytes,
            (size.context - local_tokens) * token_bytes,
        )
        forward = 3 * to_others // world_size + from_others // world_size
        return (passes - 1) * forward + to_others // world_size + 3 * from_others // world_size

    of_rank = all_to_all_bytes if STRATEGIES[strategy].trades_heads else ring_bytes
    return size.num_layers * max(map(of_rank, range(world_size)))
