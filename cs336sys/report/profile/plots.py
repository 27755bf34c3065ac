"""The picture of ``nsys``: of which kind the kernels of each phase are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.measure.profile.taxonomy import KERNEL_CATEGORIES
from cs336sys.report.numbers import format_number
from cs336sys.report.outputs import write_figure
from cs336sys.report.profile.kernels import share_key, share_table
from cs336sys.report.profile.measured import Measured
from cs336sys.report.tables import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What matrix products take stands out from what moves memory.
_COLORS = (
    "#4c72b0",  # matmul
    "#1f9e89",  # convolution
    "#c44e52",  # attention/softmax
    "#dd8452",  # elementwise
    "#ccb974",  # reduction
    "#8172b3",  # normalization
    "#5e8c31",  # pooling
    "#b5651d",  # embedding bag
    "#a3467f",  # sorting
    "#c8a2c8",  # quantization
    "#b0a990",  # layout
    "#55a868",  # optimizer
    "#937860",  # copy
    "#da8bc3",  # communication
    "#64b5cd",  # dispatch
    "#8c8c8c",  # unclassified
)

_INCHES_PER_BAR = 0.23
# The title, and the distance to the next size.
_INCHES_BETWEEN = 0.55

# Shares whose number fits into their part of a bar.
_LEAST_LABELLED_PERCENT = 14.0


def plot_shares(measured: Sequence[Measured], labels: Sequence[Column], path: Path) -> None:
    """A row of axes for each size, a column for each phase; a bar for each profile, of what share each kind takes.

    The time of all kernels of the phase stands beside its bar.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # Without a profile an empty picture: what failed stands in the table.
    rows = share_table(measured, labels).rows if measured else []
    phases = list(dict.fromkeys(str(row["phase"]) for row in rows))
    groups: dict[str, list[tuple[str, dict[str, Mapping[str, Any]]]]] = {}
    for row in rows:
        bars = groups.setdefault(str(row.get("size", "")), [])
        words = {label.key: str(row[label.key]) for label in labels if label.key not in ("size", "parameters")}
        if "context" in words:
            words["context"] = f"context {words['context']}"
        name = ", ".join(words.values())
        if not bars or bars[-1][0] != name or row["phase"] in bars[-1][1]:
            bars.append((name, {}))
        bars[-1][1][str(row["phase"])] = row
    heights = [len(bars) for bars in groups.values()] or [1]
    figure = Figure(
        figsize=(2 + 2.1 * len(phases), 0.8 + sum(heights) * _INCHES_PER_BAR + len(heights) * _INCHES_BETWEEN),
        layout="constrained",
    )
    axes = figure.subplots(len(heights), max(1, len(phases)), squeeze=False, gridspec_kw={"height_ratios": heights})
    for drawings, (size, bars) in zip(axes, groups.items(), strict=False):
        for drawing, phase in zip(drawings, phases, strict=True):
            for number, (_, by_phase) in enumerate(bars):
                if phase in by_phase:
                    _draw_bar(drawing, number, by_phase[phase])
            drawing.set_xlim(0, 100)
            drawing.set_ylim(len(bars) - 0.5, -0.5)
            drawing.set_yticks([])
            drawing.set_xticks([0, 50, 100], ["0", "50", "100 %"], fontsize=7)
            drawing.set_title(phase, fontsize=9, loc="left")
            drawing.spines[["top", "right"]].set_visible(False)
        drawings[0].set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        drawings[0].set_ylabel(size, fontsize=10, fontweight="bold")
    shown = [
        Patch(color=color, label=category)
        for category, color in zip(KERNEL_CATEGORIES, _COLORS, strict=True)
        if any(row.get(share_key(category)) for row in rows)
    ]
    if shown:
        figure.legend(handles=shown, title="share of kernel time", loc="outside right upper", fontsize=9)
    write_figure(figure, path)


def _draw_bar(drawing: "Axes", height: int, shares: Mapping[str, Any]) -> None:
    left = 0.0
    for category, color in zip(KERNEL_CATEGORIES, _COLORS, strict=True):
        share = shares.get(share_key(category))
        if not share:
            continue
        drawing.barh(height, share, 0.8, left, color=color)
        if share >= _LEAST_LABELLED_PERCENT:
            words: dict[str, Any] = {"fontsize": 6.5, "color": "white", "ha": "center", "va": "center"}
            drawing.text(left + share / 2, height, f"{share:.0f}", **words)
        left += share
    drawing.text(100, height, f" {format_number(shares['kernel_ms'], 'ms')} ms", fontsize=6.5, va="center")
