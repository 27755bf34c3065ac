"""Answers of the handouts about one model on one device, with numbers: activations, FLOPs, attention.

Problems ``memory_profiling`` (d), (e) and (f), what is arithmetic in ``nsys_profile``, and ``pytorch_attention``: 2025
handout, sections 1.1 and 1.2; 2026 handout, 2.1 and 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cs336sys.accounting.activations import attention_memory, block_activations
from cs336sys.accounting.checkpointing import recomputed_blocks
from cs336sys.accounting.derivation import Derived, Expression, log2, number_of, symbol, why
from cs336sys.accounting.flops import SOFTMAX_FLOPS_PER_SCORE, attention_flops, count_parameters, linear_flops
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize

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
    "inputs": "query, key, value",
    "scaled_query": "scaled query",
    "mask": "causal mask",
    "probabilities": "probabilities",
    "statistics": "logsumexp of each query",
    "output": "output",
}

# Where formulas come from.
_SAVED = "what autograd saves, accounting/activations.py"
_SHAPES = "shapes of the model's tensors"
_FLOPS = "2 a b c a product, accounting/flops.py"


# Names of a size's numbers in formulas; the widths keep theirs.
_SYMBOLS = {"num_heads": "H", "vocab_size": "V", "context": "S", "batch_size": "B"}


def _named_size(size: ModelSize) -> ModelSize:
    """Return the size with symbols in place of its numbers."""
    fields = ("d_model", "d_ff", *_SYMBOLS)
    return replace(size, **{field: _whole_number(_SYMBOLS.get(field, field), getattr(size, field)) for field in fields})


# A symbol, of any type: formulas are declared to count in integers.
_whole_number: Callable[[str, int], Any] = symbol


def tensor_answers(size: ModelSize, precision: str) -> list[Derived]:
    """Answer ``memory_profiling`` (d) and (e): the residual stream, and a forward pass's largest tensors by size."""
    named, e = _named_size(size), ELEMENT_BYTES[precision]
    row = partial(Derived, unit="bytes", source=_SHAPES, question="memory_profiling (e)")
    scores = e * named.batch_size * named.num_heads * named.context * named.context
    largest = [
        row("attention scores", scores, reason=why("tensor_of_scores")),
        row("feed-forward activations", e * named.inner, reason=why("tensor_of_feed_forward")),
        row("logits", e * named.tokens * named.vocab_size, reason=why("logits")),
    ]
    label, part_d = "tensor of the residual stream", "memory_profiling (d)"
    stream = row(label, 4 * named.stream, reason=why("stream"), question=part_d)
    return [stream, *sorted(largest, key=lambda tensor: -tensor.value)]


def block_answers(size: ModelSize, precision: str, attention: str) -> list[Derived]:
    """Answer what one block saves for backward, the largest first, and which gradients it produces there."""
    named = _named_size(size)
    row = partial(Derived, unit="bytes", source=_SAVED, question="memory_profiling (f), 2026")
    # A plain number is the 0 of a kind that a block does not save.
    parts = {
        name: value
        for name, value in asdict(block_activations(named, precision, attention)).items()
        if isinstance(value, Expression) and value.value
    }
    total = sum(value.value for value in parts.values())
    rows = [
        row(_ACTIVATION_NAMES[name], value, reason=why("share_of_block", f"{value.value / total:.1%}"))
        for name, value in sorted(parts.items(), key=lambda part: -part[1].value)
    ]
    five_largest_share = sum(part.value for part in rows[:5]) / total
    reason = why("saved_by_block", f"{five_largest_share:.1%}")
    saved = row("saved for backward by one block", symbol("sum of these", total), symbol="b", reason=reason)
    d, f = named.d_model, named.d_ff
    block_gradients = 4 * (4 * d**2 + 3 * d * f + 2 * d)
    label, reason = "gradients of one block's parameters", why("block_gradients")
    gradients = row(label, block_gradients, symbol="g", reason=reason, source=_SHAPES)
    label, change = "change of memory over the block's backward pass", gradients.as_symbol() - saved.as_symbol()
    return [*rows, saved, gradients, row(label, change, reason=why("block_change"))]


def flops_answers(size: ModelSize) -> list[Derived]:
    """Count a forward pass's matrix products by component, and softmax next to them, as the model's attention computes.

    Counted as in ``accounting.flops``, but with the whole square of attention, which the model computes and masks.
    """
    named = _named_size(size)
    tokens, d = named.tokens, named.d_model
    batch, heads, context = named.batch_size, named.num_heads, named.context
    layers, head_dim = symbol("L", size.num_layers), _whole_number("d_head", size.head_dim)
    row = partial(Derived, source=_FLOPS)
    square = attention_flops(batch, heads, context, context, head_dim, causal=False, backward=False)
    projections = 4 * linear_flops(tokens, d, d, backward=False)
    feed_forward = 3 * linear_flops(tokens, d, named.d_ff, backward=False)
    attention = row("Q K^T and P V", layers * square, "flops", "F_attn", reason=why("square"))
    products = (
        row("projections q, k, v, output", layers * projections, "flops", "F_proj"),
        attention,
        row("SwiGLU's three products", layers * feed_forward, "flops", "F_ffn"),
        row("LM head", linear_flops(tokens, d, named.vocab_size, backward=False), "flops", "F_head"),
    )
    forward = row("forward pass", sum(product.as_symbol() for product in products), "flops", "F")
    softmax_flops = SOFTMAX_FLOPS_PER_SCORE * layers * batch * heads * context**2
    part_e = "nsys_profile (e)"
    softmax = row("softmax of attention", softmax_flops, "flops", "F_softmax", reason=why("softmax"), question=part_e)
    training = row("training step", 3 * forward.as_symbol(), "flops", reason=why("training_step"))
    label, part_b = "matrix products in the forward pass", "nsys_profile (b)"
    count = row(label, 9 * layers + 1, "products", reason=why("number_of_products"), question=part_b)
    label, over_softmax = "attention's products over softmax, FLOPs", attention.as_symbol() / softmax.as_symbol()
    ratio = row(label, over_softmax, "times", reason=why("attention_over_softmax"), question=part_e)
    label, adamw_bytes = "bytes that AdamW reads and writes in a step", 28 * symbol("P", count_parameters(size))
    moved = row(label, adamw_bytes, "bytes", reason=why("adamw_bytes"), question="nsys_profile (d)")
    return [*products, forward, training, count, softmax, ratio, moved]


def attention_answers(
    batch: int, context: int, head_dim: int, dtype: str, *, causal: bool, implementation: str
) -> list[Derived]:
    """Answer ``pytorch_attention`` (a), tensor by tensor; arguments as of ``activations.attention_memory``."""
    shape = _whole_number("B", batch), _whole_number("S", context), _whole_number("d", head_dim)
    memory = attention_memory(*shape, dtype, causal=causal, implementation=implementation)
    source = "FlashAttention-2, alg. 1 and 2" if implementation == "flash" else _SAVED
    row = partial(Derived, unit="bytes", source=source, question="pytorch_attention (a)")
    rows = [
        row(quantity, value, reason=why("attention", name))
        for name, quantity in _ATTENTION_NAMES.items()
        if number_of(value := getattr(memory, name))  # 0: this implementation has no such tensor.
    ]
    saved = row("held before the backward pass", symbol("sum of these", memory.held), symbol="held")
    reason = why("attention_backward", implementation)
    backward = row("more where the backward pass is widest", memory.backward, symbol="more", reason=reason)
    return [*rows, saved, backward, row("peak", saved.as_symbol() + backward.as_symbol())]


def checkpointing_answers(size: ModelSize, precision: str, attention: str) -> list[Derived]:
    """Answer ``gradient_checkpointing``: memory and recomputation of the strategies, for the blocks of one model."""
    handout = "2026 handout, 3.2"
    n, batch, context = symbol("N", size.num_layers), symbol("B", size.batch_size), symbol("S", size.context)
    label, kept = "input of a block, which a checkpoint keeps", 4 * batch * context * symbol("d_model", size.d_model)
    block_input = Derived(label, kept, "bytes", "s", reason=why("block_input"), source=handout)
    total = symbol("as in account activations", block_activations(size, precision, attention).total)
    saved = Derived("what a block saves for backward", total, "bytes", "b", source=_SAVED)
    s, b = block_input.as_symbol(), saved.as_symbol()
    row = partial(Derived, source="Chen et al., arXiv:1604.06174")
    part_a, part_b = "gradient_checkpointing (a)", "gradient_checkpointing (b)"
    label = "group with the least memory, one recomputation"
    best = row(label, (n * s / b) ** 0.5, "blocks", "K", reason=why("best_group"), question=part_b)
    group = symbol("K", min(max(1, round(best.value)), size.num_layers))
    groups_label = f"held with a checkpoint for every {group.value} block{'s' * (group.value != 1)}"
    levels, runs = math.ceil(log2(n)), n * (log2(n) + 1) / 2
    runs_reason = why("runs_of_halves", recomputed_blocks(size.num_layers, "nested")[0])  # [0]: all; [1]: without w2.
    return [
        block_input,
        saved,
        row("held without checkpoints", n * b, "bytes", source=handout, reason=why("without_checkpoints")),
        best,
        row(groups_label, n * s / group + group * b, "bytes", reason=why("groups"), question=part_b),
        row("held with halves inside halves", b + levels * s, "bytes", reason=why("halves"), question=part_a),
        row("blocks computed again with halves inside halves", runs, "blocks", reason=runs_reason, question=part_a),
    ]
