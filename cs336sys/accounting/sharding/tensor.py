"""Tensor parallelism on paper: how ranks share a model's layers, and what each sends for it.

- ``tensor``: a rank computes a part of every layer for all tokens; sums of the parts are all-reduced.
- ``tensor-sequence``: between the layers a rank has a slice of the sequence; sums are reduce-scattered, inputs of
  layers all-gathered.
- ``ddp+...`` and ``fsdp+...``: each of several such groups of ranks has sequences of its own.

Source: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3, and its sequence parallelism
(https://arxiv.org/abs/2205.05198), section 4.2.

Letters of memory, which is of eager execution, in fp32 or under autocast: ``n`` tokens of a group of ranks, ``m`` those
of the residual stream on this rank (``n``, or its slice of the sequence), ``d`` d_model, and of its part of a layer
``f`` inner features; ``e`` bytes of a matrix product's result. Formulas differ from those of
:mod:`~cs336sys.accounting.activations` in what ranks send each other.
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.checkpointing import SavedBlocks, saved_schedule
from cs336sys.accounting.flops import parameter_shapes
from cs336sys.accounting.memory import PeakMemory, TrainingState
from cs336sys.accounting.sharding.fsdp import most_sent_bytes
from cs336sys.accounting.sharding.partition import cut_dimension, own_part, own_rows
from cs336sys.settings.choices import ATTENTION
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.settings.strategies import HasStrategy


@dataclass(frozen=True)
class TensorStep(HasStrategy):
    """A training step of which layers are shared.

    Attributes:
        strategy: one that shares layers.
        size: its batch is that of all ranks.
        tensor_ranks: how many ranks share a layer.
        data_ranks: how many such groups share the batch.
        checkpointing: ``none`` or ``block``.
        compiles: whether blocks are: one computed again for its checkpoint then ends with a sum that nobody needs.
    """

    strategy: str
    size: ModelSize
    tensor_ranks: int
    data_ranks: int
    precision: str
    checkpointing: str = "none"
    compiles: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the first rank's parts of parameters, which are the largest, by name."""
        shapes = parameter_shapes(self.size)
        for name, shape in shapes.items():
            cut = cut_dimension(name)
            if cut is not None:
                shapes[name] = (*shape[:cut], len(own_part(shape[cut], 0, self.tensor_ranks)), *shape[cut + 1 :])
        return shapes

    @property
    def state(self) -> TrainingState:
        """Return the bytes of fp32 parameters, gradients and AdamW's moments on the fullest rank."""
        elements = 0
        for shape in self.shapes.values():
            rows = shape[0]
            if self.strategy_record.gathers_ahead and len(shape) > 1:  # FSDP cuts matrices; norms are on every rank.
                rows = len(own_rows(rows, rank=0, world_size=self.data_ranks))
            elements += rows * math.prod(shape[1:])
        return TrainingState(4 * elements, 4 * elements, 8 * elements)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that the busiest rank sends in a step: for layers, and for the batch that groups share."""
        if self.strategy_record.gathers_ahead:
            return self.sent_for_layers + most_sent_bytes(self.shapes, ELEMENT_BYTES[self.precision], self.data_ranks)
        elements = sum(map(math.prod, self.shapes.values())) if self.strategy_record.outer == "ddp" else 0
        return self.sent_for_layers + (self.data_ranks - 1) / self.data_ranks * 2 * 4 * elements

    @property
    def sent_for_layers(self) -> float:
        """Return the bytes that a rank sends to those with which it shares layers, of which there are ``T``.

        With ``n`` tokens of the group, ``L`` blocks and ``e`` bytes a number,
        ``2 (T - 1) / T (n d ((4 L + 1) e + e_0) + 12 n)``: in every block two sums of outputs and two of gradients, the
        gradient of the LM head's input, the embedded tokens in ``e_0`` bytes (4, or ``e`` where FSDP gathers weights),
        and the loss with three fp32 numbers a token. A block that is computed again for its checkpoint sends what its
        forward pass does once more. Sequence parallelism sends each sum as a reduce-scatter and an all-gather, as many
        bytes; besides them the gradients of norms, ``4 (2 L + 1) d``, and inputs of layers of blocks computed again.
        """
        size, e = self.size, ELEMENT_BYTES[self.precision]
        tokens = size.batch_size // self.data_ranks * size.context
        embedded_bytes = e if self.strategy_record.gathers_ahead else 4
        # Bytes that are summed over ranks: for each number of the residual stream, and all others.
        sums: float = (4 * size.num_layers + 1) * e + embedded_bytes
        other_bytes = 12 * tokens
        # A block that is computed again sends its first sum, and where it is compiled its last.
        recomputed_sums = 2.0 if self.compiles else 1.0
        if self.strategy_record.is_sequence_parallel:
            other_bytes += 4 * (2 * size.num_layers + 1) * size.d_model
            # Halves of all-reduces: the inputs of both layers are gathered, and as many outputs as above scattered.
            recomputed_sums = (2 + recomputed_sums) / 2
        if self.checkpointing == "block":
            sums += size.num_layers * e * recomputed_sums
        ring = (self.tensor_ranks - 1) / self.tensor_ranks
        return 2 * ring * (tokens * size.d_model * sums + other_bytes)


@dataclass(frozen=True)
class _Part:
    """Bytes that a rank saves for the backward pass.

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
    """Return the moments of a later step that can be its peak, on the first rank of a group, whose parts are largest.

    As :func:`~cs336sys.accounting.memory.widest_moments`, of which

    - *loss* computes its gradient in fp32 from three tensors of the size of the logits, where it is not compiled;
    - *feed-forward backward* has the gradients of the stream and of gate and up, ``4 m d + 2 e n f`` bytes, and w2's
      gradient in place of its copy;
    - *softmax backward* of reference attention has four fp32 matrices for this rank's heads in place of exponentials
      and probabilities; what the feed-forward layer saved is gone, and so are the heads side by side.

    Args:
        step: of a strategy that computes in fp32 or under autocast: none that gathers weights.
        attention: one of :data:`~cs336sys.settings.choices.ATTENTION`.
    """
    size, e = step.size, ELEMENT_BYTES[step.precision]
    sequences = size.batch_size // step.data_ranks
    tokens = sequences * size.context
    saved, widths = _saved(step, attention), _widths(step)
    at_loss, at_blocks = saved_schedule(step.checkpointing, size.num_layers)
    d, features, vocabulary = size.d_model, widths["ffn.w1"], widths["lm_head"]
    projection, w2 = d * widths["attn.q_proj"], d * features
    copy = 2 if e == 2 else 0  # Bytes of an element of autocast's copy of a weight.
    scores = sequences * size.num_heads // step.tensor_ranks * size.context**2
    logit_bytes = e if step.compiles else 12  # Of the gradient: compiled it alone, else three fp32 tensors.
    always = 16 * tokens + 4 * size.context * size.head_dim  # The batch, int64, and the rotary table.
    block_elements, head_elements = 4 * projection + 3 * w2 + 2 * d, vocabulary * d + d
    state = step.state
    elements = state.parameters // 4

    def moment(name: str, gradients: int, activations: int) -> PeakMemory:
        return PeakMemory(name, state.parameters, 4 * gradients, state.optimizer_state, always + activations)

    moments = [
        moment("loss", 0, saved.outside + saved.held(at_loss) + logit_bytes * tokens * vocabulary),
        moment("end of backward", elements, saved.stream),
        # The course's AdamW makes a temporary of the size of the largest parameter.
        moment("optimizer", elements, 4 * d * max(widths["attn.q_proj"], features, vocabulary)),
    ]
    for blocks in at_blocks:
        gradients = head_elements + (size.num_layers - blocks.block) * block_elements
        saved_bytes = saved.held(blocks) + 9 * tokens  # And the embedding's rows and mask.
        feed_forward = saved_bytes + saved.stream + 2 * e * tokens * features - copy * w2
        moments.append(moment(f"feed-forward backward, {blocks.name}", gradients + w2, feed_forward))
        if ATTENTION[attention].keeps_scores:
            row_sums, heads = 4 * scores // size.context, e * tokens * widths["attn.q_proj"]  # Bytes.
            freed = saved.feed_forward + copy * projection  # And the output projection's copy.
            softmax = saved_bytes - freed + saved.stream - heads + (12 - e) * scores + row_sums  # 4 * 4 for 4 + e.
            done = gradients + 3 * w2 + projection + d  # Of w1, w2, w3, their norm and the output projection.
            moments.append(moment(f"softmax backward, {blocks.name}", done, softmax))
    return moments


def _widths(step: TensorStep) -> dict[str, int]:
    """Return this rank's rows of the query projection, w1 and the LM head, by layer: those of k, v and w3 are alike."""
    names = {name: f"layers.0.{name}.weight" for name in ("attn.q_proj", "ffn.w1")} | {"lm_head": "lm_head.weight"}
    return {name: step.shapes[parameter][0] for name, parameter in names.items()}


def _saved(step: TensorStep, attention: str) -> _Part:
    """Count the bytes that a rank saves for backward, by part of a block and outside of blocks."""
    size, e = step.size, ELEMENT_BYTES[step.precision]
    sequences = size.batch_size // step.data_ranks
    tokens = sequences * size.context
    rank_tokens = math.ceil(tokens / step.tensor_ranks) if step.strategy_record.is_sequence_parallel else tokens
    widths, d = _widths(step), size.d_model
    copy = 2 if e == 2 else 0  # Bytes of an element of autocast's copy of a weight.
    stream, layer_input = 4 * rank_tokens * d, e * tokens * d  # A layer's input is whole, and cast once.
    # Its input, the normalized stream that its gain is multiplied by, and one number a token.
    norm = stream + stream + 4 * rank_tokens
    query_bytes = e * tokens * widths["attn.q_proj"]
    queries = sequences * size.num_heads // step.tensor_ranks * size.context  # Softmax saves an fp32 number of each.
    if ATTENTION[attention].keeps_scores:
        # Scores as exponentials and probabilities, and the mask.
        kept = size.context**2 + (4 + e) * queries * size.context
    else:
        kept = query_bytes
    return _Part(
        # Four: query, key, value, heads side by side. Five: w1(x), its sigmoid, SiLU, w3(x) and the product.
        attention=norm + layer_input + 4 * query_bytes + kept + 4 * queries + copy * 4 * d * widths["attn.q_proj"],
        feed_forward=norm + layer_input + 5 * e * tokens * widths["ffn.w1"] + copy * 3 * d * widths["ffn.w1"],
        # Rows and mask of the embedding take 9 bytes a token; targets, maximum, sum and target's logit 20.
        outside=9 * tokens + norm + layer_input + tokens * (e * widths["lm_head"] + 20) + copy * d * widths["lm_head"],
        stream=stream,
    )
