"""The tables of ``shard``, built from its cells; columns and formulas are described in ``docs/columns.md``.

Those of ``shard --board``, at the end, show the step as on the leaderboard: see ``docs/board.md``.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.cells import memory_of, predicted_rank_memory, sharding_sent_bytes
from cs336sys.accounting.sharding.selective_checkpointing import kept_peak
from cs336sys.accounting.sharding.step import MOMENTS, RankMemory, sharded_step
from cs336sys.commands.rank_training import tables as of_steps
from cs336sys.results.model import Cell, Run, configuration_key
from cs336sys.results.statistics import ratio
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.tables.outputs import Axes, legend_columns, new_axes, write_figure
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, measured_cells, of_run, picture_of_measured
from cs336sys.tables.table import Column, Table, by_key, named_columns, sentences
from cs336sys.tables.titles import SIZE_COLUMNS, columns_of, method_notes, shown_settings, title

SHARDING_SETTING_COLUMNS = columns_of(ParallelWorkload, "mode", "gradient_dtype", "transport")
_ALWAYS_SHOWN = ("precision", "compile")
STRATEGY_COLUMNS = (Column("strategy", "strategy"), Column("prefetch", "prefetch", usual=(None,)))

# Settings by which the cells of one comparison differ.
_COMPARED = ("strategy", "prefetch", "keep_gathered", "trace")

COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "rest": "activations and buffers",
}


def shard_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the tables of steps and what they send, their phases, memory at six moments, and how late gathers were."""
    shown = shown_settings(cells, SHARDING_SETTING_COLUMNS, _ALWAYS_SHOWN)
    setting_columns = (*shown.values(), *STRATEGY_COLUMNS)
    rows = _step_rows(cells)
    measured = [cell for cell in cells if cell.status == "ok"]
    heading = title("shard", cells, run, SHARDING_SETTING_COLUMNS, shown)
    columns = (
        *setting_columns,
        *named_columns("step_ms", spread="samples"),
        *named_columns(speedup="over none", spread="interval"),
        Column("scaling", "over one rank", "ratio", spread="interval"),
        *named_columns(unsynchronized_ms="without communication", spread="samples"),
        *named_columns("exposed_ms", spread="interval"),
        *named_columns(bare_ms="communication not overlapped"),
        *named_columns(communication_ms="communication alone", spread="samples"),
        Column("calls", "calls", "count"),
        Column("sent_bytes", "sent", "decimal_bytes"),
        Column("predicted_sent_bytes", "predicted", "decimal_bytes"),
        *named_columns("peak_gib"),
    )
    step_notes = sentences(__name__, "steps") if measured else ()
    tables = [of_steps.parallel_step_table("shard", heading, cells, run, columns, rows, step_notes, of_steps.STEADIER)]
    identity = (Column("size", "size"), *setting_columns)
    # A note adds " it in the backward pass".
    tables.append(of_steps.parallel_phase_table(rows, identity, torch_averaging="torch's strategies do"))
    return [*tables, _memory_table(measured, identity), _gather_table(measured, identity)]


def _step_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row for each cell; ``scaling``: speed-up over one rank on that batch, by its strategy or ``none``."""

    def same_work(cell: Cell) -> str:
        return configuration_key(cell.configuration, ignore=(*_COMPARED, "world_size"))

    one_rank_samples = {
        (same_work(cell), cell.configuration["strategy"]): cell.samples["step"]
        for cell in cells
        if cell.configuration["world_size"] == 1 and cell.status == "ok"
    }
    rows = of_steps.step_rows(cells, baseline="none", compared=_COMPARED)
    for row, cell in zip(rows, cells, strict=True):
        if cell.status != "ok":
            continue
        if "model" not in cell.configuration:  # There are no formulas for a user's.
            row["predicted_sent_bytes"] = sharding_sent_bytes(ParallelWorkload.from_configuration(cell.configuration))
        strategies = (cell.configuration["strategy"], "none")
        of_strategy, of_none = (one_rank_samples.get((same_work(cell), strategy)) for strategy in strategies)
        base = of_strategy or of_none
        if base is not None and cell.configuration["world_size"] > 1:
            row["scaling"] = ratio(base, cell.samples["step"])
    return rows


def _memory_table(cells: Sequence[Cell], identity: tuple[Column, ...]) -> Table:
    columns = (
        *identity,
        *named_columns("moment", "source"),
        *(Column(f"{name}_gib", header, "gib") for name, header in COMPONENTS.items()),
        *named_columns("total_gib"),
    )
    # The allocator's history may have been too short to measure two steps.
    without_history = [cell.configuration["strategy"] for cell in cells if not memory_of(cell)["measured"]]
    rows = []
    for cell in cells:
        by_source = memory_of(cell)
        at_moments = [(source, memory) for source, memories in by_source.items() for memory in memories]
        for source, rank_memory in sorted(at_moments, key=lambda pair: MOMENTS.index(pair[1].moment)):
            parts = {f"{name}_gib": getattr(rank_memory, name) / GIB for name in COMPONENTS}
            row = {"moment": rank_memory.moment, "source": source, "total_gib": rank_memory.total_gib}
            rows.append(cell.configuration | row | parts)
    notes = sentences(__name__, "memory", without_history=without_history)
    return Table("memory", "memory of a rank", columns, rows, notes)


def _gather_table(cells: Sequence[Cell], identity: tuple[Column, ...]) -> Table:
    """Build the table of how late the weights of each unit arrived, in either pass."""
    rows, gathers_of_cells = [], []
    for cell in cells:
        late_ms = {(gather["unit"], gather["is_backward"]): gather["late_ms"] for gather in cell.derived["gathers"]}
        for unit in dict.fromkeys(unit for unit, _ in late_ms):
            forward_ms, backward_ms = late_ms.get((unit, False)), late_ms.get((unit, True))
            row = {"unit": unit, "forward_late_ms": forward_ms, "backward_late_ms": backward_ms}
            rows.append(cell.configuration | row)
        if late_ms:
            settings = {name: cell.configuration[name] for name in ("size", "prefetch")}
            # A negative time is how long weights were there before their use.
            in_time, waiting_ms = sum(ms <= 0 for ms in late_ms.values()), sum(max(ms, 0.0) for ms in late_ms.values())
            gathers_of_cells.append({**settings, "count": len(late_ms), "in_time": in_time, "waiting_ms": waiting_ms})
    columns = (
        *identity,
        *named_columns("unit", forward_late_ms="late in the forward pass"),
        *named_columns(backward_late_ms="late in the backward pass"),
    )
    notes = dict.fromkeys(sentences(__name__, "gathers", gathers_of_cells=gathers_of_cells))
    return Table("gathers", "gather end against use", columns, rows, tuple(notes))


def shard_plan(workloads: Sequence[ParallelWorkload]) -> Table:
    """Build the table of ``--dry-run``: each cell with what a rank is predicted to hold and to send."""
    moments = {moment: Column(f"{moment.replace(' ', '_')}_gib", moment, "gib") for moment in MOMENTS}
    columns = (
        *STRATEGY_COLUMNS,
        Column("share", "sequences a rank"),
        Column("tokens", "tokens of each", "count"),
        *moments.values(),
        Column("predicted_sent_bytes", "sent", "decimal_bytes"),
    )

    def predict(workload: ParallelWorkload) -> dict[str, Any]:
        memory = {moments[memory.moment].key: memory.total_gib for memory in predicted_rank_memory(workload)}
        return {"predicted_sent_bytes": sharding_sent_bytes(workload), **memory}

    heading = "shard: cells and the memory of a rank"
    return of_steps.parallel_plan(heading, workloads, SHARDING_SETTING_COLUMNS, columns, predict)


_COLORS = {"parameters": "#1f4e96", "gradients": "#c23b22", "optimizer_state": "#7fb2e5", "rest": "#00a35c"}

# Of the distance between moments: a measured and a predicted bar, and where they stand.
_BAR_WIDTH, _OFFSETS = 0.4, {"measured": -0.2, "predicted": 0.2}


def plot_memory(cells: Sequence[Cell], path: Path) -> None:
    """Draw axes for each measured cell: a bar of components for each moment, and the predicted one as an outline."""
    from matplotlib.patches import Patch

    drawn = [cell for cell in cells if cell.status == "ok" and cell.derived["memory"]]
    count = max(1, len(drawn))
    columns = min(count, 6)  # More axes in a row cannot be read on a page.
    rows = math.ceil(count / columns)
    figure, grid = new_axes(1 + 2.6 * columns, 4.6 * rows, rows, columns, sharey=True)
    axes = grid.flat
    settings = shown_settings(cells, SHARDING_SETTING_COLUMNS)
    for drawing, cell in zip(axes, drawn, strict=False):
        for source, moments in memory_of(cell).items():
            _draw_bars(drawing, moments, source)
        drawing.set_xticks(range(len(MOMENTS)), MOMENTS, rotation=35, ha="right", fontsize=7)
        drawing.set_title(", ".join(of_steps.label_parts(cell, settings)), fontsize=8)
        drawing.grid(axis="y", alpha=0.3)
    for drawing in axes[::columns]:
        drawing.set_ylabel("memory of the fullest rank, GiB")
    for drawing in axes[count:]:
        drawing.set_visible(False)
    handles = [Patch(color=_COLORS[name], label=header) for name, header in COMPONENTS.items()]
    handles.append(Patch(facecolor="none", edgecolor="black", linewidth=0.7, label="predicted"))
    ncols = min(len(handles), legend_columns(figure))
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols, fontsize=7)
    write_figure(figure, path)


def _draw_bars(drawing: Axes, moments: Sequence[RankMemory], source: str) -> None:
    """Stack the components of each moment, predicted ones as outlines, with a small gap between the two bars."""
    for moment in moments:
        x, bottom_gib = MOMENTS.index(moment.moment) + _OFFSETS[source], 0.0
        for name, color in _COLORS.items():
            height_gib = getattr(moment, name) / GIB
            fill = color if source == "measured" else "none"
            drawing.bar(x, height_gib, 0.92 * _BAR_WIDTH, bottom_gib, linewidth=0.8, facecolor=fill, edgecolor=color)
            bottom_gib += height_gib


_BOARD_SETTING_COLUMNS = SHARDING_SETTING_COLUMNS | by_key(*STRATEGY_COLUMNS)
_ALWAYS_SHOWN_OF_BOARD = ("world_size", "checkpointing", "state_dtype")

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
    shown = shown_settings(cells, _BOARD_SETTING_COLUMNS, _ALWAYS_SHOWN_OF_BOARD)
    setting_columns = tuple(shown.values())
    identity = (Column("size", "size"), *setting_columns)
    rows = [_board_row(cell) for cell in cells]
    measured = [cell for cell in cells if cell.status == "ok"]
    notes = sentences(__name__, "board", measured=[cell.derived for cell in measured])
    heading = title("shard --board", cells, run, _BOARD_SETTING_COLUMNS, shown)
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
        of_steps.parallel_phase_table(rows, identity, torch_averaging="torch's strategies do"),
        _shares_table(measured, setting_columns),
        _kernels_table(measured, setting_columns),
        _losses_table(measured, setting_columns),
    ]


def _board_row(cell: Cell) -> dict[str, Any]:
    workload = ParallelWorkload.from_configuration(cell.configuration)
    row = cell.configuration | cell.derived | {"status": cell.status}
    row |= {f"{name}_ms": samples for name, samples in cell.samples.items()}
    if cell.status == "ok":
        # Formulas are of blocks with a backward pass of their own, not of torch's selective checkpoints.
        predicted_gib = kept_peak(sharded_step(workload)).total_gib if workload.has_own_block_backward else None
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
    timelines = {"timelines": partial(of_steps.plot_timelines, gathering)} if gathering else {}
    return {**memory, **timelines, **of_steps.scaling_picture(cells)}


SAVED = SavedCommand(of_run(of_steps.with_scaling(sharding_tables)), _shard_pictures)
