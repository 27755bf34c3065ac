"""The picture of ``bench``: how long each phase of a step takes, and what the compared settings gain."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.bench import speedup, speedup_pairs
from cs336sys.report.numbers import format_number
from cs336sys.report.outputs import write_figure
from cs336sys.report.rounds import ROUNDS_COLUMN
from cs336sys.report.titles import SETTING_COLUMNS, setting_of, shown_settings
from cs336sys.results import Cell
from cs336sys.workload import PHASES_OF_MODE, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"forward": "#4c72b0", "backward": "#c44e52", "optimizer": "#dd8452"}

# Settings of which each combination has axes of its own, as each size has: their times share no scale.
_APART = ("mode", "batch_size", "vocab_size", "context")

_INCHES_PER_BAR = 0.27
# Title, ticks and the distance to the next axes.
_INCHES_BETWEEN = 0.66

# Of an axis' length: room for the label of the longest bar.
_LABEL_ROOM = 0.22


def plot_bench(cells: Sequence[Cell], path: Path) -> None:
    """Axes for each model: a bar of phases for each way of training it, and beside it the step's speed-up."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings = shown_settings(cells, SETTING_COLUMNS | {"rounds": ROUNDS_COLUMN})
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_model(cell), []).append(cell)
    ways = [name for name in settings if name not in _APART] or ["precision", "compile"]
    _, pairs = speedup_pairs(cells, settings)
    baselines = {id(cell): baseline for cell, baseline in pairs}
    bars = [len(group) for group in groups.values()] or [1]
    figure = Figure(figsize=(10, 0.5 + sum(bars) * _INCHES_PER_BAR + len(bars) * _INCHES_BETWEEN), layout="constrained")
    axes = figure.subplots(len(bars), 2 if pairs else 1, squeeze=False, gridspec_kw={"height_ratios": bars})
    most = max((_speedup(*pair) for pair in pairs), default=1.0)
    for drawings, (model, group) in zip(axes, groups.items(), strict=False):
        drawings[0].set_title(model, fontsize=10, loc="left")
        _draw_times(drawings[0], group)
        drawings[0].set_yticks(range(len(group)), [_way(cell, ways) for cell in group], fontsize=8)
        if pairs:
            _draw_speedups(drawings[1], group, baselines, most)
            drawings[1].set_yticks([])
        for drawing in drawings:
            drawing.set_ylim(len(group) - 0.5, -0.5)
            drawing.grid(axis="x", alpha=0.3)
            drawing.set_axisbelow(True)
            drawing.tick_params(axis="x", labelsize=8)
            drawing.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("step, ms")
    if pairs:
        axes[-1][1].set_xlabel("speed-up of the step over the bar in outline")
    phases = [phase for phase in _COLORS if any(phase in cell.samples for cell in cells)]
    if phases:
        handles = [Patch(color=_COLORS[phase], label=phase) for phase in phases]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    write_figure(figure, path)


def _model(cell: Cell) -> str:
    workload = Workload.from_configuration(cell.configuration)
    size, parameters = workload.size, format_number(count_parameters(workload.size), "parameters")
    mode = [] if workload.mode == "train" else [workload.mode]
    return ", ".join([f"{size.name}, {parameters} parameters, batch {size.batch_size} x context {size.context}", *mode])


def _way(cell: Cell, ways: Sequence[str]) -> str:
    words = {"off": "eager", "block": "compiled by block", "model": "compiled whole"}
    values = [
        words[setting_of(cell, name)]
        if name == "compile"
        else f"{SETTING_COLUMNS[name].header} {setting_of(cell, name)}"
        if name in ("cuda_graph", "warmup")
        else str(setting_of(cell, name))
        for name in ways
    ]
    return ", ".join(values)


def _draw_times(drawing: "Axes", group: Sequence[Cell]) -> None:
    longest = 0.0
    for row, cell in enumerate(group):
        if cell.status != "ok":
            drawing.text(0, row, f" {cell.status}", fontsize=8, va="center", color="#c44e52")
            continue
        left = 0.0
        for phase in PHASES_OF_MODE[cell.configuration["mode"]]:
            mean = cell.samples[phase].mean
            drawing.barh(row, mean, 0.75, left, color=_COLORS[phase])
            left += mean
        drawing.text(left, row, f" {format_number(cell.samples['step'].mean, 'ms')} ms", fontsize=8, va="center")
        longest = max(longest, left)
    drawing.set_xlim(0, longest * (1 + _LABEL_ROOM) or 1)


def _draw_speedups(drawing: "Axes", group: Sequence[Cell], baselines: dict[int, Cell], most: float) -> None:
    first = {id(baseline) for baseline in baselines.values()}
    for row, cell in enumerate(group):
        if id(cell) in baselines:
            ratio = _speedup(cell, baselines[id(cell)])
            drawing.barh(row, ratio, 0.75, color="#8c8c8c")
            drawing.text(ratio, row, f" {ratio:.2f} x", fontsize=8, va="center")
        elif id(cell) in first:
            drawing.barh(row, 1.0, 0.75, facecolor="none", edgecolor="#8c8c8c", linewidth=0.8)
    drawing.axvline(1, color="black", linewidth=0.6)
    drawing.set_xlim(0, most * (1 + _LABEL_ROOM))


def _speedup(cell: Cell, baseline: Cell) -> float:
    return speedup(cell, baseline, "step").estimate
