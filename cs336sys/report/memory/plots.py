"""The active-memory timeline of a cell of ``memprof`` as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.accounting.memory import GIB
from cs336sys.report.numbers import format_quantity
from cs336sys.report.outputs import write_figure
from cs336sys.results import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What stays lies at the bottom.
CATEGORY_COLORS = {
    "parameters": "#4c72b0",
    "optimizer state": "#8172b3",
    "other": "#8c8c8c",
    "gradients": "#c44e52",
    "activations": "#55a868",
    "temporary": "#dd8452",
}


def plot_timeline(cell: Cell, title: str, *paths: Path, option: str = "--snapshot") -> None:
    """Bytes held by category over the events of the recorded step, with its phases marked, to files of any ending."""
    import matplotlib

    # A fixed salt and no date: the same cell gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "cs336sys", "svg.fonttype": "none"}):
        figure = timeline_figure(cell.derived, title)
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
    held = {category: [size / GIB for size in timeline[category]] for category in CATEGORY_COLORS}
    shown = {category: sizes for category, sizes in held.items() if any(sizes)}
    axes.stackplot(
        positions,
        *shown.values(),
        labels=list(shown),
        colors=[CATEGORY_COLORS[category] for category in shown],
        linewidth=0,
    )
    totals = [sum(sizes) for sizes in zip(*held.values(), strict=True)]
    highest = max(range(len(totals)), key=totals.__getitem__)
    axes.set_ylim(0, 1.18 * totals[highest])
    axes.set_xlim(positions[0], max(positions[-1], 1))
    for region in derived["regions"]:
        axes.axvline(region["start"], color="black", linewidth=0.6, linestyle=":")
        if region["end"] > region["start"]:
            middle = (region["start"] + region["end"]) / 2
            axes.text(middle, 1.12 * totals[highest], region["name"], ha="center", va="center", fontsize=9)
    axes.annotate(
        format_quantity(totals[highest], "gib"),
        (positions[highest], totals[highest]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    axes.set_xlabel("allocations and frees since the step began")
    axes.set_ylabel("active memory, GiB")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    return figure
