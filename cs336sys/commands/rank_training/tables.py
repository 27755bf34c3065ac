"""Tables and pictures that ``ddp`` and ``shard`` share: steps, phases, exposed communication, plans, and scaling."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting import communication
from cs336sys.accounting.sharding.cells import memory_of
from cs336sys.results.model import Cell, Run, Samples, configuration_key
from cs336sys.results.statistics import Interval, difference, ratio
from cs336sys.settings.parallel import CONTEXT_STRATEGIES, DATA_PARALLEL_STRATEGIES, ParallelWorkload, bucket_name
from cs336sys.tables import titles
from cs336sys.tables.numbers import format_value
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.saved import Pictures, RunTableBuilder
from cs336sys.tables.table import Column, Table, by_key, named_columns

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
    check_notes: dict[str, None] = {}  # Keys of a dictionary: each sentence once, in order.
    for cell in cells:
        size, layers = cell.configuration["size"], cell.configuration["num_layers"]
        checked = cell.derived.get("checked_layers", layers)
        if checked != layers:
            why = "as asked" if checked == cell.configuration.get("check_layers") else "for want of memory"
            check_notes[f"{size}: weights compared with {checked} of {layers} layers, {why}"] = None
    all_notes = (*notes, *check_notes, *titles.method_notes(cells), *titles.notes_of_run(cells, run))
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


def label_parts(cell: Cell, settings: Iterable[str]) -> list[str]:
    """Return what tells a cell apart in pictures: its strategy with buckets or prefetch, its size, and ``settings``."""
    configuration = cell.configuration
    bucket_mb, prefetch = configuration.get("bucket_mb"), configuration.get("prefetch")  # Of ddp, and of FSDP.
    buckets = [] if bucket_mb is None else [bucket_name(bucket_mb)]
    ahead = [] if prefetch is None else [f"prefetch {prefetch}"]
    return [configuration["strategy"], *buckets, *ahead, *(f"{configuration[name]}" for name in ("size", *settings))]


def _heading(cell: Cell, settings: dict[str, Any]) -> str:
    """Name a cell, and say how much of its communication is overlapped and exposed."""
    timeline = cell.derived["timeline"]
    exposed = exposure(cell).get("exposed_ms")
    return (
        f"{' '.join(label_parts(cell, settings))}: communication {timeline['communication_ms']:.1f} ms, of which "
        f"{timeline['overlap_ms']:.1f} ms overlapped with computing; exposed {format_value(exposed, 'ms')} ms "
        f"of a {cell.samples['step'].median:.1f} ms step"
    )


_ALONG = ("world_size", "mesh", "trace")  # Settings that differ along a curve, or that no step depends on.

_SETTING_COLUMNS = titles.columns_of(ParallelWorkload, *_ALONG, "batch_size", "mode") | by_key(
    Column("prefetch", "prefetch"), Column("bucket_mb", "bucket, MB")
)


@dataclass(frozen=True)
class Curve:
    """Measured cells that are alike but for the number of ranks, the fewest first: others are compared with those."""

    scaling: str  # ``strong``: the batch stays the same; ``weak``: the sequences of a rank do.
    cells: tuple[Cell, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each cell, but on the fewest ranks with the rate of a rank in percent of that on these."""
        rows, first = [], self.cells[0]
        for cell in self.cells:
            row = cell.configuration | cell.derived | exposure(cell)
            row |= {"scaling": self.scaling, "step_ms": cell.samples["step"]}
            row |= {"peak_gib": _peak_gib(cell, "measured"), "predicted_peak_gib": _peak_gib(cell, "predicted")}
            if cell is not first:
                faster = ratio(first.samples["step"], cell.samples["step"])
                percent = 100 * _share(cell) / _share(first)  # A rank's rate is its share of the batch over the step.
                estimate, low, high = (percent * end for end in (faster.estimate, faster.low, faster.high))
                row["linear_percent"] = Interval(estimate, low, high, neutral=100.0)
            rows.append(row)
        return rows


def _share(cell: Cell) -> float:
    """Return the sequences of a rank."""
    return cell.configuration["batch_size"] / cell.configuration["world_size"]


def scaling_curves(cells: Sequence[Cell]) -> list[Curve]:
    """Return curves of at least two numbers of ranks; where a strategy lacks one rank, ``none`` on one rank will do."""
    measured = [cell for cell in cells if cell.status == "ok"]
    # Settings of a strategy change nothing on one rank.
    ignored_on_one_rank = (*_ALONG, "strategy", "prefetch", "keep_gathered", "bucket_mb")
    single_ranks = {
        configuration_key(cell.configuration, ignore=ignored_on_one_rank): cell
        for cell in measured
        if cell.configuration["world_size"] == 1 and cell.configuration["strategy"] == "none"
    }
    # By kind, the settings that all cells share, and the batch on one rank; a curve's cells by their number of ranks.
    curves: dict[tuple[str, str, float], dict[int, Cell]] = {}
    for cell in measured:
        configuration = cell.configuration
        # Each cell is on a curve of either kind: with its name, the settings that differ along it, and the batch on one
        # rank where it begins: the whole batch or the share of a rank.
        starts = (("strong", _ALONG, configuration["batch_size"]), ("weak", (*_ALONG, "batch_size"), _share(cell)))
        for scaling, ignored, batch in starts:
            curve = curves.setdefault((scaling, configuration_key(configuration, ignore=ignored), batch), {})
            one_rank = {**configuration, "batch_size": int(batch)}
            single_rank = single_ranks.get(configuration_key(one_rank, ignore=ignored_on_one_rank))
            if single_rank is not None and batch == int(batch):  # A share may be a fraction, which no rank has.
                curve.setdefault(1, single_rank)  # A cell of the strategy itself on one rank takes its place.
            curve[configuration["world_size"]] = cell
    return [
        Curve(scaling, tuple(curve[ranks] for ranks in sorted(curve)))
        for (scaling, *_), curve in sorted(curves.items(), key=lambda item: item[0][0])  # Strong before weak.
        if len(curve) > 1
    ]


def with_scaling(tables: RunTableBuilder) -> RunTableBuilder:
    """Return a function that builds these tables of cells, and those of :func:`scaling_tables`."""
    return lambda cells, run: [*tables(cells, run), *scaling_tables(cells)]


def scaling_tables(cells: Sequence[Cell]) -> list[Table]:
    """Build the table of the cells of every curve, if cells were measured on several numbers of ranks."""
    curves = scaling_curves(cells)
    rows = [row for curve in curves for row in curve.rows()]
    settings = titles.shown_settings([cell for curve in curves for cell in curve.cells], _SETTING_COLUMNS)
    columns = (
        *named_columns("scaling", "size"),
        *settings.values(),
        *named_columns("strategy", world_size="ranks", batch_size="batch"),
        *named_columns("step_ms", spread="samples"),
        *titles.RATE_COLUMNS,
        *named_columns(linear_percent="of linear", exposed_percent="exposed", spread="interval"),
        *named_columns("peak_gib", "predicted_peak_gib"),
    )
    notes = (
        "strong: the same batch on more ranks; weak: as many sequences a rank; of linear: the rate of a rank, of that "
        "on the fewest ranks",
    )
    return [Table("scaling", "speed and memory by ranks", columns, rows, notes, STEADIER)]


def _rate_column(cells: Sequence[Cell]) -> Column:
    """Return the column of tokens per second, or of examples where all cells have these."""
    has_examples = [cell.derived.get("examples_per_s") is not None for cell in cells if cell.status == "ok"]
    tokens, examples = titles.RATE_COLUMNS
    return examples if has_examples and all(has_examples) else tokens


def _peak_gib(cell: Cell, source: str) -> float | None:
    """Return the peak of a rank, ``measured`` or ``predicted``; on a CPU that of ``shard``'s timeline; None without."""
    peaks = [peak for peak in (cell.derived.get("peak_gib"), *cell.derived.get("peaks_gib", ())) if peak is not None]
    if source == "measured" and peaks:
        return max(peaks)
    moments = memory_of(cell)[source] if "memory" in cell.derived else []
    return next((moment.total_gib for moment in moments if moment.moment == "peak"), None)


def plot_scaling(cells: Sequence[Cell], path: Path, option: str = "--plot-scaling") -> None:
    """Draw tokens/s, exposed communication and a rank's memory over the ranks, for strong and for weak scaling."""
    curves = scaling_curves(cells)
    scalings = list(dict.fromkeys(curve.scaling for curve in curves)) or ["strong"]
    figure, axes = new_axes(width=12, height=0.6 + 3.4 * len(scalings), rows=len(scalings), columns=3)
    rate = _rate_column(cells)
    settings = titles.shown_settings([curve.cells[-1] for curve in curves], _SETTING_COLUMNS)
    for row, scaling in zip(axes, scalings, strict=True):
        drawn = [curve for curve in curves if curve.scaling == scaling]
        for curve in drawn:
            _draw_curve(row, curve, _curve_name(curve, list(settings)), rate.key)
        ranks = sorted({cell.configuration["world_size"] for curve in drawn for cell in curve.cells})
        for drawing, quantity in zip(row, (rate.header, "exposed, % of the step", "peak of a rank, GiB"), strict=True):
            drawing.set_xscale("log", base=2)
            drawing.set_xticks(ranks, [str(count) for count in ranks])
            drawing.minorticks_off()
            drawing.set(xlabel="ranks", ylabel=quantity)
            drawing.set_ylim(bottom=0)
            drawing.grid(alpha=0.3)
        rates, _, peaks = row
        rates.set_title(f"{scaling} scaling; dotted: linear", fontsize=9)
        if any(line.get_linestyle() == "--" for line in peaks.lines):
            peaks.set_title("dashed: predicted", fontsize=9)
        if drawn:
            rates.legend(fontsize=7)
    write_figure(figure, path, option)


def _curve_name(curve: Curve, settings: Sequence[str]) -> str:
    """Name a curve by its strategy, the settings that curves differ in, and its batch."""
    cell = curve.cells[-1]
    configuration = cell.configuration
    batch = f"batch {configuration['batch_size']}" if curve.scaling == "strong" else f"{_share(cell):g} a rank"
    values = {name: configuration[name] for name in settings if configuration.get(name) is not None}
    varied = (  # A number alone would say nothing.
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, int | float) else str(value)
        for name, value in values.items()
    )
    return ", ".join([configuration["strategy"], *varied, batch])


def _draw_curve(axes: Sequence[Axes], curve: Curve, name: str, rate: str) -> None:
    """Draw a curve into axes of rates, with its line of linear scaling, of exposed communication, and of peaks."""
    rates, exposed, peaks = axes
    rows = curve.rows()

    def points(key: str) -> tuple[list[int], list[Any]]:
        """Return the numbers of ranks of which a column is known, and its values."""
        drawn = [row for row in rows if row.get(key) is not None]
        return [row["world_size"] for row in drawn], [row[key] for row in drawn]

    ranks, per_s = points(rate)
    (line,) = rates.plot(ranks, per_s, marker="o", label=name)
    color = line.get_color()
    if ranks:
        rates.plot(ranks, [per_s[0] * count / ranks[0] for count in ranks], linestyle=":", color=color, alpha=0.6)
    ranks, percents = points("exposed_percent")
    estimates, lows, highs = (
        [max(getattr(percent, end), 0.0) for percent in percents] for end in ("estimate", "low", "high")
    )  # The axis begins at 0.
    errors = [list(map(operator.sub, estimates, lows)), list(map(operator.sub, highs, estimates))]  # Below, above.
    exposed.errorbar(ranks, estimates, errors, marker="o", capsize=3, color=color)
    for key, marker, line_style in (("peak_gib", "o", "-"), ("predicted_peak_gib", "_", "--")):
        ranks, peaks_gib = points(key)
        if ranks:
            peaks.plot(ranks, peaks_gib, marker=marker, linestyle=line_style, color=color)


def scaling_picture(cells: Sequence[Cell]) -> Pictures:
    return {"scaling": partial(plot_scaling, cells, option="--plot")} if scaling_curves(cells) else {}
