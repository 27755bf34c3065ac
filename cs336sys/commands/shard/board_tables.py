"""The tables of ``shard --board``: the step as on the leaderboard, where its time went, and what it learns.

See ``docs/board.md``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336sys.accounting.sharding.selective_checkpointing import kept_peak, kept_step
from cs336sys.commands.rank_training.tables import parallel_phase_table, plot_timelines, scaling_picture, with_scaling
from cs336sys.commands.shard.tables import SHARDING_SETTING_COLUMNS, STRATEGY_COLUMNS, plot_memory, shard_tables
from cs336sys.results.model import Cell, Run
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, measured_cells, of_run, picture_of_measured
from cs336sys.tables.sentences import sentences
from cs336sys.tables.table import Column, Table, by_key, named_columns
from cs336sys.tables.titles import SIZE_COLUMNS, method_notes, shown_settings, title

_SETTING_COLUMNS = SHARDING_SETTING_COLUMNS | by_key(*STRATEGY_COLUMNS)
_ALWAYS_SHOWN = ("world_size", "checkpointing", "state_dtype")

_SHARES = {
    "products": "products",
    "attention": "attention",
    "other": "other kernels",
    "communication": "communication not hidden",
    "idle": "idle",
}


def is_of_board(cell: Cell) -> bool:
    """Return whether it was measured by ``shard --board``."""
    return bool(cell.configuration.get("board"))


def sharding_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the tables of ``shard``, with ``--board`` and without."""
    board_cells = [cell for cell in cells if is_of_board(cell)]
    other_cells = [cell for cell in cells if not is_of_board(cell)]
    return [*shard_tables(other_cells, run), *board_tables(board_cells, run)]


def board_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build tables of steps, their phases, where the time of one went, its longest kernels, and the losses."""
    shown = shown_settings(cells, _SETTING_COLUMNS, _ALWAYS_SHOWN)
    setting_columns = tuple(shown.values())
    identity = (Column("size", "size"), *setting_columns)
    rows = [_board_row(cell) for cell in cells]
    measured = [cell for cell in cells if cell.status == "ok"]
    notes = sentences(__name__, "board", measured=[cell.derived for cell in measured])
    heading = title("shard --board", cells, run, _SETTING_COLUMNS, shown)
    columns = (
        *SIZE_COLUMNS,
        *setting_columns,
        *named_columns(wall_ms="step", spread="samples"),
        *named_columns("median_ms", tokens_per_s="tokens/s", mfu_percent="MFU", hfu_percent="with recomputation"),
        *named_columns(peaks="peak of each GPU, GiB", predicted_gib="predicted peak", ready_s="ready"),
        *named_columns(relative_difference_percent="gradients off", status="status"),
    )
    return [
        Table("board", heading, columns, rows, (*notes, *method_notes(cells))),
        # Of its note on averaging gradients: "torch's strategies do it in the backward pass".
        parallel_phase_table(rows, identity, torch_averaging="torch's strategies do"),
        _shares_table(measured, setting_columns),
        _kernels_table(measured, setting_columns),
        _losses_table(measured, setting_columns),
    ]


def _board_row(cell: Cell) -> dict[str, Any]:
    """Return a cell's settings and results, with its predicted peak."""
    workload = ParallelWorkload.from_configuration(cell.configuration)
    row = cell.configuration | cell.derived | {"status": cell.status}
    row |= {f"{name}_ms": samples for name, samples in cell.samples.items()}
    if cell.status == "ok":
        # Formulas are of blocks with a backward pass of their own, not of torch's selective checkpoints.
        predicted_gib = kept_peak(kept_step(workload)).total_gib if workload.has_own_block_backward else None
        row |= {"median_ms": cell.samples["wall"].median, "predicted_gib": predicted_gib}
        row["peaks"] = ", ".join(f"{peak:.1f}" for peak in cell.derived["peaks_gib"] if peak is not None) or None
    # Shares and losses have tables of their own; reserved memory is in the file alone.
    return {name: value for name, value in row.items() if name not in ("shares", "peaks_gib", "reserved_gib", "losses")}


def _shares_table(cells: Sequence[Cell], setting_columns: tuple[Column, ...]) -> Table:
    """Build the table of how long each kind of work took in a profiled step; a cell without a profile has no rows."""
    rows = []
    for cell in cells:
        shares = cell.derived["shares"] or {}
        part_ms = {label: shares.get(f"{name}_ms", 0.0) for name, label in _SHARES.items()}
        total_ms = sum(part_ms.values())
        rows += [
            cell.configuration | {"part": label, "time_ms": ms, "share_percent": 100 * ms / total_ms}
            for label, ms in part_ms.items()
            if total_ms
        ]
    columns = (*setting_columns, *named_columns("part", "time_ms", "share_percent"))
    notes = sentences(__name__, "shares")
    return Table("shares", "where the time of a step went", columns, rows, notes)


def _kernels_table(cells: Sequence[Cell], setting_columns: tuple[Column, ...]) -> Table:
    """Build the table of a profiled step's longest kernels; a cell without a profile has no rows."""
    columns = (Column("kernel", "kernel"), Column("time_ms", "time", "ms"), Column("launches", "launches", "count"))
    keys = [column.key for column in columns]
    # ``shares``: None without a profile, else ms by kind of work, and the longest kernels as lists of these values.
    rows = [
        cell.configuration | dict(zip(keys, kernel, strict=True))
        for cell in cells
        for kernel in (cell.derived["shares"] or {"kernels": []})["kernels"]
    ]
    return Table("kernels", "kernels that took most time", (*setting_columns, *columns), rows)


def _losses_table(cells: Sequence[Cell], setting_columns: tuple[Column, ...]) -> Table:
    rows = [
        cell.configuration | {"number": number, "loss": loss}
        for cell in cells
        for number, loss in enumerate(cell.derived.get("losses", ()), 1)
    ]
    columns = (*setting_columns, Column("number", "step", "count"), Column("loss", "loss", "nats"))
    notes = sentences(__name__, "losses")
    return Table("losses", "loss of every step", columns, rows, notes)


def _shard_pictures(cells: Sequence[Cell], run: Run | None, options: Presentation) -> Pictures:
    of_ranks = [cell for cell in cells if not is_of_board(cell)]
    memory = picture_of_measured("memory", plot_memory)(of_ranks, run, options)
    gathering = [cell for cell in measured_cells(of_ranks) if cell.derived.get("gathers")]
    timelines = {"timelines": partial(plot_timelines, gathering)} if gathering else {}
    return {**memory, **timelines, **scaling_picture(cells)}


SAVED = SavedCommand(of_run(with_scaling(sharding_tables)), _shard_pictures)
