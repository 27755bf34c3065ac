"""Activation checkpointing on paper: what it holds, what it computes again, and which strategy needs the least memory.

Of a group of blocks only the input is kept, ``s = 4 T d`` bytes; when the backward pass reaches the group, its forward
pass runs again and saves its activations, ``b`` bytes a block (Chen et al. 2016, https://arxiv.org/abs/1604.06174,
section 3; the 2026 handout, section 3.2). docs/memprof.md lists the strategies, what they hold and compute again.
"""

from dataclasses import dataclass

from cs336sys.accounting.flops import flops_by_component, linear_flops
from cs336sys.errors import UsageError, choose_from
from cs336sys.settings.sizes import ModelSize

# Which layers of a block have checkpoints of their own, by the names of the model's modules.
SUBLAYERS = {"sublayer": ("attn", "ffn"), "attention": ("attn",), "ffn": ("ffn",)}


def parse_checkpointing(text: str) -> str:
    """Return the strategy in its one spelling, ``every=1`` as ``block``; refuse one that does not exist."""
    name, equals, count = text.partition("=")
    if name == "every" and equals:
        if not count.isdecimal() or int(count) < 1:
            raise UsageError("a group has a whole number of blocks, at least 1, as in every=4")
        return "block" if int(count) == 1 else f"every={int(count)}"
    if text not in ("none", "block", "nested", *SUBLAYERS):
        raise UsageError(choose_from(text, ("none", "block", "every=K", *SUBLAYERS, "nested")))
    return text


def kept_blocks(checkpointing: str) -> int | None:
    """Return the ``N`` of ``keep=N`` (:mod:`~cs336sys.accounting.sharding.selective_checkpointing`), else None."""
    name, equals, count = checkpointing.partition("=")
    if name != "keep":
        return None
    if not equals or not count.isdecimal():
        raise UsageError("keep=N takes the number of blocks that keep gate and up, as in keep=24")
    return int(count)


def group_sizes(checkpointing: str, num_layers: int) -> list[int]:
    """Return how many blocks each checkpoint of ``block`` or ``every=K`` stands for; the last may have fewer."""
    every = 1 if checkpointing == "block" else int(checkpointing.removeprefix("every="))
    whole, rest = divmod(num_layers, every)
    return [every] * whole + [rest] * (rest > 0)


@dataclass(frozen=True)
class SavedBlocks:
    """The blocks whose activations exist at a moment of the backward pass.

    Attributes:
        block: the block that it has reached, from 1; those after it are done.
        saved: how many blocks have their activations saved: this one and the ones before it.
        inputs: how many inputs of further blocks (or of their attention or feed-forward layers) are kept alone,
            ``4 T d`` each, to be computed again.
        name: of the block, for people.
        attentions, feed_forwards: how many further blocks have the activations of that layer alone saved.
        attention_later: the block's own attention is kept as its input until its feed-forward layer is done.
    """

    block: int
    saved: int
    inputs: int = 0
    name: str = ""
    attentions: int = 0
    feed_forwards: int = 0
    attention_later: bool = False


def saved_schedule(checkpointing: str, num_layers: int) -> tuple[SavedBlocks, list[SavedBlocks]]:
    """Return what is saved at the loss, and at each block where memory may peak in the backward pass.

    A checkpoint's own input is also the saved input of its first block, so it is not counted twice.
    """
    if checkpointing == "none":
        return SavedBlocks(num_layers, saved=num_layers), _first_and_last(num_layers)
    if checkpointing in SUBLAYERS:
        return _sublayer_schedule(SUBLAYERS[checkpointing], num_layers)
    if checkpointing == "nested":
        pending = _pending_halves(num_layers)
        at_blocks = [
            SavedBlocks(block, saved=1, inputs=inputs, name=f"block {block} of {num_layers}")
            for block, inputs in enumerate(pending, 1)
        ]
        # The forward pass keeps the inputs of the two outer halves.
        return SavedBlocks(num_layers, saved=0, inputs=min(2, num_layers)), at_blocks
    at_blocks, first_block = [], 1
    sizes = group_sizes(checkpointing, num_layers)
    for earlier_groups, group_size in enumerate(sizes):
        last_block = first_block + group_size - 1
        # Memory changes evenly within a group, so one of its ends is the widest; a group of one block has one end.
        for block in {last_block, first_block}:
            name = f"block {block} of {num_layers}"
            at_blocks.append(SavedBlocks(block, saved=block - first_block + 1, inputs=earlier_groups, name=name))
        first_block = last_block + 1
    return SavedBlocks(num_layers, saved=0, inputs=len(sizes)), at_blocks


def _first_and_last(num_layers: int) -> list[SavedBlocks]:
    """Return the last and the first block: without checkpoints memory changes evenly, so one of them is the widest."""
    return [SavedBlocks(num_layers, saved=num_layers, name="last block"), SavedBlocks(1, saved=1, name="first block")]


def _sublayer_schedule(layers: tuple[str, ...], num_layers: int) -> tuple[SavedBlocks, list[SavedBlocks]]:
    """Return the schedule of checkpoints around these layers of each block; memory changes evenly over the blocks."""

    def schedule(block: int, saved: int, name: str = "") -> SavedBlocks:
        earlier = block - saved  # Of them a layer with a checkpoint is kept as its input, the other one whole.
        attentions, feed_forwards = (0 if layer in layers else earlier for layer in ("attn", "ffn"))
        inputs, attention_later = len(layers) * earlier, "attn" in layers  # See SavedBlocks.
        return SavedBlocks(block, saved, inputs, name, attentions, feed_forwards, attention_later=attention_later)

    at_blocks = [schedule(blocks.block, saved=1, name=blocks.name) for blocks in _first_and_last(num_layers)]
    return schedule(num_layers, saved=0), at_blocks


def _pending_halves(num_layers: int) -> list[int]:
    """Return, for each block, how many halves before it wait for their turn, each kept as its input."""
    if num_layers == 1:
        return [0]
    left = (num_layers + 1) // 2
    return _pending_halves(left) + [count + 1 for count in _pending_halves(num_layers - left)]


def recomputed_flops(size: ModelSize, checkpointing: str, *, causal: bool = True) -> int:
    """Count the FLOPs that a training step spends on computing activations again, as in ``accounting.flops``.

    torch ends a recomputation at the last tensor to save: before the product with w2 or, of attention, the projection.

    Args:
        causal: count the half of the attention square that the mathematics needs; False counts all of it.
    """
    if checkpointing == "none":
        return 0
    kept = kept_blocks(checkpointing)
    if kept is not None:  # Gate and up of the other blocks.
        product = linear_flops(size.tokens, size.d_model, size.d_ff, backward=False)
        return 2 * (size.num_layers - kept) * product
    counts = flops_by_component(size, backward=False, causal=causal)
    if checkpointing in SUBLAYERS:
        output_projection = linear_flops(size.tokens, size.d_model, size.d_model, backward=False)
        attention = counts.projections + counts.attention - size.num_layers * output_projection
        feed_forward = counts.feed_forward * 2 // 3  # w1 and w3 of three matrices of one size.
        layers = SUBLAYERS[checkpointing]
        return attention * ("attn" in layers) + feed_forward * ("ffn" in layers)
    block = (counts.total - counts.lm_head) // size.num_layers
    w2 = linear_flops(size.tokens, size.d_ff, size.d_model, backward=False)
    blocks, blocks_without_w2 = recomputed_blocks(size.num_layers, checkpointing)
    return blocks * block - blocks_without_w2 * w2


def recomputed_blocks(num_layers: int, checkpointing: str) -> tuple[int, int]:
    """Return how often a step computes blocks again, and how many of these runs torch ends before w2's product."""
    if checkpointing == "nested":
        # The outermost left half need not run for the right one's input, which the forward pass kept. The last run of
        # each block is in a checkpoint of its own, so torch ends it before w2.
        left = (num_layers + 1) // 2
        return _nested_recomputations(num_layers) - (left if num_layers > 1 else 0), num_layers
    return num_layers, len(group_sizes(checkpointing, num_layers))


def _nested_recomputations(num_layers: int) -> int:
    """Count the blocks that a checkpoint computes again: the left half, for the input of the right, then each half."""
    if num_layers == 1:
        return 1
    left = (num_layers + 1) // 2
    return left + _nested_recomputations(left) + _nested_recomputations(num_layers - left)
