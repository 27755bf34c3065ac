"""Pictures of ``ddp``: when a rank computed and communicated, and bucket sizes beside the model of their overhead."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.accounting.buckets import overhead_on_link_s
from cs336sys.report.numbers import format_value
from cs336sys.report.outputs import write_figure
from cs336sys.report.parallel.ddp import PARALLEL_SETTING_COLUMNS, bucket_sweeps, exposure, link_of
from cs336sys.report.titles import shown_settings
from cs336sys.results import Cell
from cs336sys.workload import bucket_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANES = {"compute": (1, "C0"), "communicate": (0, "C1")}
_PHASE_SHADES = {"forward": "0.97", "backward": "0.90", "synchronize": "#fbe9e7", "optimizer": "0.97"}

# Phases shorter than this part of the step are shaded without their name.
_NARROWEST_LABEL = 0.1

# Points of the model's curve.
_CURVE_POINTS = 60


def plot_timelines(cells: Sequence[Cell], path: Path) -> None:
    """For each measured cell, two lanes over one step of rank 0: kernels (on a CPU: operators) and communication.

    Phases are shaded; where communication runs under the backward pass it is hidden.
    """
    from matplotlib.figure import Figure

    drawn = [cell for cell in cells if cell.status == "ok" and cell.derived["timeline"] is not None]
    count = max(1, len(drawn))
    figure = Figure(figsize=(11, 0.9 + 1.15 * count), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    settings = shown_settings(cells, PARALLEL_SETTING_COLUMNS)
    for drawing, cell in zip(axes, drawn, strict=False):
        _draw_timeline(drawing, cell.derived["timeline"])
        drawing.set_title(_heading(cell, settings), fontsize=8, loc="left", pad=2)
    axes[-1].set_xlabel("ms from the first kernel of one profiled step (rank 0)")
    write_figure(figure, path)


def _draw_timeline(drawing: "Axes", timeline: dict[str, Any]) -> None:
    start, total = 0.0, max(timeline["phases"].values())
    for phase, end in timeline["phases"].items():
        drawing.axvspan(start, end, color=_PHASE_SHADES[phase], zorder=0)
        if end - start > _NARROWEST_LABEL * total:
            drawing.text((start + end) / 2, 1.52, phase, fontsize=6, ha="center", va="bottom", clip_on=True)
        start = end
    for lane, (height, color) in _LANES.items():
        bars = [(begin, end - begin) for begin, end in timeline[lane]]
        drawing.broken_barh(bars, (height - 0.35, 0.7), color=color, linewidth=0)
    drawing.set_yticks([height for height, _ in _LANES.values()], list(_LANES), fontsize=7)
    drawing.set_ylim(-0.5, 1.9)
    drawing.tick_params(axis="x", labelsize=7)


def _heading(cell: Cell, settings: dict[str, Any]) -> str:
    configuration, timeline = cell.configuration, cell.derived["timeline"]
    words = [configuration["strategy"]]
    # Of `ddp` and of FSDP.
    if configuration.get("bucket_mb") is not None:
        words.append(bucket_name(configuration["bucket_mb"]))
    if configuration.get("prefetch") is not None:
        words.append(f"prefetch {configuration['prefetch']}")
    words += [configuration["size"], *(f"{configuration[name]}" for name in settings)]
    exposed = exposure(cell).get("exposed_ms")
    return (
        f"{' '.join(words)}: communication {timeline['communication_ms']:.1f} ms, of which "
        f"{timeline['overlap_ms']:.1f} ms beside computing; exposed {format_value(exposed, 'ms')} ms "
        f"of a {cell.samples['step'].median:.1f} ms step"
    )


def plot_buckets(cells: Sequence[Cell], path: Path, option: str = "--plot-buckets") -> None:
    """Overhead over the mean size of a bucket: exposed time as points, the model as a curve; axes for each sweep."""
    from matplotlib.figure import Figure

    sweeps = bucket_sweeps(cells)
    count = max(1, len(sweeps))
    figure = Figure(figsize=(0.5 + 4.2 * count, 4), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    settings = shown_settings(cells, PARALLEL_SETTING_COLUMNS)
    for drawing, sweep in zip(axes, sweeps, strict=False):
        total, link = sweep[0].derived["communicated_bytes"], link_of(sweep[0])
        sizes = [total / cell.derived["gradient_calls"] for cell in sweep]
        smallest = min(sizes) / 4
        curve = [smallest * (total / smallest) ** (point / _CURVE_POINTS) for point in range(_CURVE_POINTS + 1)]
        predicted = [1e3 * overhead_on_link_s(total, size, link) for size in curve]
        drawing.plot([size / 1e6 for size in curve], predicted, color="C7", label="model: s / (n w) + n o")
        exposed = [cell.derived["exposed_ms"] for cell in sweep]
        drawing.plot([size / 1e6 for size in sizes], exposed, "o", color="C1", label="measured: exposed")
        for size, value, cell in zip(sizes, exposed, sweep, strict=True):
            label = bucket_name(cell.configuration["bucket_mb"])
            point = (size / 1e6, value)
            drawing.annotate(label, point, textcoords="offset points", xytext=(0, 6), ha="center", fontsize=7)
        drawing.set_xscale("log")
        # Half of the label of the largest bucket stands beside the curve's end, and a label is as high as this.
        drawing.margins(x=0.08, y=0.08)
        drawing.set_ylim(bottom=min(0.0, *exposed))
        drawing.set_xlabel("mean bucket, MB")
        drawing.set_ylabel("overhead, ms")
        configuration = sweep[0].configuration
        names = [configuration["size"], *(str(configuration[name]) for name in settings)]
        drawing.set_title(" ".join(names), fontsize=9)
        drawing.grid(alpha=0.3)
        drawing.legend(fontsize=7)
    write_figure(figure, path, option)
