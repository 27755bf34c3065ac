"""Activation checkpointing on paper: what it holds, what it computes again, and which strategy needs the least memory.

Of a group of blocks only the input is kept, ``s = 4 T d`` bytes; when the backward pass reaches the group, its forward
pass runs again and saves its activations, ``b`` bytes a block (Chen et al. 2016, https://arxiv.org/abs/1604.06174,
section 3; the 2026 handout, section 3.2). docs/memprof.md lists the strategies, what they hold and compute again.
"""

from dataclasses import dataclass

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.flops import flops_by_component, linear_flops
from cs336sys.accounting.memory import PeakMemory, SavedBlocks, everything_saved, widest_moments
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


def checkpointed_moments(
    size: ModelSize, precision: str, mode: str, attention: str, checkpointing: str
) -> list[PeakMemory]:
    """Return the moments of a step with checkpoints that can be its peak; mode ``forward`` has no checkpoints."""
    at_loss, at_blocks = saved_schedule(checkpointing, size.num_layers)
    return widest_moments(size, precision, mode, attention, at_loss=at_loss, at_blocks=at_blocks)


def predicted_peak(
    size: ModelSize, precision: str, mode: str, attention: str, checkpointing: str = "none"
) -> PeakMemory:
    """Return the moment of a step, with or without checkpoints, at which it holds the most."""
    moments = checkpointed_moments(size, precision, mode, attention, checkpointing)
    return max(moments, key=lambda moment: moment.total)


def saved_schedule(checkpointing: str, num_layers: int) -> tuple[SavedBlocks, list[SavedBlocks]]:
    """Return what is saved at the loss, and at each block where memory may peak in the backward pass.

    A checkpoint's own input is also the saved input of its first block, so it is not counted twice.
    """
    if checkpointing == "none":
        return SavedBlocks(num_layers, saved=num_layers), everything_saved(num_layers)
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


def _sublayer_schedule(layers: tuple[str, ...], num_layers: int) -> tuple[SavedBlocks, list[SavedBlocks]]:
    """Return the schedule of checkpoints around these layers of each block; memory changes evenly over the blocks."""

    def schedule(block: int, saved: int, name: str = "") -> SavedBlocks:
        earlier = block - saved  # Of them a layer with a checkpoint is kept as its input, the other one whole.
        attentions, feed_forwards = (0 if layer in layers else earlier for layer in ("attn", "ffn"))
        inputs, attention_later = len(layers) * earlier, "attn" in layers  # See SavedBlocks.
        return SavedBlocks(block, saved, inputs, name, attentions, feed_forwards, attention_later=attention_later)

    at_blocks = [schedule(blocks.block, saved=1, name=blocks.name) for blocks in everything_saved(num_layers)]
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


@dataclass(frozen=True)
class GroupSize:
    """The non-nested strategy with the least memory.

    Attributes:
        best: the ``K`` of ``every=K`` with the lowest predicted peak, the smallest if several have it.
        rule: ``sqrt(N s / b)``, where ``N s / K + K b`` is least.
        block_input, block_activations: ``s`` and ``b`` in bytes.
    """

    best: int
    rule: float
    block_input: int
    block_activations: int


def best_group_size(size: ModelSize, precision: str, mode: str, attention: str) -> GroupSize:
    """Find the group size with the least memory by trying all, and by a formula (2026, gradient_checkpointing (b))."""
    settings = size, precision, mode, attention
    peaks = {k: predicted_peak(*settings, f"every={k}").total for k in range(1, size.num_layers + 1)}
    block_input = 4 * size.stream
    block = block_activations(size, precision, attention).total
    rule = (size.num_layers * block_input / block) ** 0.5
    return GroupSize(min(peaks, key=peaks.__getitem__), rule, block_input, block)
