"""What the handouts ask about one model on one device, with numbers: activations, FLOPs, attention.

Problems ``memory_profiling`` (d), (e) and (f), what is arithmetic in ``nsys_profile``, and ``pytorch_attention``: 2025
handout, sections 1.1 and 1.2; 2026 handout, 2.1 and 4.1.
"""

from dataclasses import asdict, replace
from typing import Any

from cs336sys.accounting.activations import attention_memory, block_activations
from cs336sys.accounting.derivation import Derived, Expression, Number, number_of, symbol
from cs336sys.accounting.flops import SOFTMAX_FLOPS_PER_SCORE, attention_flops, linear_flops
from cs336sys.accounting.parameters import count_parameters
from cs336sys.sizes import ELEMENT_BYTES, ModelSize

_ACTIVATION_NAMES = {
    "residual_stream": "inputs of the two norms",
    "norms": "normalized inputs and statistics of the two norms",
    "linear_inputs": "inputs of the projections",
    "queries_keys_values": "rotated queries and keys, values",
    "mask": "causal mask",
    "exponentials": "softmax: exponentials",
    "probabilities": "softmax: probabilities, which multiply the values",
    "attention_statistics": "softmax: one number a query",
    "attention_output": "attention output",
    "swiglu": "SwiGLU: w1(x), sigmoid, SiLU, w3(x), product",
    "weight_copies": "copies of the weights in half precision",
}

_ATTENTION_NAMES = {
    "inputs": ("query, key, value", ""),
    "scaled_query": ("scaled query", "The scores' gradient needs it."),
    "mask": ("causal mask", "One byte a position."),
    "probabilities": ("probabilities", "The only part that grows with the square of the context."),
    "statistics": ("logsumexp of each query", "The probabilities are computed again from it."),
    "output": ("output", ""),
}
_BACKWARD_NAMES = {
    "eager": "Gradients of output, value, probabilities and scores, and a product of the scores' size in the softmax.",
    "flash": "Gradients of output, query, key and value, and one number a query.",
}

# Where formulas come from.
_SAVED = "what autograd saves, accounting/activations.py"
_SHAPES = "shapes of the model's tensors"
_FLOPS = "2 a b c a product, accounting/flops.py"


def _named(size: ModelSize) -> ModelSize:
    """The size with symbols for its numbers."""
    return replace(
        size,
        d_model=_whole("d_model", size.d_model),
        d_ff=_whole("d_ff", size.d_ff),
        num_heads=_whole("H", size.num_heads),
        vocab_size=_whole("V", size.vocab_size),
        context=_whole("S", size.context),
        batch_size=_whole("B", size.batch_size),
    )


def _whole(name: str, value: int) -> Any:
    """A symbol for where formulas are declared to count in integers."""
    return symbol(name, value)


def tensor_answers(size: ModelSize, precision: str) -> list[Derived]:
    """The size of the residual stream, and the largest tensors that a forward pass makes, by size."""
    named = _named(size)
    e = ELEMENT_BYTES[precision]
    tokens = named.batch_size * named.context
    scores = named.batch_size * named.num_heads * named.context * named.context
    largest = [
        ("attention scores", e * scores, "batch, heads, queries, keys; softmax makes more tensors of this shape."),
        ("feed-forward activations", e * tokens * named.d_ff, "w1(x), w3(x) and everything between them and w2."),
        ("logits", e * tokens * named.vocab_size, "The LM head's output."),
    ]
    return [
        Derived(
            "tensor of the residual stream",
            4 * tokens * named.d_model,
            "bytes",
            reason="fp32 whatever the precision: autocast's matrix products are added to it.",
            source=_SHAPES,
            question="memory_profiling (d)",
        ),
        *(
            Derived(name, value, "bytes", reason=reason, source=_SHAPES, question="memory_profiling (e)")
            for name, value, reason in sorted(largest, key=lambda tensor: -number_of(tensor[1]))
        ),
    ]


def block_answers(size: ModelSize, precision: str, attention: str) -> list[Derived]:
    """What one block saves for the backward pass, the largest first, and the gradients that it produces there."""
    named = _named(size)
    parts = {
        name: value
        for name, value in asdict(block_activations(named, precision, attention)).items()
        if isinstance(value, Expression) and value.value
    }
    total = sum(value.value for value in parts.values())
    question = "memory_profiling (f), 2026"
    rows = [
        Derived(
            _ACTIVATION_NAMES[name],
            value,
            "bytes",
            reason=f"{value.value / total:.1%} of the block.",
            source=_SAVED,
            question=question,
        )
        for name, value in sorted(parts.items(), key=lambda part: -part[1].value)
    ]
    five = sum(row.value for row in rows[:5])
    saved = Derived(
        "saved for backward by one block",
        symbol("sum of these", total),
        "bytes",
        symbol="b",
        reason=f"The five largest of these kinds, each all tensors of its kind, are {five / total:.1%} of it; memprof "
        "lists single tensors.",
        source=_SAVED,
        question=question,
    )
    gradients = Derived(
        "gradients of one block's parameters",
        4 * (4 * named.d_model**2 + 3 * named.d_model * named.d_ff + 2 * named.d_model),
        "bytes",
        symbol="g",
        reason="fp32: four square projections, three SwiGLU matrices, two norm gains. The gradient of the residual "
        "stream takes the place of the one that came in.",
        source=_SHAPES,
        question=question,
    )
    change = Derived(
        "change of memory over the block's backward pass",
        gradients.as_symbol() - saved.as_symbol(),
        "bytes",
        reason="What was saved is freed, and the gradients stay.",
        source=_SAVED,
        question=question,
    )
    return [*rows, saved, gradients, change]


def flops_answers(size: ModelSize) -> list[Derived]:
    """Matrix products of a forward pass by component, and softmax beside them, as the model's own attention computes.

    Counted as in ``accounting.flops``, but with the whole square of attention, which the model computes and masks.
    """
    named = _named(size)
    tokens = named.batch_size * named.context
    layers = symbol("L", size.num_layers)
    head_dim = _whole("d_head", size.head_dim)
    tokens_and_width = tokens, named.d_model

    def row(quantity: str, value: Number, unit: str, name: str = "", reason: str = "", question: str = "") -> Derived:
        question = f"nsys_profile {question}" if question else ""
        return Derived(quantity, value, unit, name, reason=reason, source=_FLOPS, question=question)

    square = attention_flops(
        named.batch_size, named.num_heads, named.context, named.context, head_dim, causal=False, backward=False
    )
    projections = 4 * linear_flops(*tokens_and_width, named.d_model, backward=False)
    feed_forward = 3 * linear_flops(*tokens_and_width, named.d_ff, backward=False)
    attention = row(
        "Q K^T and P V", layers * square, "flops", "F_attn", "The whole square, of which the mask leaves half."
    )
    products = (
        row("projections q, k, v, output", layers * projections, "flops", "F_proj"),
        attention,
        row("SwiGLU's three products", layers * feed_forward, "flops", "F_ffn"),
        row("LM head", linear_flops(*tokens_and_width, named.vocab_size, backward=False), "flops", "F_head"),
    )
    forward = row("forward pass", sum(product.as_symbol() for product in products), "flops", "F")
    softmax = row(
        "softmax of attention",
        SOFTMAX_FLOPS_PER_SCORE * layers * named.batch_size * named.num_heads * named.context**2,
        "flops",
        "F_softmax",
        "A score is compared, shifted, exponentiated, summed and divided: 5 operations.",
        "(e)",
    )
    return [
        *products,
        forward,
        row(
            "training step",
            3 * forward.as_symbol(),
            "flops",
            reason="The backward pass multiplies twice for each product of the forward pass.",
        ),
        row(
            "matrix products in the forward pass",
            9 * layers + 1,
            "products",
            reason="4 projections, 2 of attention and 3 of SwiGLU in each layer, and the LM head.",
            question="(b)",
        ),
        softmax,
        row(
            "attention's products over softmax, FLOPs",
            attention.as_symbol() / softmax.as_symbol(),
            "times",
            reason="4 d_head / 5. In time they are far closer: softmax computes little with each score it reads and "
            "writes, so memory sets its pace, and it cannot use tensor cores.",
            question="(e)",
        ),
        row(
            "bytes that AdamW reads and writes in a step",
            28 * symbol("P", count_parameters(size)),
            "bytes",
            reason="fp32: reads parameter, gradient and two moments, writes all but the gradient. It multiplies no "
            "matrices, so their share of a training step is smaller than that of a forward pass.",
            question="(d)",
        ),
    ]


def attention_answers(
    batch: int, context: int, head_dim: int, dtype: str, *, causal: bool, implementation: str
) -> list[Derived]:
    """The memory of attention alone, tensor by tensor (arguments as in ``accounting.activations.attention_memory``)."""
    shape = _whole("B", batch), _whole("S", context), _whole("d", head_dim)
    memory = attention_memory(*shape, dtype, causal=causal, implementation=implementation)
    question = "pytorch_attention (a)"
    source = "FlashAttention-2, alg. 1 and 2" if implementation == "flash" else _SAVED
    rows = [
        Derived(quantity, value, "bytes", reason=reason, source=source, question=question)
        for name, (quantity, reason) in _ATTENTION_NAMES.items()
        if number_of(value := getattr(memory, name))
    ]
    held = Derived(
        "held before the backward pass",
        symbol("sum of these", memory.held),
        "bytes",
        symbol="held",
        source=source,
        question=question,
    )
    backward = Derived(
        "more where the backward pass is widest",
        memory.backward,
        "bytes",
        symbol="more",
        reason=_BACKWARD_NAMES[implementation],
        source=source,
        question=question,
    )
    total = held.as_symbol() + backward.as_symbol()
    return [*rows, held, backward, Derived("peak", total, "bytes", source=source, question=question)]
