"""The tables of ``account activations``, ``flops``, ``attention`` and ``checkpointing``."""

from collections.abc import Sequence
from itertools import product

from cs336sys.accounting.activations import AttentionMemory, attention_memory
from cs336sys.accounting.checkpointing import (
    SUBLAYERS,
    best_group_size,
    checkpointing_answers,
    predicted_peak,
    recomputed_blocks,
    recomputed_flops,
)
from cs336sys.accounting.flops import SOFTMAX_FLOPS_PER_SCORE, model_flops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.one_device import attention_answers, block_answers, flops_answers, tensor_answers
from cs336sys.report.account.answers import answers_table
from cs336sys.report.numbers import Value
from cs336sys.report.table import Column, Table
from cs336sys.sizes import ModelSize

# Contexts beyond the grid that are tried for one that does not fit; far more than any memory holds.
_LONGEST_CONTEXT = 2**30


def _shape(size: ModelSize) -> str:
    return f"{size.name}, batch {size.batch_size}, context {size.context}"


def activations_tables(sizes: Sequence[ModelSize], precision: str, attention: str) -> list[Table]:
    """Single tensors, and what one block saves for backward, for each size."""
    tables = []
    for size in sizes:
        title = f"{_shape(size)}, {precision}"
        tables += [
            answers_table("tensors", f"Activation tensors: {title}", tensor_answers(size, precision)),
            answers_table(
                "block",
                f"Saved for backward by one block: {title}, {attention} attention",
                block_answers(size, precision, attention),
                ("Assumed: eager execution; compilation saves less. Parameters are not counted.",),
            ),
        ]
    return tables


def flops_tables(sizes: Sequence[ModelSize]) -> list[Table]:
    """FLOPs by component, for each size."""
    notes = (
        "Assumed: matrix products alone, a multiply-add is two; attention computes the whole square and masks it, as "
        "cs336_basics does. TFLOP/s and MFU of other commands count the half that causal attention needs.",
        f"Assumed: softmax takes {SOFTMAX_FLOPS_PER_SCORE} operations a score, an exponential counting as one.",
    )
    return [answers_table("flops", f"FLOPs: {_shape(size)}", flops_answers(size), notes) for size in sizes]


def attention_tables(
    batch: int,
    contexts: Sequence[int],
    head_dims: Sequence[int],
    dtype: str,
    implementations: Sequence[str],
    capacity_bytes: float,
    *,
    causal: bool,
) -> list[Table]:
    """Memory of every shape, and for each implementation the smallest that does not fit, tensor by tensor."""

    def memory(implementation: str, context: int, head_dim: int) -> AttentionMemory:
        return attention_memory(batch, context, head_dim, dtype, causal=causal, implementation=implementation)

    rows: list[dict[str, Value]] = []
    for implementation, head_dim in product(implementations, head_dims):
        rising = sorted(contexts)
        for shorter, context in zip([None, *rising], rising, strict=False):
            found = memory(implementation, context, head_dim)
            row: dict[str, Value] = {"implementation": implementation, "head_dim": head_dim, "context": context}
            row |= {"held_gib": found.held / GIB, "peak_gib": found.peak / GIB, "fits": found.peak <= capacity_bytes}
            if shorter is not None:
                held_ratio = found.held / memory(implementation, shorter, head_dim).held
                row |= {"context_ratio": context / shorter, "held_ratio": held_ratio}
            rows.append(row)
    columns = (
        Column("implementation", "implementation"),
        Column("head_dim", "head dim"),
        Column("context", "context"),
        Column("held_gib", "held before backward", "gib"),
        Column("context_ratio", "context grows", "ratio"),
        Column("held_ratio", "held memory grows", "ratio"),
        Column("peak_gib", "peak", "gib"),
        Column("fits", f"fits {capacity_bytes / GIB:g} GiB"),
    )
    title = f"Attention alone: batch {batch}, {dtype}, {'causal' if causal else 'full'}"
    notes = (
        "Held memory grows towards the square of the context for eager, because the probabilities do, and with the "
        "context itself for FlashAttention, which computes them again.",
    )
    tables = [Table("attention", title, columns, rows, notes)]
    for implementation in implementations:
        peaks = {
            (context, head_dim): memory(implementation, context, head_dim).peak
            for context, head_dim in product(_doubled(contexts), head_dims)
        }
        # The shape with the least memory over the capacity.
        _, context, head_dim = min((peak, *shape) for shape, peak in peaks.items() if peak > capacity_bytes)
        where = "in the grid" if context <= max(contexts) else "beyond the grid"
        answers = attention_answers(batch, context, head_dim, dtype, causal=causal, implementation=implementation)
        shape = f"context {context}, head dim {head_dim}, {where}"
        title = f"Smallest shape that does not fit with {implementation} attention: {shape}"
        tables.append(answers_table(f"{implementation}_out_of_memory", title, answers))
    return tables


def _doubled(contexts: Sequence[int]) -> list[int]:
    """The contexts, and beyond them ones twice as long as those before, until no memory holds what they need."""
    tried = sorted(contexts)
    while tried[-1] < _LONGEST_CONTEXT:
        tried.append(2 * tried[-1])
    return tried


def checkpointing_tables(
    size: ModelSize, precision: str, attention: str, strategies: Sequence[str], mode: str = "train"
) -> list[Table]:
    """The strategies' formulas, and the predicted peak and the recomputed FLOPs of each."""
    rows: list[dict[str, Value]] = []
    step = model_flops(size)
    for strategy in strategies:
        peak = predicted_peak(size, precision, mode, attention, strategy)
        # Parts of blocks are no number of blocks.
        repeated = None if strategy in SUBLAYERS else recomputed_blocks(size.num_layers, strategy)[0]
        rows.append(
            {
                "checkpointing": strategy,
                "activations_gib": peak.activations_gib,
                "peak_gib": peak.total_gib,
                "moment": peak.moment,
                "recomputed_blocks": repeated,
                "recomputed_percent": 100 * recomputed_flops(size, strategy) / step,
            }
        )
    columns = (
        Column("checkpointing", "checkpointing"),
        Column("activations_gib", "activations at the peak", "gib"),
        Column("peak_gib", "predicted peak", "gib"),
        Column("moment", "moment of the peak"),
        Column("recomputed_blocks", "blocks computed again", "count"),
        Column("recomputed_percent", "more FLOPs", "percent"),
    )
    title = f"{_shape(size)}, {precision}, {attention} attention"
    notes = (
        "Eager mode: the most memory in use at one moment, including parameters, gradients and AdamW's moments "
        f"({mode}).",
    )
    return [
        answers_table("rules", f"Checkpointing: {title}", checkpointing_answers(size, precision, attention)),
        Table("strategies", f"Strategies: {title}", columns, rows, notes),
    ]


def compared_groups(size: ModelSize, precision: str, attention: str, mode: str) -> list[str]:
    """No checkpoints, the group of blocks with the least memory and its neighbours, and the other kinds."""
    best = best_group_size(size, precision, mode, attention).best
    groups = [group for group in (best - 1, best, best + 1) if 1 <= group <= size.num_layers]
    around = ["block" if group == 1 else f"every={group}" for group in groups]
    return list(dict.fromkeys(["none", "block", *around, "every=4", "every=8", "sublayer", "nested"]))
