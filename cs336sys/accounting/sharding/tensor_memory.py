"""The peak of a rank's memory where ranks share layers, on paper: eager execution, in fp32 or under autocast.

Letters: ``n`` tokens of a group of ranks, ``m`` those of the residual stream on this rank (``n``, or its slice of the
sequence), ``d`` d_model, and of its part of a layer ``a`` width of attention, ``f`` inner features and ``V`` words;
``e`` bytes of a matrix product's result. Formulas differ from those of :mod:`~cs336sys.accounting.activations` in
what ranks send each other: what enters a layer is cast once, and is whole where the stream is in slices.
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.checkpointing import saved_schedule
from cs336sys.accounting.memory import PeakMemory, SavedBlocks
from cs336sys.accounting.sharding.tensor import TensorStep, is_sequence_parallel
from cs336sys.sizes import ELEMENT_BYTES


@dataclass(frozen=True)
class _Part:
    """What a rank saves for the backward pass, in bytes.

    Attributes:
        attention, feed_forward: of a block's layer and the norm before it.
        outside: tokens, rows and mask of the embedding, the last norm, the LM head's input and weight, logits, loss.
        stream: of the residual stream, ``4 m d``.
    """

    attention: int
    feed_forward: int
    outside: int
    stream: int

    def held(self, blocks: SavedBlocks) -> int:
        return blocks.saved * (self.attention + self.feed_forward) + blocks.inputs * self.stream


def tensor_moments(step: TensorStep, attention: str) -> list[PeakMemory]:
    """The moments of a later step that can be its peak, on the first rank of a group, whose parts are largest.

    As :func:`~cs336sys.accounting.memory.widest_moments`, of which

    - *loss* computes its gradient in fp32 from three tensors of the size of the logits, where it is not compiled;
    - *feed-forward backward* has the gradients of the stream and of gate and up, ``4 m d + 2 e n f`` bytes;
    - *softmax backward* of reference attention has its fp32 matrices for this rank's heads.

    Args:
        step: of a strategy that computes in fp32 or under autocast: none that gathers weights.
        attention: one of :data:`~cs336sys.accounting.activations.ATTENTION`.
    """
    size, e = step.size, ELEMENT_BYTES[step.precision]
    sequences = size.batch_size // step.data_ranks
    tokens = sequences * size.context
    part, widths = _saved(step, attention), _widths(step)
    at_loss, at_blocks = saved_schedule(step.checkpointing, size.num_layers)
    d, features, vocabulary = size.d_model, widths["ffn.w1"], widths["lm_head"]
    projection, w2 = d * widths["attn.q_proj"], d * features
    copy = 2 if step.precision != "fp32" else 0
    scores = sequences * size.num_heads // step.tensor_ranks * size.context**2 if attention == "reference" else 0
    logit_bytes = e if step.compiles else 12
    always = 16 * tokens + 4 * size.context * size.head_dim
    block_elements = 4 * projection + 3 * w2 + 2 * d
    after_head = vocabulary * d + d

    state = step.state
    elements = state.parameters // 4

    def moment(name: str, gradients: int, activations: int) -> PeakMemory:
        return PeakMemory(name, state.parameters, 4 * gradients, state.optimizer_state, always + activations)

    moments = [
        moment("loss", 0, part.outside + part.held(at_loss) + logit_bytes * tokens * vocabulary),
        moment("end of backward", elements, part.stream),
        moment("optimizer", elements, 4 * d * max(widths["attn.q_proj"], features, vocabulary)),
    ]
    for blocks in at_blocks:
        gradients = after_head + (size.num_layers - blocks.block) * block_elements
        held = part.held(blocks) + 9 * tokens
        inner = held + part.stream + 2 * e * tokens * features - copy * w2
        moments.append(moment(f"feed-forward backward, {blocks.name}", gradients + w2, inner))
        if attention == "reference":
            statistics = 4 * scores // size.context
            own = e * tokens * widths["attn.q_proj"]
            freed = part.feed_forward + copy * projection
            softmax = held - freed + part.stream - own + (12 - e) * scores + statistics
            done = gradients + 3 * w2 + projection + d
            moments.append(moment(f"softmax backward, {blocks.name}", done, softmax))
    return moments


def _widths(step: TensorStep) -> dict[str, int]:
    """How many rows of a first block's or the LM head's weight this rank has, by the layer's name."""
    names = {name: f"layers.0.{name}.weight" for name in ("attn.q_proj", "ffn.w1")} | {"lm_head": "lm_head.weight"}
    return {name: step.shapes[parameter][0] for name, parameter in names.items()}


def _saved(step: TensorStep, attention: str) -> _Part:
    size, e = step.size, ELEMENT_BYTES[step.precision]
    sequences = size.batch_size // step.data_ranks
    tokens = sequences * size.context
    own_tokens = math.ceil(tokens / step.tensor_ranks) if is_sequence_parallel(step.strategy) else tokens
    widths, d = _widths(step), size.d_model
    copies = 2 if step.precision != "fp32" else 0
    stream, entered = 4 * own_tokens * d, e * tokens * d
    # Its input, and what its gain is multiplied by with one number a token.
    norm = stream + stream + 4 * own_tokens
    own = e * tokens * widths["attn.q_proj"]
    statistics = sequences * size.num_heads // step.tensor_ranks * size.context
    if attention == "reference":
        # Scores as exponentials and probabilities, and the mask.
        kept = size.context**2 + (4 + e) * statistics * size.context
    else:
        kept = own
    return _Part(
        # Query, key, value, and heads side by side.
        attention=norm + entered + 4 * own + kept + 4 * statistics + copies * 4 * d * widths["attn.q_proj"],
        feed_forward=norm + entered + 5 * e * tokens * widths["ffn.w1"] + copies * 3 * d * widths["ffn.w1"],
        # Rows and mask of the embedding take 9 bytes a token; targets, maximum, sum and target's logit 20.
        outside=9 * tokens + norm + entered + tokens * (e * widths["lm_head"] + 20) + copies * d * widths["lm_head"],
        stream=stream,
    )
