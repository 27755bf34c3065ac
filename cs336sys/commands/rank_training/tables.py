"""Tables that ``ddp`` and ``shard`` share: steps, phases, exposed communication and plans of several ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cs336sys.accounting import communication
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import Interval, difference, ratio
from cs336sys.settings.parallel import CONTEXT_STRATEGIES, DATA_PARALLEL_STRATEGIES, ParallelWorkload, bucket_name
from cs336sys.tables import titles
from cs336sys.tables.numbers import format_value
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.table import Column, Table, named_columns

STEADIER = "more --steps, fewer ranks than cores"
_PHASES = ("forward", "backward", "synchronize", "optimizer")


def exposure_columns(samples: Mapping[str, Samples], derived: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the columns of exposed and hidden communication."""
    medians_ms = {name: series.median for name, series in samples.items()}
    return communication.exposed_communication(medians_ms, running_ms(derived))


def running_ms(derived: Mapping[str, Any]) -> float | None:
    """Return how long communication ran in the profiled step of a cell."""
    return (derived.get("timeline") or {}).get("communication_ms")


def parallel_step_table(
    command: str,
    heading: str,
    cells: Sequence[Cell],
    run: Run | None,
    columns: Sequence[Column],
    rows: Sequence[dict[str, Any]],
    notes: Sequence[str],
    steadier: str,  # Options of the command by which measurements become less noisy.
) -> Table:
    """Build the first table of ``ddp`` or ``shard``: its own ``columns``, and those that both have."""
    all_columns = (
        *titles.SIZE_COLUMNS,
        *columns,
        *titles.RATE_COLUMNS,
        *named_columns("largest_difference", relative_difference_percent="relative"),
        *titles.GRAPH_COLUMNS,
        Column("status", "status"),
    )
    all_notes = (*notes, *_check_notes(cells), *titles.method_notes(cells), *titles.notes_of_run(cells, run))
    return Table(command, heading, all_columns, rows, all_notes, steadier)


def step_rows(cells: Sequence[Cell], baseline: str, compared: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row for each cell; speed-ups are over ``baseline`` with the same settings but those ``compared``."""
    # Without the note on a lacking baseline: it names --baseline, an option that ddp and shard do not have.
    baselines, _ = titles.find_baselines(cells, "strategy", baseline, ignore=compared)
    rows = []
    for cell, baseline_cell in zip(cells, baselines, strict=True):
        workload = ParallelWorkload.from_configuration(cell.configuration)
        row = cell.configuration | {"parameters": workload.training.parameters}
        row |= cell.derived | {"status": cell.status, "running_ms": running_ms(cell.derived)}
        row |= {f"{name}_ms": samples for name, samples in cell.samples.items()}
        if cell.status == "ok" and baseline_cell is not None:
            row["speedup"] = ratio(baseline_cell.samples["step"], cell.samples["step"])
        rows.append(row | exposure(cell))
    return rows


def exposure(cell: Cell) -> dict[str, Interval]:
    """Return intervals, by column, of communication that the step waits for or that computing hides, if timed."""
    if "unsynchronized" not in cell.samples:
        return {}
    step_ms = cell.samples["step"].median
    exposed_ms = difference(cell.samples["step"], cell.samples["unsynchronized"])
    # Communication cannot make computing cheaper, so a negative estimate is noise, unless ranks share the optimizer.
    is_cost = cell.configuration["strategy"] in (*DATA_PARALLEL_STRATEGIES, *CONTEXT_STRATEGIES)
    if exposed_ms.estimate < 0 and is_cost:
        # That end is noise alone, which may as well have the other sign: so much could be exposed.
        exposed_ms = replace(exposed_ms, high=max(exposed_ms.high, -exposed_ms.low))
    exposed_ms = replace(exposed_ms, is_cost=is_cost)
    low, high, estimate = (100 * ms / step_ms for ms in (exposed_ms.low, exposed_ms.high, exposed_ms.estimate))
    exposed_percent = Interval(estimate, low, high, neutral=0.0, is_cost=is_cost)
    intervals = {"exposed_ms": exposed_ms, "exposed_percent": exposed_percent}
    hidden_percent = exposure_columns(cell.samples, cell.derived)["hidden_percent"]
    if hidden_percent is not None:
        # Communication takes so long alone, or in the profiled step: no more than the shorter can be hidden.
        hideable_ms = min(cell.samples["communication"].median, running_ms(cell.derived) or math.inf)
        # The low end of what is exposed is the high end of what is hidden.
        most, least = (min(max(100 * (1 - ms / hideable_ms), 0.0), 100.0) for ms in (exposed_ms.low, exposed_ms.high))
        intervals["hidden_percent"] = Interval(hidden_percent, least, most, is_range=exposed_ms.is_noise)
    return intervals


def _check_notes(cells: Sequence[Cell]) -> list[str]:
    """Name the models that were checked with fewer layers."""
    notes = []
    for cell in cells:
        size, layers = cell.configuration["size"], cell.configuration["num_layers"]
        checked = cell.derived.get("checked_layers", layers)
        if checked != layers:
            why = "as asked" if checked == cell.configuration.get("check_layers") else "for want of memory"
            notes.append(f"{size}: weights compared with {checked} of {layers} layers, {why}")
    return list(dict.fromkeys(notes))


def parallel_phase_table(rows: Sequence[dict[str, Any]], identity: tuple[Column, ...], torch_averaging: str) -> Table:
    """Build the table of the phases of measured steps.

    Args:
        rows: of :func:`step_rows`; those of cells that were not measured are left out.
        identity: the columns that tell cells apart.
        torch_averaging: of a note on what averages gradients in the backward pass: "torch's DDP does".
    """
    measured = [row for row in rows if row["status"] == "ok"]
    columns = (
        *identity,
        *(Column(f"{phase}_ms", phase, "ms", spread="samples") for phase in _PHASES),
        titles.WALL_COLUMN,
        Column("overlap_percent", "communication overlapped", "percent"),
    )
    notes = (
        "synchronize: from the end of the backward pass until gradients are averaged; "
        f"{torch_averaging} it in the backward pass",
        "communication overlapped: share of the communication's time during which kernels computed, in one profiled "
        "step of rank 0",
    )
    hidden = titles.redundant_wall_column(row["step_ms"] for row in measured)
    return Table("phases", "phases of the step", columns, measured, notes, STEADIER, hidden)


def parallel_plan(
    heading: str,
    workloads: Sequence[ParallelWorkload],
    settings: Mapping[str, Column],
    columns: Sequence[Column],
    predict: Callable[[ParallelWorkload], dict[str, Any]],
) -> Table:
    """Build the table of ``--dry-run`` of several ranks; ``predict`` gives what is predicted of our models alone."""
    trainings = [workload.training for workload in workloads]
    rows = [
        workload.configuration()
        | {"parameters": workload.training.parameters, "share": workload.sequences_per_rank}
        | {"tokens": workload.share_size.context}  # Of each sequence: the longest slice where ranks split them.
        | (predict(workload) if workload.training.is_ours else {})
        for workload in workloads
    ]
    columns = (*titles.SIZE_COLUMNS, *titles.plan_settings(trainings, settings), *columns)
    return Table("plan", f"{heading} (nothing was run)", columns, rows, titles.unknown_memory(trainings))


PARALLEL_SETTING_COLUMNS = titles.columns_of(ParallelWorkload, "mode", "mesh", "checkpointing", "keep_gathered")

# Heights of the lanes' middles, and colors. Bars are 0.7 high, so the upper lane ends at 1.35, below the phases' names.
_LANES = {"compute": (1, "C0"), "communicate": (0, "C1")}
_PHASE_SHADES = {"step": "0.97", "forward": "0.97", "backward": "0.90", "synchronize": "#fbe9e7", "optimizer": "0.97"}
_NARROWEST_LABEL = 0.1  # Phases shorter than this part of the step are shaded without their name.


def plot_timelines(cells: Sequence[Cell], path: Path) -> None:
    """Draw two lanes over one step of rank 0 for each measured cell: kernels (on a CPU: operators) and communication.

    Phases are shaded; where communication runs under the backward pass it is hidden.
    """
    drawn = [cell for cell in cells if cell.status == "ok" and cell.derived["timeline"] is not None]
    count = max(1, len(drawn))  # An empty picture has axes, too.
    figure, axes = new_axes(width=11, height=0.9 + 1.15 * count, rows=count, sharex=True)
    settings = titles.shown_settings(cells, PARALLEL_SETTING_COLUMNS)
    for drawing, cell in zip(axes.flat, drawn, strict=False):
        _draw_timeline(drawing, cell.derived["timeline"])
        drawing.set_title(_heading(cell, settings), fontsize=8, loc="left", pad=2)
    axes[-1, 0].set_xlabel("ms from the first kernel of one profiled step (rank 0)")
    write_figure(figure, path)


def _draw_timeline(axes: Axes, timeline: dict[str, Any]) -> None:
    """Shade the phases, and draw a bar for each piece of a lane."""
    start_ms, total_ms = 0.0, max(timeline["phases"].values())
    for phase, end_ms in timeline["phases"].items():
        axes.axvspan(start_ms, end_ms, color=_PHASE_SHADES[phase], zorder=0)
        if end_ms - start_ms > _NARROWEST_LABEL * total_ms:
            axes.text((start_ms + end_ms) / 2, 1.52, phase, fontsize=6, ha="center", va="bottom", clip_on=True)
        start_ms = end_ms
    for lane, (height, color) in _LANES.items():
        bars = [(begin, end - begin) for begin, end in timeline[lane]]
        axes.broken_barh(bars, (height - 0.35, 0.7), color=color, linewidth=0)
    axes.set_yticks([height for height, _ in _LANES.values()], list(_LANES), fontsize=7)
    axes.set_ylim(-0.5, 1.9)  # From below the lower lane to above the names, which stand at 1.52.
    axes.tick_params(axis="x", labelsize=7)


def _heading(cell: Cell, settings: dict[str, Any]) -> str:
    """Name a cell, and say how much of its communication is overlapped and exposed."""
    configuration, timeline = cell.configuration, cell.derived["timeline"]
    bucket_mb, prefetch = configuration.get("bucket_mb"), configuration.get("prefetch")  # Of ddp, and of FSDP.
    buckets = [] if bucket_mb is None else [bucket_name(bucket_mb)]
    ahead = [] if prefetch is None else [f"prefetch {prefetch}"]
    setting_values = (f"{configuration[name]}" for name in ("size", *settings))
    label_parts = [configuration["strategy"], *buckets, *ahead, *setting_values]
    exposed = exposure(cell).get("exposed_ms")
    return (
        f"{' '.join(label_parts)}: communication {timeline['communication_ms']:.1f} ms, of which "
        f"{timeline['overlap_ms']:.1f} ms overlapped with computing; exposed {format_value(exposed, 'ms')} ms "
        f"of a {cell.samples['step'].median:.1f} ms step"
    )
