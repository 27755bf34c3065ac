"""GPU memory of the model on paper: its training state, and the peak of a step.

Eager execution of ``cs336_basics``, in half precision under torch autocast or by itself; compilation needs less. The
formulas were read off what the allocator really hands out in each place, and the tests hold them to that. Letters as in
``accounting.activations``: ``T`` tokens, ``S`` context, ``d`` d_model, ``f`` d_ff, ``e`` bytes of a matrix product's
result; and ``r`` bytes of a number of the residual stream: 4 in fp32 and under autocast, 2 in a model that is in half
precision itself. ``stream`` counts ``T d`` numbers, ``inner`` ``T f``; the batch is ``16 T`` bytes of int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cs336sys.accounting.activations import (
    attention_activations,
    block_activations,
    feed_forward_activations,
    saved_activations,
)
from cs336sys.accounting.checkpointing import SavedBlocks, saved_schedule
from cs336sys.accounting.flops import Components, count_parameters
from cs336sys.settings.choices import ATTENTION, MODES
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize

GIB = 2**30


@dataclass(frozen=True)
class TrainingState(Components):
    """Bytes that live from step to step."""

    parameters: int
    gradients: int
    optimizer_state: int
    master_parameters: int = 0


def training_state(size: ModelSize, precision: str, *, autocast: bool = True) -> TrainingState:
    """Return the bytes of parameters, gradients, AdamW's two moments and fp32 master parameters.

    Autocast leaves parameters, and so their gradients and moments, in fp32 whatever the precision: 16 bytes a
    parameter. Without it, parameters and gradients are held in ``precision`` themselves, and a half precision needs
    fp32 master parameters next to the fp32 moments: 2 + 2 + 8 + 4 bytes (ZeRO, https://arxiv.org/abs/1910.02054, 3.1).
    """
    count = count_parameters(size)
    width = 4 if autocast else ELEMENT_BYTES[precision]
    return TrainingState(width * count, width * count, 8 * count, 0 if width == 4 else 4 * count)


@dataclass(frozen=True)
class MomentMemory(Components):
    """Bytes alive at a moment, by its name; the parts add up to the total."""

    moment: str
    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total_gib(self) -> float:
        return self.total / GIB


@dataclass(frozen=True)
class PeakMemory(MomentMemory):
    """Bytes alive at a moment of a step when much is.

    Attributes:
        gradients: those that exist already at that moment: none before the backward pass, all at its end.
        activations: saved for the backward pass and not yet freed, temporaries, the batch and the rotary table.
    """

    activations: int


def always_held_bytes(size: ModelSize) -> int:
    """Return the bytes of the batch and of the rotary table, which are always there: ``16 T + 4 S d_head``."""
    return 16 * size.tokens + 4 * size.context * size.head_dim


def largest_parameter(size: ModelSize) -> int:
    """Count the elements of the largest weight: the course's AdamW makes a temporary of that size."""
    return size.d_model * max(size.d_model, size.d_ff, size.vocab_size)


def widest_moments(
    size: ModelSize,
    precision: str,
    mode: str,
    attention: str,
    checkpointing: str = "none",
    *,
    autocast: bool = True,
    at_blocks: Sequence[SavedBlocks] = (),
) -> list[PeakMemory]:
    """Return the moments of a step that can be its peak, to compare with ``torch.cuda.max_memory_allocated``.

    Counts tensors alone: the CUDA context, cuBLAS workspaces (tens of MiB) and the allocator's rounding come on top.
    Gradients are dropped after each step (``zero_grad(set_to_none=True)``), and the optimizer's state exists already,
    so this is a second or later step. Each moment is exact; one between two of them can hold up to 2 % more.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        mode: ``forward`` (without gradients), ``forward-backward``, or ``train``, which adds AdamW.
        attention: one of :data:`~cs336sys.settings.choices.ATTENTION`.
        checkpointing: of the backward pass; mode ``forward`` has no checkpoints.
        autocast: half precision is autocast's; False: parameters and gradients are in it, with fp32 master parameters
            if AdamW updates them. These count among the parameters.
        at_blocks: in place of the blocks at which these checkpoints let a backward pass be the widest.
    """
    if not MODES[mode].has_backward:
        moments = _forward_moments(size, precision, attention, autocast)
    else:
        at_loss, widest_blocks = saved_schedule(checkpointing, size.num_layers)
        moments = _backward_moments(size, precision, attention, autocast, at_loss, at_blocks or widest_blocks)
    if MODES[mode].updates_parameters:
        # The batch, and a temporary of the course's AdamW; torch's fused makes none, its foreach one of all parameters.
        temporary_bytes = 16 * size.tokens + 4 * largest_parameter(size)
        moments.append(("optimizer", count_parameters(size), temporary_bytes))
    state = training_state(size, precision, autocast=autocast)
    gradient_bytes = state.gradients // count_parameters(size)
    optimizer_state = state.optimizer_state if MODES[mode].updates_parameters else 0
    parameters, rotary_table = state.parameters + state.master_parameters, 4 * size.context * size.head_dim
    return [
        PeakMemory(name, parameters, gradient_bytes * gradients, optimizer_state, activations + rotary_table)
        for name, gradients, activations in moments
    ]


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
    peaks = {}
    for blocks in range(1, size.num_layers + 1):
        moments = widest_moments(size, precision, mode, attention, f"every={blocks}")
        peaks[blocks] = max(moment.total for moment in moments)
    block_input = 4 * size.stream
    block = block_activations(size, precision, attention).total
    rule = (size.num_layers * block_input / block) ** 0.5
    return GroupSize(min(peaks, key=peaks.__getitem__), rule, block_input, block)


def accumulating(moments: Sequence[PeakMemory], size: ModelSize, precision: str, passes: int) -> list[PeakMemory]:
    """Return the moments of a later pass of several: all gradients are there, the newest twice until it is added.

    One moment more is the end of the LM head's backward pass, which has made the gradients of its weight and input. In
    fp32 the logits are gone, their gradient is not; under autocast both are gone, and the weight's gradient, in half
    precision, is in place of the weight's copy.

    Args:
        moments: of one pass, with its part of the batch.
        size: the model, with the whole batch, which is there all the time.
        precision: as of :func:`widest_moments`.
    """
    all_gradients = max(moment.gradients for moment in moments)
    gradient_bytes, e = all_gradients // count_parameters(size), ELEMENT_BYTES[precision]
    tokens, copy, embedding = size.tokens // passes, 2 if e < 4 else 0, size.vocab_size * size.d_model
    newest_elements = {
        "LM head backward": embedding,
        "end of backward": embedding,
        # In fp32 it is added before w1(x) has its gradient, which the moment counts.
        "feed-forward backward": max(0, size.d_ff * size.d_model - (0 if copy else size.inner // passes)),
        "softmax backward": size.d_model**2,
    }
    # Gone: of a logit in fp32 itself (4), in half precision itself (e), its gradient (4) and the cast of that; and the
    # loss's two numbers a token. New: the input's gradient.
    logits = tokens * size.vocab_size
    freed = (4 + copy) * logits + 8 * tokens + (e * logits if copy else 0) - e * tokens * size.d_model
    loss = next(moment for moment in moments if moment.moment == "loss")
    head = replace(loss, moment="LM head backward", activations=loss.activations - freed)
    other_batch_bytes = 16 * size.tokens * (passes - 1) // passes  # A moment counts its own part.
    later_moments = []
    for moment in [*moments, head]:
        # Names of moments end with that of a block: "softmax backward, first block".
        newest_bytes = gradient_bytes * newest_elements.get(moment.moment.partition(",")[0], 0)
        gradients, activations = all_gradients + newest_bytes, moment.activations + other_batch_bytes
        later_moments.append(replace(moment, gradients=gradients, activations=activations))
    return later_moments


# A moment is its name, how many parameters have a gradient at that time, and the bytes of activations.
_WidestMoment = tuple[str, int, int]


def _forward_moments(size: ModelSize, precision: str, attention: str, autocast: bool) -> list[_WidestMoment]:
    """Return what a forward pass without gradients holds where it is widest: the batch (``16 T``) and activations.

    - Softmax of reference attention: the block's input and the norm's output (``2 r T d``), q, k, v, the mask, and 12
      bytes a score: in fp32 the scores, the exponentials and the probabilities, with the reciprocal of a query's sum
      (4 bytes); in half precision the scores, the exponentials, the fp32 probabilities and their cast.
    - Feed-forward: the block's input, the residual stream and the norm's output (``3 r T d``), and three of ``e T f``:
      ``w1(x)``, sigmoid and SiLU, or SiLU, ``w3(x)`` and product. Under autocast ``w3(x)`` needs casts of input and
      weight next to SiLU and result, which is more where a batch has few tokens.
    - LM head: its input and the residual stream, the logits, and under autocast the casts of input and weight.
    - Loss: the logits, one fp32 temporary of their shape, and two numbers a token.
    """
    e = ELEMENT_BYTES[precision]
    r = 4 if autocast else e
    stream, inner, logits = size.stream, size.inner, size.tokens * size.vocab_size

    def casts(d_out: int) -> int:
        return 2 * (stream + size.d_model * d_out) if e < r else 0

    moments = {
        "feed-forward": 3 * r * stream + max(3 * e * inner, 2 * e * inner + casts(size.d_ff)),
        "LM head": 2 * r * stream + e * logits + casts(size.vocab_size),
        "loss": (e + 4) * logits + 8 * size.tokens,
    }
    if ATTENTION[attention].keeps_scores:
        moments["softmax"] = (2 * r + 3 * e) * stream + size.context**2 + 12 * size.scores + 4 * size.queries
    return [(name, 0, 16 * size.tokens + held_bytes) for name, held_bytes in moments.items()]  # 0: no gradients.


def _backward_moments(
    size: ModelSize,
    precision: str,
    attention: str,
    autocast: bool,
    at_loss: SavedBlocks,
    at_blocks: Sequence[SavedBlocks],
) -> list[_WidestMoment]:
    """Return what a backward pass holds where it is widest; the forward pass before it holds less.

    - Loss: all saved activations, the fp32 gradient of the logits, and its cast in half precision.
    - Feed-forward of a block: the blocks after it have left their gradients and freed their activations. It holds its
      own saved activations, but for the product, of which it has the gradient, that of SiLU and that of ``w3(x)``
      (``2 e T f`` more in all); the gradient of the residual stream; and w2's gradient in place of its autocast copy.
    - Softmax of a block, reference attention: its feed-forward is done. In place of exponentials and probabilities
      there are four fp32 matrices: the exponentials, the gradient of the probabilities, and that times each factor of
      the softmax's last product. The heads side by side and v are gone; v's gradient exists.
    - End: all gradients, and that of the embedded tokens.
    """
    e = ELEMENT_BYTES[precision]
    r = 4 if autocast else e
    # Bytes of an element of autocast's copy of a weight, and of the cast of the logits' gradient.
    copy, cast = 2 if e < r else 0, 2 if e < 4 else 0
    tokens, stream, inner = size.tokens, size.stream, size.inner
    w2, projection = size.d_ff * size.d_model, size.d_model**2

    # Outside of blocks, with the batch.
    without_blocks = saved_activations(replace(size, num_layers=0), precision, attention, autocast=autocast).total
    attention_bytes = attention_activations(size, precision, attention, autocast=autocast).total
    feed_forward_bytes = feed_forward_activations(size, precision, autocast=autocast).total

    def saved_bytes(blocks: SavedBlocks) -> int:
        attentions = blocks.saved + blocks.attentions
        feed_forwards = blocks.saved + blocks.feed_forwards
        return attentions * attention_bytes + feed_forwards * feed_forward_bytes + blocks.inputs * r * stream

    moments = [
        ("loss", 0, without_blocks + saved_bytes(at_loss) + (4 + cast) * tokens * size.vocab_size),
        ("end of backward", count_parameters(size), 16 * tokens + r * stream),
    ]
    for blocks in at_blocks:
        saved = 16 * tokens + saved_bytes(blocks)
        # Of what is not in a block, only the LM head and the last norm have their gradients yet.
        later = count_parameters(size) - count_parameters(replace(size, num_layers=blocks.block))
        gradients = later + (size.vocab_size + 1) * size.d_model
        feed_forward = saved + r * stream + 2 * e * inner - copy * w2
        if blocks.attention_later:
            feed_forward -= attention_bytes - r * stream  # Of attention there is only the input yet.
        moments.append((f"feed-forward backward, {blocks.name}", gradients + w2, feed_forward))
        if ATTENTION[attention].keeps_scores:
            # The norm's stream and normalized stream in fp32 and a number a token; the input of w1 and w3, once or as
            # two casts; five tensors of the feed-forward layer; copies of w1, w2, w3 and the output projection.
            freed = (8 + r) * stream + 4 * tokens + 5 * e * inner + copy * (3 * w2 + projection)
            # New: the stream's gradient, that of v, four fp32 matrices, a number a query. Gone: heads, v, two matrices.
            softmax = saved - freed + (r - e) * stream + (12 - e) * size.scores + 4 * size.queries
            done = gradients + (3 * w2 + projection + size.d_model)  # Of w1, w2, w3, their norm, output projection.
            moments.append((f"softmax backward, {blocks.name}", done, softmax))
    return moments
