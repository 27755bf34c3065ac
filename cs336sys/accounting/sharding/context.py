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


def ring_bytes(split: SequenceSplit, rank: int, token_bytes: int, gradient_token_bytes: int, passes: int) -> int:
    """Return the bytes that a rank sends for one layer of ring attention.

    In ``W - 1`` hops of each pass it sends on the keys and values of ranks ``r``, ``r - 1``, ...; in ``W - 1`` more of
    the backward pass the sums, so far, of the gradients of ranks ``r - 1``, ``r - 2``, ..., on their way to those.
    With equal slices of ``S / W`` tokens: ``(W - 1) S / W (passes token_bytes + gradient_token_bytes)``.

    Args:
        token_bytes: of one token's key and value.
        gradient_token_bytes: of the gradients of both.
        passes: in which keys and values travel: forward, backward, and again if checkpoints recompute attention.
    """
    owners = [(rank - hop) % split.world_size for hop in range(split.world_size)]
    key_value_tokens = sum(split.lengths[owner] for owner in owners[:-1])
    gradient_tokens = sum(split.lengths[owner] for owner in owners[1:])
    return passes * token_bytes * key_value_tokens + gradient_token_bytes * gradient_tokens


def all_to_all_bytes(
    split: SequenceSplit, rank: int, query_token_bytes: int, key_value_token_bytes: int, passes: int
) -> int:
    """Return the bytes that a rank sends for one layer of all-to-all attention.

    In a forward pass its tokens of the other ranks' heads (query, key and value), then the other ranks' tokens of its
    own heads (the output); in a backward pass the gradients of the same the other way round. With equal slices:
    ``(W - 1) / W^2 S (2 query_token_bytes + key_value_token_bytes)`` a pass.

    Args:
        query_token_bytes: of one token's query; its output has as many.
        key_value_token_bytes: of one token's key and value.
        passes: forward passes, those of checkpoints among them, and the backward pass.
    """
    world_size, local_tokens = split.world_size, split.lengths[rank]
    remote_tokens = split.length - local_tokens
    to_heads = (world_size - 1) * local_tokens * (query_token_bytes + key_value_token_bytes) // world_size
    to_tokens = remote_tokens * query_token_bytes // world_size
    back_to_heads = (world_size - 1) * local_tokens * query_token_bytes // world_size
    back_to_tokens = remote_tokens * (query_token_bytes + key_value_token_bytes) // world_size
    return (passes - 1) * (to_heads + to_tokens) + back_to_heads + back_to_tokens


def attention_sent_bytes(strategy: str, size: ModelSize, world_size: int, precision: str, checkpointing: str) -> int:
    """Return the bytes that the busiest rank sends for attention in a step of all layers.

    Args:
        strategy: one that splits sequences; torch's counts as the ring.
        size: its batch is that of the ranks that share sequences.
        precision: what attention computes in.
        checkpointing: ``none``, or ``block``, which computes attention twice.
    """
    split = split_of(strategy, size, world_size)
    passes = 3 if checkpointing == "block" else 2
    token_bytes = size.batch_size * size.d_model * ELEMENT_BYTES[precision]
    if STRATEGIES[strategy].trades_heads:
        of_ranks = [all_to_all_bytes(split, rank, token_bytes, 2 * token_bytes, passes) for rank in range(world_size)]
    else:
        gradient_bytes = 2 * 4 * size.batch_size * size.d_model  # Of key and value, summed in fp32.
        of_ranks = [ring_bytes(split, rank, 2 * token_bytes, gradient_bytes, passes) for rank in range(world_size)]
    return size.num_layers * max(of_ranks)
