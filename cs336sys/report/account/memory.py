"""The tables of ``account memory``: parts on the fullest rank, and where they come from."""

from collections.abc import Sequence
from dataclasses import replace

from cs336sys.accounting.derivation import Derived, symbol
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.sharding.ideal import state_answers
from cs336sys.accounting.sharding.selective_checkpointing import KeptStep, fitting_blocks, flops_again, kept_peak
from cs336sys.accounting.sharding.step import ShardedStep, fullest_state, rank_peak
from cs336sys.report.account.answers import answers_table
from cs336sys.report.numbers import Value
from cs336sys.report.table import Column, Table
from cs336sys.report.titles import SIZE_COLUMNS
from cs336sys.sizes import ELEMENT_BYTES

_COLUMNS = (
    Column("size", "size"),
    Column("parameters", "parameters", "parameters"),
    Column("context", "context"),
    Column("precision", "precision"),
    Column("mode", "mode"),
    Column("world_size", "ranks"),
    Column("strategy", "strategy"),
    Column("parameters_gib", "parameters", "gib"),
    Column("gradients_gib", "gradients", "gib"),
    Column("optimizer_state_gib", "optimizer state", "gib"),
    Column("master_parameters_gib", "master parameters", "gib"),
    Column("after_initialization_gib", "after initialization", "gib"),
    Column("before_first_step_gib", "before first step", "gib"),
    Column("first_peak_gib", "most until then", "gib"),
    Column("after_first_step_gib", "after first step", "gib"),
    Column("activations_gib", "activations and buffers at the peak", "gib"),
    Column("peak_gib", "peak of later steps", "gib"),
    Column("moment", "moment of the peak"),
)


def rank_memory_tables(steps: Sequence[ShardedStep]) -> list[Table]:
    """Parts, the handout's three times and the peak; then the derivation for each size and number of ranks."""
    notes = [
        "The fullest rank, eager mode; the batch is shared out equally. Forward alone makes no gradients and needs no "
        "optimizer.",
    ]
    if any(step.strategy in ("optimizer-flat", "fsdp") for step in steps):
        notes.append(
            "Buffers are gathered weights (fsdp: an upper bound) and whole gradients on their way (optimizer-flat, "
            "fsdp). In half precision fsdp computes without autocast."
        )
    title = f"Memory of a rank: {', '.join(dict.fromkeys(_batch_words(step) for step in steps))}"
    tables = [Table("memory", title, _COLUMNS, [_row(step) for step in steps], notes)]
    groups: dict[tuple, dict[str, ShardedStep]] = {}
    for step in steps:
        if step.mode == "train":
            # Activations, and so context, precision and attention, are no part of the state.
            key = (step.size.name, step.world_size, step.parameter_bytes)
            groups.setdefault(key, {}).setdefault(step.strategy, step)
    return [*tables, *(_state_table(list(of_group.values())) for of_group in groups.values())]


def _state_table(steps: Sequence[ShardedStep]) -> Table:
    """Ideal shares of one model on one number of ranks, strategy by strategy."""
    first = steps[0]
    answers = [
        answer
        for step in steps
        for answer in state_answers(
            step.size,
            step.world_size,
            step.strategy,
            element_bytes=step.parameter_bytes,
            compute_bytes=ELEMENT_BYTES[step.precision],
        )
    ]
    ranks = f"{first.world_size} rank{'s' * (first.world_size != 1)}"
    return answers_table("state", f"Ideal shares of training state: {first.size.name}, {ranks}", answers, _STATE_NOTES)


_STATE_NOTES = (
    "Ideal shares: optimizer-state sharding gives whole parameters to ranks, and fsdp cuts matrices by rows and keeps "
    "norms whole, so the fullest rank, in the table above, can hold slightly more.",
)


def _batch_words(step: ShardedStep) -> str:
    return f"batch {step.size.batch_size}, {step.attention} attention"


def _row(step: ShardedStep) -> dict:
    state, peak, size = fullest_state(step), rank_peak(step), step.size
    row = {
        "size": size.name,
        "parameters": count_parameters(size),
        "context": size.context,
        "precision": step.precision,
        "mode": step.mode,
        "world_size": step.world_size,
        "strategy": step.strategy,
        "parameters_gib": state.parameters / GIB,
        "activations_gib": peak.activations_gib,
        "peak_gib": peak.total_gib,
        "moment": peak.moment,
    }
    if state.master_parameters:
        row["master_parameters_gib"] = state.master_parameters / GIB
    if step.mode != "forward":
        row["gradients_gib"] = state.gradients / GIB
    if step.mode == "train":
        # Optimizers make their state in the first step, but master parameters at once.
        model = state.parameters + state.master_parameters
        row |= {
            "optimizer_state_gib": state.optimizer_state / GIB,
            "after_initialization_gib": model / GIB,
            "before_first_step_gib": (model + state.gradients) / GIB,
            "first_peak_gib": rank_peak(replace(step, mode="forward-backward")).total_gib,
            "after_first_step_gib": state.total / GIB,
        }
    return row


# The tables of ``account keep``: what a rank holds and computes again, by how many blocks keep gate and up.


# Rows between none and all.
_ROWS = 4

_KEEP_COLUMNS = (
    *SIZE_COLUMNS,
    Column("world_size", "ranks"),
    Column("state_dtype", "state"),
    Column("blocks", "blocks that keep gate and up"),
    Column("peak_gib", "peak of a rank", "gib"),
    Column("kept_gib", "of which blocks keep", "gib"),
    Column("state_gib", "and state", "gib"),
    Column("moment", "moment of the peak"),
    Column("tflop_again", "TFLOP again"),
    Column("again_percent", "of the model's", "percent"),
    Column("chosen", "chosen"),
)


def keep_tables(steps: Sequence[KeptStep], limit_bytes: float) -> list[Table]:
    """The choices for each step, with the one that ``--checkpoint auto`` takes, and the bytes of a block derived."""
    rows = [row for step in steps for row in _rows(step, limit_bytes)]
    limit = f"{limit_bytes / GIB:.4g} GiB"
    notes = [
        "a block keeps its input, query, key, value, attention's output and logsumexp, and the sum before its second "
        f"norm; chosen: most blocks within {limit}",
        "blocks in the backward pass that keep gate and up are the last ones; FLOPs of all ranks together",
    ]
    tables = [Table("keep", f"Keeping gate and up within {limit} a rank", _KEEP_COLUMNS, rows, notes)]
    of_sizes = {(step.size, step.world_size): step for step in steps}
    return [*tables, *(_block_table(step) for step in of_sizes.values())]


def _rows(step: KeptStep, limit_bytes: float) -> list[dict[str, Value]]:
    layers = step.size.num_layers
    chosen = fitting_blocks(step, limit_bytes)
    numbers = {round(part * layers / _ROWS) for part in range(_ROWS + 1)} | ({chosen} if chosen is not None else set())
    rows: list[dict[str, Value]] = []
    for blocks in sorted(numbers):
        one = replace(step, blocks=blocks)
        peak, again = kept_peak(one), flops_again(one)
        rows.append(
            {
                "size": step.size.name,
                "parameters": one.parameters,
                "world_size": step.world_size,
                "state_dtype": step.state_dtype,
                "blocks": blocks,
                "peak_gib": peak.total_gib,
                "kept_gib": one.kept_bytes / GIB,
                "state_gib": peak.parameters_gib + peak.gradients_gib + peak.optimizer_state_gib,
                "moment": peak.moment,
                "tflop_again": round(again / 1e12, 1),
                "again_percent": 100 * again / model_flops(step.size, backward=True),
                "chosen": "yes" if blocks == chosen else "",
            }
        )
    return rows


def _block_table(step: KeptStep) -> Table:
    size = step.share
    tokens = symbol("T", size.batch_size * size.context)
    width, inner, heads = symbol("d_model", size.d_model), symbol("d_ff", size.d_ff), symbol("H", size.num_heads)
    element = symbol("e", step.element_bytes)
    answers = [
        Derived(
            "kept by every block",
            6 * element * tokens * width + 4 * tokens * heads + 8 * tokens,
            "bytes",
            reason="Input, q, k, v, attention's output and the second norm's sum; logsumexp; both norms' factors.",
        ),
        Derived(
            "gate and up", 2 * element * tokens * inner, "bytes", reason="Kept in the last blocks, as room allows."
        ),
        Derived(
            "computing gate and up again",
            2 * 2 * tokens * width * inner,
            "FLOPs",
            reason="Two products, for each block that does not keep them, on each rank.",
        ),
    ]
    return answers_table("block", f"One block of {size.name} on one of {step.world_size} ranks", answers)
