"""Parameters of a model, and floating-point operations of a step on paper: the numerators of TFLOP/s and MFU columns.

What is counted, everywhere in this project:

- Matrix multiplications only, a multiply-add as two operations. Norms, softmax, rotary embeddings, SiLU, the loss and
  the optimizer are left out, as the field does (Kaplan et al. 2020, section 2.1; PaLM, appendix B).
- ``model_flops`` are the operations that the mathematics needs: the backward pass of every matrix multiplication is
  two of its size (the gradient of each operand), hence twice the forward. Nothing recomputed counts, neither by
  activation checkpointing nor inside FlashAttention.
- Causal attention needs half of the query-key pairs. This is counted as ``S^2 / 2``, the FlashAttention papers'
  convention, and not as the exact ``S (S + 1) / 2``, so that figures compare with published ones. MFU columns use
  ``causal=True`` whatever implementation ran; ``causal=False`` is the work of an implementation that computes the full
  square and masks it (``cs336_basics``' reference attention), which is also what ``FlopCounterMode`` counts.
- ``attention_flops`` alone follows the FlashAttention papers in the backward pass too: 2.5 times the forward, because
  five matrix products are counted there, the recomputed ``Q K^T`` among them. It serves kernel benches, not MFU.
"""

from dataclasses import dataclass

from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize


class Components:
    """A dataclass whose numbers add up to a total."""

    @property
    def total(self) -> int:
        return sum(number for number in vars(self).values() if not isinstance(number, str))


def count_parameters(size: ModelSize) -> int:
    """Count the parameters of a pre-norm Transformer with SwiGLU, rotary embeddings and no biases, all layers together.

    A layer has four square attention projections (q, k, v, output: ``4 d^2``), the three SwiGLU matrices
    (``3 d d_ff``) and two RMSNorm gains (``2 d``); a last RMSNorm follows the layers. The token embedding and the LM
    head are separate ``vocab x d`` matrices; rotary embeddings have no parameters.
    """
    layer = 4 * size.d_model + 3 * size.d_ff + 2
    return size.d_model * (size.num_layers * layer + 2 * size.vocab_size + 1)


def parameter_shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name, in the order in which the model registers and uses them."""
    d_model, d_ff, vocab_size = size.d_model, size.d_ff, size.vocab_size
    layer = {
        **{f"attn.{name}_proj.weight": (d_model, d_model) for name in ("q", "k", "v", "output")},
        "ffn.w1.weight": (d_ff, d_model),
        "ffn.w2.weight": (d_model, d_ff),
        "ffn.w3.weight": (d_ff, d_model),
        "ln1.weight": (d_model,),
        "ln2.weight": (d_model,),
    }
    layers = {f"layers.{n}.{name}": shape for n in range(size.num_layers) for name, shape in layer.items()}
    return {
        "token_embeddings.weight": (vocab_size, d_model),
        **layers,
        "ln_final.weight": (d_model,),
        "lm_head.weight": (vocab_size, d_model),
    }


# For each score: compare with the maximum, subtract it, exponentiate, add to the sum, multiply by its reciprocal.
SOFTMAX_FLOPS_PER_SCORE = 5


@dataclass(frozen=True)
class Work:
    """Arithmetic, and the least that must be moved between the GPU and its memory for it."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class FlopCounts(Components):
    """FLOPs by component, the whole model's (all layers together).

    Attributes:
        projections: q, k, v and output projections of attention.
        attention: the two products ``Q K^T`` and ``P V``.
        feed_forward: the three SwiGLU matrices.
    """

    projections: int
    attention: int
    feed_forward: int
    lm_head: int


def linear_flops(tokens: int, d_in: int, d_out: int, *, backward: bool) -> int:
    """Count FLOPs of a linear layer without bias on ``tokens`` rows: ``2 * tokens * d_in * d_out`` forward.

    Args:
        backward: add the backward pass, the gradients of input and weight: twice the forward, three times in all.
    """
    return 2 * tokens * d_in * d_out * (3 if backward else 1)


def attention_flops(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    backward: bool,
    window: int | None = None,
    aligned_at_end: bool = False,
) -> int:
    """Count FLOPs of attention as the FlashAttention papers do (FlashAttention-2, section 4.1).

    Args:
        heads: of queries; how many of keys and values there are changes nothing.
        window: of causal attention, how many keys a query sees, its own too; the half square that it hides is left out.
        aligned_at_end: the queries of causal attention are the last rows of a square of all keys.
        backward: add the backward pass, 2.5 times the forward; by itself it is the difference of both counts.
    """

    def count(queries: int, keys: int) -> int:
        """Count ``Q K^T`` and ``P V``: 2 FLOPs for each query, key and number of a head; half of it if causal."""
        square = 4 * batch * heads * queries * keys * head_dim
        if window is not None:
            square -= 4 * batch * heads * max(0, queries - window) * max(0, keys - window) * head_dim
        return square // 2 if causal else square

    earlier = max(0, keys - queries)  # Rows of the square that are before the queries.
    forward = count(keys, keys) - count(earlier, earlier) if aligned_at_end else count(queries, keys)
    return forward * 7 // 2 if backward else forward


def flops_by_component(size: ModelSize, *, backward: bool = True, causal: bool = True) -> FlopCounts:
    """Count model FLOPs of one step on ``size.batch_size`` sequences of ``size.context`` tokens, by component.

    The embedding is a look-up, which has no FLOPs. The first layer's input gradient counts: the embedding needs it.

    Args:
        backward: count forward and backward passes; False counts the forward alone.
        causal: count the half of the attention square that the mathematics needs; False counts all of it.
    """
    tokens, d_model, layers = size.tokens, size.d_model, size.num_layers
    shape = size.batch_size, size.num_heads, size.context, size.context, size.head_dim
    attention = attention_flops(*shape, causal=causal, backward=False)
    return FlopCounts(
        projections=layers * 4 * linear_flops(tokens, d_model, d_model, backward=backward),
        attention=layers * attention * (3 if backward else 1),  # Scores computed again do not count.
        feed_forward=layers * 3 * linear_flops(tokens, d_model, size.d_ff, backward=backward),
        lm_head=linear_flops(tokens, d_model, size.vocab_size, backward=backward),
    )


def model_flops(size: ModelSize, *, backward: bool = True, causal: bool = True) -> int:
    """Count all model FLOPs of one step, the sum of :func:`flops_by_component` (same arguments)."""
    return flops_by_component(size, backward=backward, causal=causal).total


def attention_matmuls(size: ModelSize, precision: str) -> Work:
    """Count ``Q K^T`` and ``P V`` of all layers, the masked half too, because plain attention computes it.

    FLOPs: ``4 B H S^2 D`` a layer. Bytes: Q, K, V and the output, ``4 B H S D`` elements; the scores that the first
    product writes and the probabilities that the second reads, ``2 B H S^2`` elements.
    """
    elements = 4 * size.queries * size.head_dim + 2 * size.scores
    flops = flops_by_component(size, backward=False, causal=False).attention
    return Work(flops, size.num_layers * elements * ELEMENT_BYTES[precision])


def attention_softmax(size: ModelSize, precision: str) -> Work:
    """Count the softmax of all layers: ``5 B H S^2`` FLOPs a layer; scores read once, probabilities written once.

    An eager softmax moves several times as much, because each of its operations reads and writes the whole matrix.
    """
    scores = size.num_layers * size.scores
    return Work(SOFTMAX_FLOPS_PER_SCORE * scores, 2 * scores * ELEMENT_BYTES[precision])
