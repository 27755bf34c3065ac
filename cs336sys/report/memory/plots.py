"""The active-memory timeline of a cell of ``memprof`` as a picture."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.report.numbers import format_number, in_shown_unit
from cs336sys.report.outputs import write_figure
from cs336sys.results.model import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What stays lies at the bottom.
CATEGORY_COLORS = {
    "parameters": "#4c72b0",
    "optimizer state": "#8172b3",
    "other": "#8c8c8c",
    "unknown": "#c7c7c7",
    "graph pools": "#937860",
    "gradients": "#c44e52",
    "activations": "#55a868",
    "temporary": "#dd8452",
}


# Characters of a phase's name that an inch of the plot holds, at its font size of 9 points.
_CHARACTERS_PER_INCH = 14.0

# What fits above the plot at the title's 10 points without reaching the legend: 12.6 characters are an inch of 8.2.
_TITLE_CHARACTERS = 95

# Part of the plot's width next to either axis in which a number that is centred on its point would be cut.
_NEAR_AXIS = 0.08


def plot_timeline(cell: Cell, title: str, *paths: Path, option: str = "--snapshot") -> None:
    """Bytes held by category over the events of the recorded step, with its phases marked, to files of any ending."""
    plot_derived(cell.derived, title, *paths, option=option)


def plot_derived(derived: Mapping[str, Any], title: str, *paths: Path, option: str = "--snapshot") -> None:
    """Draw a timeline and its regions, as a cell's derived columns hold them."""
    import matplotlib

    # A fixed salt and no date: the same cell gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "cs336sys", "svg.fonttype": "none"}):
        figure = timeline_figure(derived, title)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            write_figure(figure, path, option, metadata)


def timeline_figure(derived: Mapping[str, Any], title: str) -> "Figure":
    """The picture of a cell's derived columns."""
    from matplotlib.figure import Figure

    timeline = derived["timeline"]
    positions = timeline["position"]
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    categories = [category for category in CATEGORY_COLORS if category in timeline]
    totals = [sum(sizes) for sizes in zip(*(timeline[category] for category in categories), strict=True)]
    highest = max(range(len(totals)), key=totals.__getitem__)
    peak, unit = in_shown_unit(totals[highest], "bytes")
    scale = peak / totals[highest] if totals[highest] else 1.0
    held = {category: [scale * size for size in timeline[category]] for category in categories}
    shown = {category: sizes for category, sizes in held.items() if any(sizes)}
    if shown:
        axes.stackplot(
            positions,
            *shown.values(),
            labels=list(shown),
            colors=[CATEGORY_COLORS[category] for category in shown],
            linewidth=0,
        )
    axes.set_ylim(0, 1.12 * peak or 1)
    last = max(positions[-1], 1)
    axes.set_xlim(positions[0], last)
    rows = _name_phases(axes, derived["regions"], figure.get_figwidth() * 0.75)
    # A label in the middle of the peak would be cut by the axis where that is near one.
    part = positions[highest] / last
    axes.annotate(
        f"{format_number(peak, unit)} {unit}",
        (positions[highest], peak),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if part < _NEAR_AXIS else "right" if part > 1 - _NEAR_AXIS else "center",
        fontsize=9,
    )
    axes.set_xlabel("allocations and frees since the step began")
    axes.set_ylabel(f"active memory, {unit}")
    axes.set_title(textwrap.fill(title, _TITLE_CHARACTERS), fontsize=10, pad=6 + 13 * rows)
    axes.grid(alpha=0.3)
    if shown:
        figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    return figure


def _name_phases(axes: "Axes", regions: Sequence[Mapping[str, Any]], inches: float) -> int:
    """Lines where phases begin and names above the plot, each in the lowest row with room for it; how many rows."""
    first, last = axes.get_xlim()
    ends: list[float] = []
    for region in regions:
        axes.axvline(region["start"], color="black", linewidth=0.6, linestyle=":")
        if region["end"] <= region["start"]:
            continue
        half = len(region["name"]) / _CHARACTERS_PER_INCH / inches / 2
        middle = ((region["start"] + region["end"]) / 2 - first) / (last - first)
        middle = min(max(middle, half), 1 - half)
        row = next((row for row, end in enumerate(ends) if end <= middle - half), len(ends))
        ends[row : row + 1] = [middle + half]
        axes.text(
            middle, 1.01 + 0.045 * row, region["name"], transform=axes.transAxes, ha="center", va="bottom", fontsize=9
        )
    return len(ends)
