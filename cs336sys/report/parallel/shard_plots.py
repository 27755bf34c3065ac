"""The picture of ``shard``: what a rank's memory holds at four moments, with what was predicted beside."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.step import MOMENTS, RankMemory
from cs336sys.report.outputs import legend_columns, write_figure
from cs336sys.report.parallel.shard import COMPONENTS, SHARDING_SETTING_COLUMNS, memory_of
from cs336sys.report.tables import Column
from cs336sys.report.titles import shown_settings
from cs336sys.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"parameters": "#4c72b0", "gradients": "#c44e52", "optimizer_state": "#8172b3", "rest": "#55a868"}

# More beside each other cannot be read on a page.
_AXES_IN_A_ROW = 6

# Of the distance between moments: a measured and a predicted bar, and where they stand.
_WIDTH = 0.4
_OFFSETS = {"measured": -_WIDTH / 2, "predicted": _WIDTH / 2}


def plot_memory(cells: Sequence[Cell], path: Path) -> None:
    """Axes for each measured cell: a bar of components for each moment, and the predicted one beside it in outline."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [cell for cell in cells if cell.status == "ok" and cell.derived["memory"]]
    count = max(1, len(drawn))
    columns = min(count, _AXES_IN_A_ROW)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    settings = shown_settings(cells, {"size": Column("size", "size"), **SHARDING_SETTING_COLUMNS})
    for drawing, cell in zip(axes, drawn, strict=False):
        for source, moments in memory_of(cell).items():
            _draw_bars(drawing, moments, source)
        drawing.set_xticks(range(len(MOMENTS)), MOMENTS, rotation=35, ha="right", fontsize=7)
        drawing.set_title(_heading(cell, list(settings)), fontsize=8)
        drawing.grid(axis="y", alpha=0.3)
    for drawing in axes[::columns]:
        drawing.set_ylabel("memory of the fullest rank, GiB")
    for drawing in axes[count:]:
        drawing.set_visible(False)
    handles = [Patch(color=_COLORS[name], label=header) for name, header in COMPONENTS.items()]
    handles.append(Patch(facecolor="none", edgecolor="black", linewidth=0.7, label="predicted"))
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), legend_columns(figure)), fontsize=7
    )
    write_figure(figure, path)


def _draw_bars(drawing: "Axes", moments: Sequence[RankMemory], source: str) -> None:
    for held in moments:
        bottom = 0.0
        for name, color in _COLORS.items():
            height = getattr(held, name) / GIB
            fill = color if source == "measured" else "none"
            middle = MOMENTS.index(held.moment) + _OFFSETS[source]
            drawing.bar(middle, height, _WIDTH * 0.92, bottom, linewidth=0.8, facecolor=fill, edgecolor=color)
            bottom += height


def _heading(cell: Cell, settings: Sequence[str]) -> str:
    configuration = cell.configuration
    ahead = [] if configuration["prefetch"] is None else [f"prefetch {configuration['prefetch']}"]
    return ", ".join([configuration["strategy"], *ahead, *(str(configuration[name]) for name in settings)])
