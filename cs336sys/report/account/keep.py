"""The tables of ``account keep``: what a rank holds and computes again, by how many blocks keep gate and up."""

from collections.abc import Sequence
from dataclasses import replace

from cs336sys.accounting.derivation import Derived, symbol
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.kept_parts import KeptStep, fitting_blocks, flops_again, kept_peak
from cs336sys.report.account.answers import answers_table
from cs336sys.report.numbers import Value
from cs336sys.report.tables import Column, Table
from cs336sys.report.titles import SIZE_COLUMNS

# Rows between none and all.
_ROWS = 4

_COLUMNS = (
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
    tables = [Table("keep", f"Keeping gate and up within {limit} a rank", _COLUMNS, rows, notes)]
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
