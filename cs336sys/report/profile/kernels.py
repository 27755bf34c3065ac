"""Kernels by time, and by kind."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.capture.summary import KernelTime, Profile, RangeTime
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.measure.range_names import STEP
from cs336sys.report.numbers import format_number
from cs336sys.report.outputs import new_axes, write_figure
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell, Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile and what it is of.

    Attributes:
        labels: values of the columns that say what was run, by their keys.
        cell: the cell that it was measured in; None for a report that was read.
    """

    labels: Mapping[str, Any]
    profile: Profile
    cell: Cell | None = None

    @property
    def steps(self) -> int:
        """Count the steps, or else the occurrences of the first phase."""
        return self.profile.step.count if self.profile.step else self.profile.phases[0].count

    @property
    def ranges(self) -> tuple[RangeTime, ...]:
        """The phases, and the step that they make up; of several GPUs those of each."""
        if self.profile.of_gpus:
            return self.profile.of_gpus
        return (*self.profile.phases, *([self.profile.step] if self.profile.step else []))

    def unprofiled(self, name: str) -> Samples | None:
        """Times of a phase or the step without profiler."""
        return self.cell.samples.get(name) if self.cell else None

    def kernels_by_phase(self) -> dict[str, list[KernelTime]]:
        """The longest first."""
        return {
            phase.name: [kernel for kernel in self.profile.kernels if kernel.range == phase.name]
            for phase in self.profile.phases
        }


# Phases that make up "forward and backward pass together".
_BOTH_PASSES = ("forward", "loss", "backward")
_OPTIMIZER_PHASE = "optimizer"


def top_kernel_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """The kernel that takes most time in the first phase, in forward and backward pass together, and in the latter."""
    rows = []
    for m in measured:
        by_phase = m.kernels_by_phase()
        passes = [phase for phase in by_phase if phase in _BOTH_PASSES]
        groups = {"first": list(by_phase)[:1], "both": passes if "backward" in passes else []}
        groups["backward"] = ["backward"] if "backward" in passes else []
        row = dict(m.labels)
        for group, phases in groups.items():
            totals: Counter[str] = Counter()
            counts: Counter[str] = Counter()
            for kernel in (kernel for phase in phases for kernel in by_phase[phase]):
                totals[kernel.kernel] += kernel.total_ns
                counts[kernel.kernel] += kernel.count
            if totals.total():
                name, total = totals.most_common(1)[0]
                row |= {f"{group}_kernel": short_name(name), f"{group}_percent": 100 * total / totals.total()}
                row[f"{group}_instances"] = counts[name] / m.steps
        rows.append(row)
    first = measured[0].profile.phases[0].name if measured else "the first phase"
    columns = (
        *labels,
        Column("first_kernel", f"most time in {first}"),
        Column("first_percent", f"share of {first}", "percent"),
        Column("first_instances", f"times in {first}"),
        Column("both_kernel", "most time in forward and backward together"),
        Column("both_percent", "share of both", "percent"),
        Column("both_instances", "times in both"),
        Column("backward_kernel", "most time in backward"),
        Column("backward_percent", "share of backward", "percent"),
        Column("backward_instances", "times in backward"),
    )
    return Table("top kernel", "nsys: the kernel that takes most time", columns, rows)


def kernel_table(
    measured: Sequence[MeasuredProfile],
    labels: Sequence[Column],
    top: int,
    full_names: bool,
    *,
    without_matmul: bool = False,
) -> Table:
    """The ``top`` kernels of each phase by time."""
    rows = []
    for m in measured:
        by_phase = m.kernels_by_phase()
        for phase in m.profile.phases:
            kernels = by_phase[phase.name]
            total_ns = sum(kernel.total_ns for kernel in kernels)
            chosen = [k for k in kernels if not without_matmul or category_of(k.kernel) != Category.MATMUL][:top]
            names = [kernel.kernel if full_names else short_name(kernel.kernel) for kernel in chosen]
            rows += [
                {**m.labels, **_kernel_time_row(kernel, total_ns, phase.count), "phase": phase.name, "kernel": name}
                for kernel, name in zip(chosen, numbered(names), strict=True)
            ]
    columns = (
        *labels,
        Column("phase", "phase"),
        Column("share_percent", "share", "percent"),
        Column("total_ms", "a step", "ms"),
        Column("instances", "times a step"),
        Column("mean_us", "mean", "us"),
        Column("median_us", "median", "us"),
        Column("min_us", "min", "us"),
        Column("max_us", "max", "us"),
        Column("category", "category"),
        Column("kernel", "kernel"),
    )
    name, without = ("other kernels", ", without matrix products") if without_matmul else ("kernels", "")
    heading = f"nsys: the {top} kernels of each phase that take most time{without}"
    return Table(name, heading, columns, rows, notes=("share: of the time of all kernels of the phase",))


def numbered(names: Sequence[str]) -> list[str]:
    """Different kernels of the same short name are told apart by a number."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def _kernel_time_row(kernel: KernelTime, total_ns: int, ranges: int) -> dict[str, Any]:
    return {
        "share_percent": 100 * kernel.total_ns / total_ns if total_ns else None,
        "total_ms": kernel.total_ns / ranges / 1e6,
        "instances": kernel.count / ranges,
        "mean_us": kernel.total_ns / kernel.count / 1e3,
        "median_us": kernel.median_ns / 1e3,
        "min_us": kernel.min_ns / 1e3,
        "max_us": kernel.max_ns / 1e3,
        "category": category_of(kernel.kernel),
    }


def share_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """Build the table of each kind's share of kernel time, in each phase and in the whole step."""
    rows = []
    unclassified: Counter[str] = Counter()
    for m in measured:
        of_phases: dict[str, Counter[str]] = defaultdict(Counter)
        of_step: Counter[str] = Counter()
        for kernel in m.profile.kernels:
            category = category_of(kernel.kernel)
            if category == Category.UNCLASSIFIED:
                unclassified[short_name(kernel.kernel)] += kernel.total_ns
            of_phases[kernel.range][category] += kernel.total_ns
            # The course's AdamW is made of elementwise kernels: what launched them says more than their names.
            of_step[Category.OPTIMIZER if kernel.range == _OPTIMIZER_PHASE else category] += kernel.total_ns
        rows += [
            {**m.labels, "phase": phase.name, **_share_row(of_phases[phase.name], phase.count)}
            for phase in m.profile.phases
        ]
        if m.profile.step:
            rows.append({**m.labels, "phase": STEP, **_share_row(of_step, m.steps)})
    columns = (
        *labels,
        Column("phase", "phase"),
        Column("kernel_ms", "kernels", "ms"),
        *(Column(share_key(category), category, "percent") for category in Category),
    )
    notes = [
        "share of kernel time, by the kernels' names; in the step, all that the optimizer launches counts as its own"
    ]
    if unclassified:
        notes.append("unclassified: " + ", ".join(name for name, _ in unclassified.most_common(10)))
    return Table("shares", "nsys: share of each kind of kernel", columns, rows, notes=tuple(notes))


def share_key(category: str) -> str:
    """The column of a kind of kernel."""
    return f"{category.replace('/', '_')}_percent"


def _share_row(totals: Counter[str], count: int) -> dict[str, Any]:
    shares = {share_key(category): 100 * ns / totals.total() for category, ns in totals.items() if ns}
    return {"kernel_ms": totals.total() / count / 1e6} | shares


# What matrix products take stands out from what moves memory.
CATEGORY_COLORS: dict[str, str] = {
    Category.MATMUL: "#4c72b0",
    Category.CONVOLUTION: "#1f9e89",
    Category.ATTENTION_SOFTMAX: "#c44e52",
    Category.ELEMENTWISE: "#dd8452",
    Category.REDUCTION: "#ccb974",
    Category.NORMALIZATION: "#8172b3",
    Category.POOLING: "#5e8c31",
    Category.EMBEDDING_BAG: "#b5651d",
    Category.SORTING: "#a3467f",
    Category.QUANTIZATION: "#c8a2c8",
    Category.LAYOUT: "#b0a990",
    Category.OPTIMIZER: "#55a868",
    Category.COPY: "#937860",
    Category.COMMUNICATION: "#da8bc3",
    Category.DISPATCH: "#64b5cd",
    Category.UNCLASSIFIED: "#8c8c8c",
}

_INCHES_PER_BAR = 0.23
# The title, and the distance to the next size.
_INCHES_BETWEEN = 0.55

# Shares whose number fits into their part of a bar.
_LEAST_LABELLED_PERCENT = 14.0


def plot_shares(measured: Sequence[MeasuredProfile], labels: Sequence[Column], path: Path) -> None:
    """A row of axes for each size, a column for each phase; a bar for each profile, of what share each kind takes.

    The time of all kernels of the phase stands next to its bar.
    """
    from matplotlib.patches import Patch

    # Without a profile an empty picture: what failed stands in the table.
    rows = share_table(measured, labels).rows if measured else []
    phases = list(dict.fromkeys(str(row["phase"]) for row in rows))
    groups: dict[str, list[tuple[str, dict[str, Mapping[str, Any]]]]] = {}
    for row in rows:
        bars = groups.setdefault(str(row.get("size", "")), [])
        labels_of_row = {label.key: str(row[label.key]) for label in labels if label.key not in ("size", "parameters")}
        if "context" in labels_of_row:
            labels_of_row["context"] = f"context {labels_of_row['context']}"
        name = ", ".join(labels_of_row.values())
        if not bars or bars[-1][0] != name or row["phase"] in bars[-1][1]:
            bars.append((name, {}))
        bars[-1][1][str(row["phase"])] = row
    heights = [len(bars) for bars in groups.values()] or [1]
    figure_size = 2 + 2.1 * len(phases), 0.8 + sum(heights) * _INCHES_PER_BAR + len(heights) * _INCHES_BETWEEN
    figure, axes = new_axes(*figure_size, len(heights), max(1, len(phases)), gridspec_kw={"height_ratios": heights})
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
        for category, color in CATEGORY_COLORS.items()
        if any(row.get(share_key(category)) for row in rows)
    ]
    if shown:
        figure.legend(handles=shown, title="share of kernel time", loc="outside right upper", fontsize=9)
    write_figure(figure, path)


def _draw_bar(drawing: "Axes", height: int, shares: Mapping[str, Any]) -> None:
    left = 0.0
    for category, color in CATEGORY_COLORS.items():
        share = shares.get(share_key(category))
        if not share:
            continue
        drawing.barh(height, share, 0.8, left, color=color)
        if share >= _LEAST_LABELLED_PERCENT:
            middle = left + share / 2
            drawing.text(middle, height, f"{share:.0f}", fontsize=6.5, color="white", ha="center", va="center")
        left += share
    drawing.text(100, height, f" {format_number(shares['kernel_ms'], 'ms')} ms", fontsize=6.5, va="center")
