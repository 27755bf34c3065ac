"""Memory that autograd holds between forward and backward pass, on paper: of the model, and of attention alone.

All of it is for eager execution; compilation saves less. Half precision is torch autocast's, or that of the model
itself. Tests hold the formulas to what autograd really saves (``torch.autograd.graph.saved_tensors_hooks``).

Letters in the derivations: ``T`` tokens (batch * context), ``S`` context, ``H`` heads, ``d`` d_model, ``f`` d_ff, ``V``
vocabulary, ``L`` layers, ``BHSS`` attention scores of a layer (batch * heads * S^2), and ``e`` bytes of a matrix
product's result: 4 in fp32, 2 in half precision. ``stream`` counts ``T d`` numbers, ``inner`` ``T f``.
"""

import operator
from dataclasses import astuple, dataclass

from cs336sys.accounting.flops import Components
from cs336sys.settings.choices import ATTENTION
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize

# Of the logits, where the loss is computed without all of them at once: 4096 tokens of 151,936 bfloat16 logits. On
# an H200, forward and backward of 32768 tokens of width 4096 took 181.8 ms with it, 183.7 with half and 186.8 with
# twice as much (the products at 766 TFLOP/s: 160).
LOGITS_CHUNK_BYTES = 1_250_000_000


@dataclass(frozen=True)
class SavedActivations(Components):
    """Bytes that autograd holds when the backward pass starts, all layers together; parameters are not among them.

    Attributes:
        tokens: token ids and targets, int64, saved by the embedding and the loss: ``16 T``.
        residual_stream: the fp32 input of each of the ``2L + 1`` norms: ``4 T d``.
        norms: a norm's normalized input (its gain's gradient needs it) and inverse RMS, fp32: ``4 T d + 4 T``.
        linear_inputs: what the projections multiply. q, k, v share the norm's output, and so do w1 and w3; but under
            autocast each casts its own copy, so a layer holds 5 of ``2 T d`` instead of 2 of ``e T d``. The heads
            side by side, which the output projection multiplies, are another ``e T d`` a layer, and so is, once, the
            LM head's input. The input of w2 counts under ``swiglu``.
        queries_keys_values: rotated q and k (reference attention: q scaled) and v, ``3 e T d``; rotation saves nothing.
        mask: reference attention: one byte a position of the square, made anew in each layer: ``S^2``.
        exponentials: reference attention: ``exp(scores - max)``, always fp32: ``4 BHSS``. Scores are not saved.
        probabilities: reference attention: ``e BHSS``, what multiplies v.
        attention_statistics: one fp32 a query: the softmax's denominator, or the logsumexp of sdpa and flash.
        attention_output: sdpa and flash: their output, ``e T d``, head by head: heads side by side are a copy.
        swiglu: ``w1(x)``, its sigmoid and its SiLU, ``w3(x)``, and the product that w2 takes: ``5 e T f``.
        logits: the LM head's output, ``e T V``, and an fp32 maximum and sum a token, ``8 T``: the loss saves no more.
        weight_copies: autocast: each projection's weight in half precision, ``2`` bytes a parameter. The model
            multiplies by a transposed view, which autocast's cache passes over, but the backward pass needs the copy.
    """

    tokens: int = 0
    residual_stream: int = 0
    norms: int = 0
    linear_inputs: int = 0
    queries_keys_values: int = 0
    mask: int = 0
    exponentials: int = 0
    probabilities: int = 0
    attention_statistics: int = 0
    attention_output: int = 0
    swiglu: int = 0
    logits: int = 0
    weight_copies: int = 0


def saved_activations(size: ModelSize, precision: str, attention: str, *, autocast: bool = True) -> SavedActivations:
    """Return the bytes that autograd saves in the forward pass of one training step, logits and loss included.

    Args:
        attention: one of :data:`ATTENTION`.
        autocast: half precision is autocast's; False: the model itself is in it, and nothing is copied to be cast.
    """
    e = ELEMENT_BYTES[precision]
    casts = autocast and e == 2
    block = block_activations(size, precision, attention, autocast=autocast)
    outside_of_blocks = SavedActivations(  # Of the batch, the last norm, the LM head and the loss.
        tokens=16 * size.tokens,
        residual_stream=4 * size.stream,
        norms=4 * (size.stream + size.tokens),
        linear_inputs=e * size.stream,
        logits=size.tokens * (e * size.vocab_size + 8),  # And two numbers a token of the loss.
        weight_copies=2 * size.vocab_size * size.d_model if casts else 0,
    )
    parts = zip(astuple(block), astuple(outside_of_blocks), strict=True)
    return SavedActivations(*(size.num_layers * of_block + outside for of_block, outside in parts))


def block_activations(size: ModelSize, precision: str, attention: str, *, autocast: bool = True) -> SavedActivations:
    """Return what one Transformer block adds to :func:`saved_activations`; the size's numbers may be symbols."""
    of_attention = attention_activations(size, precision, attention, autocast=autocast)
    of_feed_forward = feed_forward_activations(size, precision, autocast=autocast)
    return SavedActivations(*map(operator.add, astuple(of_attention), astuple(of_feed_forward)))


def attention_activations(
    size: ModelSize, precision: str, attention: str, *, autocast: bool = True
) -> SavedActivations:
    """Return what a block's attention and its norm save; the residual stream is the block's input."""
    e, stream = ELEMENT_BYTES[precision], size.stream
    casts, keeps_scores = autocast and e == 2, ATTENTION[attention].keeps_scores
    scores = size.scores if keeps_scores else 0
    return SavedActivations(
        residual_stream=4 * stream,
        norms=4 * (stream + size.tokens),
        # q, k and v share their input unless each casts it; the output projection has one of its own.
        linear_inputs=(2 * 3 if casts else e) * stream + e * stream,
        queries_keys_values=3 * e * stream,
        mask=size.context**2 if keeps_scores else 0,
        exponentials=4 * scores,
        probabilities=e * scores,
        attention_statistics=4 * size.queries,
        attention_output=0 if keeps_scores else e * stream,
        weight_copies=2 * 4 * size.d_model**2 if casts else 0,  # Of four projections, 2 bytes a number.
    )


def feed_forward_activations(size: ModelSize, precision: str, *, autocast: bool = True) -> SavedActivations:
    """Return what a block's feed-forward layer and its norm save; the residual stream is attention's sum."""
    e = ELEMENT_BYTES[precision]
    casts = autocast and e == 2
    return SavedActivations(
        residual_stream=4 * size.stream,
        norms=4 * (size.stream + size.tokens),
        linear_inputs=(2 * 2 if casts else e) * size.stream,  # w1 and w3 share their input unless each casts it.
        swiglu=5 * e * size.inner,  # w1(x), its sigmoid, SiLU, w3(x) and the product.
        weight_copies=2 * 3 * size.d_model * size.d_ff if casts else 0,
    )


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one attention call on its own, when its backward pass is about to start.

    Attributes:
        inputs: query, key and value.
        scaled_query: query divided by the root of the head dimension, which the scores' gradient needs.
        mask: one byte a position of the square.
        probabilities: the matrix that multiplies value, and the only one of its size that lives on: the scores are
            masked in place and freed after the softmax, whose gradient is computed from its result.
        statistics: one fp32 logsumexp a query, from which FlashAttention computes the probabilities again.
        output: the result, which its consumer holds.
        backward: what the backward pass adds where it is widest.
    """

    inputs: int
    scaled_query: int
    mask: int
    probabilities: int
    statistics: int
    output: int
    backward: int

    @property
    def held(self) -> int:
        """Return the bytes held before the backward pass."""
        return sum(astuple(self)) - self.backward

    @property
    def peak(self) -> int:
        """Return the most bytes of forward and backward pass."""
        return self.held + self.backward


def attention_memory(
    batch: int, context: int, head_dim: int, dtype: str, *, causal: bool, implementation: str
) -> AttentionMemory:
    """Return the memory of attention alone, of query, key and value (batch, context, head_dim) in ``dtype``.

    - ``eager`` is plain PyTorch, ``kernels.attention.reference.plain_attention``. Its backward pass is widest in the
      softmax: probabilities, their gradient, on a GPU the product of the two as a tensor of its own, and the scores'
      gradient, next to the gradients of output and value.
    - ``flash`` is FlashAttention (https://arxiv.org/abs/2307.08691, algorithms 1 and 2): the backward pass adds four
      gradients and one fp32 a query (the row sums of dO * O), and where a gradient is accumulated in fp32, that.

    Args:
        batch: sequences times heads.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        implementation: ``eager`` or ``flash``.
    """
    tensor = ELEMENT_BYTES[dtype] * batch * context * head_dim
    scores = ELEMENT_BYTES[dtype] * batch * context**2
    statistics = 4 * batch * context
    is_eager = implementation == "eager"
    return AttentionMemory(
        inputs=3 * tensor,
        scaled_query=tensor if is_eager else 0,
        mask=context**2 if is_eager and causal else 0,
        probabilities=scores if is_eager else 0,
        statistics=0 if is_eager else statistics,
        output=tensor,
        backward=2 * tensor + 3 * scores if is_eager else 4 * tensor + statistics,
    )
