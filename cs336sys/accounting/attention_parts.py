"""What the matrix products of attention and its softmax cost on the forward pass when the scores lie in memory."""

from dataclasses import dataclass

from cs336sys.accounting.flops import flops_by_component
from cs336sys.sizes import ModelSize

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# For each score: compare with the maximum, subtract it, exponentiate, add to the sum, multiply by its reciprocal.
SOFTMAX_FLOPS_PER_SCORE = 5


@dataclass(frozen=True)
class Work:
    """Arithmetic, and the least that must be moved between the GPU and its memory for it."""

    flops: int
    bytes: int


def attention_matmuls(size: ModelSize, precision: str) -> Work:
    """``Q K^T`` and ``P V`` of all layers, the masked half too, because plain attention computes it.

    FLOPs: ``4 B H S^2 D`` a layer. Bytes: Q, K, V and the output, ``4 B H S D`` elements; the scores that the first
    product writes and the probabilities that the second reads, ``2 B H S^2`` elements.
    """
    vectors = 4 * size.batch_size * size.num_heads * size.context * size.head_dim
    elements = vectors + 2 * _scores(size)
    flops = flops_by_component(size, backward=False, causal=False).attention
    return Work(flops, size.num_layers * elements * ELEMENT_BYTES[precision])


def attention_softmax(size: ModelSize, precision: str) -> Work:
    """The softmax of all layers: ``5 B H S^2`` FLOPs a layer; the scores read once and the probabilities written once.

    An eager softmax moves several times as much, because each of its operations reads and writes the whole matrix.
    """
    scores = size.num_layers * _scores(size)
    return Work(SOFTMAX_FLOPS_PER_SCORE * scores, 2 * scores * ELEMENT_BYTES[precision])


def _scores(size: ModelSize) -> int:
    """Elements of the score matrices of one layer."""
    return size.batch_size * size.num_heads * size.context**2
