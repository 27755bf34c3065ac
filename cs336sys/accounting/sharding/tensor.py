"""How tensor parallel ranks share the layers of a model, and what each of them sends for it.

- ``tensor``: a rank computes a part of every layer for all tokens; sums of the parts are all-reduced.
- ``tensor-sequence``: between the layers a rank has a slice of the sequence; sums are reduce-scattered, inputs of
  layers all-gathered.
- ``ddp+...`` and ``fsdp+...``: each of several such groups of ranks has sequences of its own.

Source: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3, and its sequence parallelism
(https://arxiv.org/abs/2205.05198), section 4.2.
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.memory import TrainingState
from cs336sys.accounting.parameters import parameter_shapes
from cs336sys.accounting.sharding.fsdp import StepCommunication, most_sent_bytes
from cs336sys.accounting.sharding.mesh import outer_dimension
from cs336sys.accounting.sharding.partition import cut_dimension, own_part, own_rows
from cs336sys.sizes import ELEMENT_BYTES, ModelSize

TENSOR = "tensor"
_SEQUENCE = "-sequence"
OWN_TENSOR_STRATEGIES = tuple(
    f"{outer}{TENSOR}{sequence}" for outer in ("", "ddp+", "fsdp+") for sequence in ("", _SEQUENCE)
)
# The last two are torch's own, ``parallelize_module`` with ``loss_parallel``.
TENSOR_STRATEGIES = (*OWN_TENSOR_STRATEGIES, "torch-tensor", "torch-tensor-sequence")


def is_sequence_parallel(strategy: str) -> bool:
    return strategy.endswith(_SEQUENCE)


@dataclass(frozen=True)
class TensorStep:
    """A training step of which layers are shared.

    Attributes:
        strategy: one of :data:`TENSOR_STRATEGIES`.
        size: its batch is that of all ranks.
        tensor_ranks: how many ranks share a layer.
        data_ranks: how many such groups share the batch.
        checkpointing: ``none`` or ``block``.
        compiles: whether blocks are compiled: one that is computed again for its checkpoint then ends with the sum over
            ranks that nobody needs.
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
        """Of the parts of parameters that the first rank of a group has, which are the largest."""
        return {
            name: _part_shape(shape, cut_dimension(name), self.tensor_ranks)
            for name, shape in parameter_shapes(self.size).items()
        }

    @property
    def state(self) -> TrainingState:
        """Bytes of fp32 parameters, gradients and AdamW's moments on the fullest rank."""
        elements = 0
        for shape in self.shapes.values():
            rows = shape[0]
            if outer_dimension(self.strategy) == "fsdp" and len(shape) > 1:
                rows = len(own_rows(rows, 0, self.data_ranks))
            elements += rows * math.prod(shape[1:])
        return TrainingState(4 * elements, 4 * elements, 8 * elements, 0)

    @property
    def sent_bytes(self) -> float:
        """What the rank that sends most sends in a step: for layers, and for the batch that groups share."""
        return self.sent_for_layers + self._sent_for_batch

    @property
    def sent_for_layers(self) -> float:
        """With ``T`` ranks, ``n`` tokens of the group, ``L`` blocks and ``e`` bytes a number,

        ``2 (T - 1) / T (n d ((4 L + 1) e + e_0) + 12 n)``: in every block two sums of outputs and two of gradients, the
        gradient of the LM head's input, the embedded tokens in ``e_0`` bytes (weights' under autocast), and the loss
        with three fp32 numbers a token. A block that is computed again for its checkpoint sends what its forward pass
        does once more. Sequence parallelism sends each sum as a reduce-scatter and an all-gather, as many bytes;
        what it sends besides are the gradients of norms, ``4 (2 L + 1) d``, and when a block is computed again, inputs
        of layers.
        """
        size, e = self.size, ELEMENT_BYTES[self.precision]
        tokens = size.batch_size // self.data_ranks * size.context
        embedded_bytes = e if outer_dimension(self.strategy) == "fsdp" else 4
        sums = (4 * size.num_layers + 1) * e + embedded_bytes
        other = 12 * tokens
        again = 0.0
        if self.checkpointing == "block":
            last = 1 if self.compiles else 0
            again = size.num_layers * e * (1 + last)
        if is_sequence_parallel(self.strategy):
            other += 4 * (2 * size.num_layers + 1) * size.d_model
            if again:
                # Halves of all-reduces: inputs are gathered, outputs scattered.
                again = size.num_layers * e * (3 + last) / 2
        ring = (self.tensor_ranks - 1) / self.tensor_ranks
        return 2 * ring * (tokens * size.d_model * (sums + again) + other)

    @property
    def _sent_for_batch(self) -> float:
        outer = outer_dimension(self.strategy)
        if outer is None:
            return 0.0
        if outer == "ddp":
            elements = sum(map(math.prod, self.shapes.values()))
            return StepCommunication(0, 0, 4 * elements).sent_bytes(self.data_ranks)
        return most_sent_bytes(self.shapes, ELEMENT_BYTES[self.precision], self.data_ranks)


def _part_shape(shape: tuple[int, ...], dimension: int | None, tensor_ranks: int) -> tuple[int, ...]:
    if dimension is None:
        return shape
    own = len(own_part(shape[dimension], 0, tensor_ranks))
    return tuple(own if number == dimension else length for number, length in enumerate(shape))
