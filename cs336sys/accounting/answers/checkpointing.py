"""The 2026 handout's problem ``gradient_checkpointing``: what strategies hold and compute again, as functions of N."""

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import recomputed_blocks
from cs336sys.accounting.derivation import Derived, Number, ceil, log2, symbol
from cs336sys.sizes import ModelSize

_HANDOUT = "2026 handout, 3.2"
_CHEN = "Chen et al., arXiv:1604.06174"


def held_by_groups(blocks: Number, block_input: Number, block_activations: Number, group: Number) -> Number:
    """Bytes held at most with a checkpoint for every ``K`` blocks: all inputs, and the activations of one group.

    ``N s / K + K b``; its derivative by K is zero at ``K = sqrt(N s / b)``.
    """
    return blocks * block_input / group + group * block_activations


def best_group(blocks: Number, block_input: Number, block_activations: Number) -> Number:
    """The ``K`` with the least of :func:`held_by_groups`, at least 1 and not a whole number: ``sqrt(N s / b)``."""
    return (blocks * block_input / block_activations) ** 0.5


def held_by_halves(blocks: Number, block_input: Number, block_activations: Number) -> Number:
    """Bytes held at most with halves inside halves down to one block: its activations and one input for each level."""
    return block_activations + ceil(log2(blocks)) * block_input


def checkpointing_answers(size: ModelSize, precision: str, attention: str) -> list[Derived]:
    """Memory and recomputation of the strategies, for the blocks of one model.

    Raises:
        UsageError: ``attention`` is unknown.
    """
    n = symbol("N", size.num_layers)
    block_input = Derived(
        "input of a block, which a checkpoint keeps",
        4 * symbol("B", size.batch_size) * symbol("S", size.context) * symbol("d_model", size.d_model),
        "bytes",
        "s",
        reason="fp32: the residual stream.",
        source=_HANDOUT,
    )
    saved = Derived(
        "what a block saves for backward",
        symbol("as in account activations", block_activations(size, precision, attention).total),
        "bytes",
        "b",
        source="what autograd saves, accounting/activations.py",
    )
    s, b = block_input.as_symbol(), saved.as_symbol()
    best = Derived(
        "group with the least memory, one recomputation",
        best_group(n, s, b),
        "blocks",
        "K",
        reason="The derivative of N s / K + K b by K is zero there. Under 1 it means groups of one block.",
        source=_CHEN,
        question="gradient_checkpointing (b)",
    )
    group = symbol("K", min(max(1, round(best.value)), size.num_layers))
    nested, _ = recomputed_blocks(size.num_layers, "nested")
    return [
        block_input,
        saved,
        Derived("held without checkpoints", n * b, "bytes", source=_HANDOUT, reason="All blocks at once: O(N)."),
        best,
        Derived(
            f"held with a checkpoint for every {group.value} block{'s' * (group.value != 1)}",
            held_by_groups(n, s, b, group),
            "bytes",
            reason="All N / K inputs, and the activations of the group that is computed again: O(sqrt(N)) at best, for "
            "one more forward pass.",
            source=_CHEN,
            question="gradient_checkpointing (b)",
        ),
        Derived(
            "held with halves inside halves",
            held_by_halves(n, s, b),
            "bytes",
            reason="One block's activations and one input for each level: O(log N), and O(1) where s is negligible.",
            source=_CHEN,
            question="gradient_checkpointing (a)",
        ),
        Derived(
            "blocks computed again with halves inside halves",
            n * (log2(n) + 1) / 2,
            "blocks",
            reason="Every block once to save its activations, and on each level but the first the left halves to get "
            f"at the right ones: O(N log N). Exact for powers of two; here it is {nested}.",
            source=_CHEN,
            question="gradient_checkpointing (a)",
        ),
    ]
