"""Kernels by time, and by kind."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cs336sys.capture.range_names import STEP
from cs336sys.capture.summary import KernelTime, Profile, RangeTime
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.results.model import Cell, Samples
from cs336sys.tables.numbers import format_number
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.table import Column, Table, fill_row, named_columns


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile and the run that it describes."""

    labels: Mapping[str, Any]  # Values of the columns that say what was run, by their keys.
    profile: Profile
    cell: Cell | None = None  # The cell that it was measured in; None for a report that was read.

    @property
    def steps(self) -> int:
        """Return how many steps there are, or else occurrences of the first phase."""
        return (self.profile.step or self.profile.phases[0]).count

    @property
    def ranges(self) -> tuple[RangeTime, ...]:
        """Return the phases, and the step that they make up; of several GPUs those of each."""
        return self.profile.of_gpus or self.ranges_of_all_gpus

    @property
    def ranges_of_all_gpus(self) -> tuple[RangeTime, ...]:
        return (*self.profile.phases, *((self.profile.step,) if self.profile.step else ()))

    @property
    def lacks_backward_launches(self) -> bool:
        """Return whether there is a backward pass, with fewer launches than the forward pass."""
        launches = {phase.name: phase.kernels for phase in self.profile.phases}
        return "backward" in launches and launches["backward"] < launches.get("forward", 0)

    def unprofiled(self, name: str) -> Samples | None:
        return self.cell.samples.get(name) if self.cell else None

    def kernels(self, *phases: str) -> list[KernelTime]:
        """Return the kernels of some phases, of each the longest first."""
        return [kernel for kernel in self.profile.kernels if kernel.range in phases]


def phase_kernel_tables(
    measured: Sequence[MeasuredProfile], labels: Sequence[Column], top: int, full_names: bool
) -> list[Table]:
    """Build all tables of kernels; ``labels`` are the columns that say what was run."""
    return [
        top_kernel_table(measured, labels),
        kernel_table(measured, labels, top, full_names),
        kernel_table(measured, labels, top, full_names, without_matmul=True),
        share_table(measured, labels),
    ]


def top_kernel_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """Build the table of the longest kernel in the first phase, in both passes together, and in the backward pass."""
    rows = []
    for run in measured:
        names = [phase.name for phase in run.profile.phases]
        # Forward and backward pass together, of which the backward pass is the last.
        passes = ("forward", "loss", "backward") if "backward" in names else ()
        row = dict(run.labels)
        # Three groups of columns, each of the kernels of these phases.
        for group, phases in (("first", names[:1]), ("both", passes), ("backward", passes[-1:])):
            total_ns: Counter[str] = Counter()
            counts: Counter[str] = Counter()
            for kernel in run.kernels(*phases):
                total_ns[kernel.kernel] += kernel.total_ns
                counts[kernel.kernel] += kernel.count
            if total_ns.total():
                ((name, longest_ns),) = total_ns.most_common(1)
                row |= {f"{group}_kernel": short_name(name), f"{group}_percent": 100 * longest_ns / total_ns.total()}
                row[f"{group}_instances"] = counts[name] / run.steps
        rows.append(row)
    first_phase = measured[0].profile.phases[0].name if measured else "the first phase"  # Of the first run.
    columns = list(labels)
    for group, where, phase in (
        ("first", first_phase, first_phase),
        ("both", "forward and backward together", "both"),
        ("backward", "backward", "backward"),
    ):
        columns += [
            Column(f"{group}_kernel", f"most time in {where}"),
            Column(f"{group}_percent", f"share of {phase}", "percent"),
            Column(f"{group}_instances", f"times in {phase}"),
        ]
    return Table("top kernel", "nsys: the kernel that takes most time", columns, rows)


# Of rows with a kernel and its shown name, its phase, and the ns of all kernels of this phase.
_KERNEL_COLUMNS = (
    Column("phase", "phase", value=lambda row: row.phase.name),
    Column("share_percent", "share", "percent", lambda row: 100 * row.kernel.total_ns / (row.phase_ns or math.nan)),
    Column("total_ms", "a step", "ms", lambda row: row.kernel.total_ns / row.phase.count / 1e6),
    Column("instances", "times a step", value=lambda row: row.kernel.count / row.phase.count),
    Column("mean_us", "mean", "us", lambda row: row.kernel.total_ns / row.kernel.count / 1e3),
    Column("median_us", "median", "us", lambda row: row.kernel.median_ns / 1e3),
    Column("min_us", "min", "us", lambda row: row.kernel.min_ns / 1e3),
    Column("max_us", "max", "us", lambda row: row.kernel.max_ns / 1e3),
    Column("std_us", "std", "us", lambda row: None if row.kernel.std_ns is None else row.kernel.std_ns / 1e3),
    Column("category", "category", value=lambda row: category_of(row.kernel.kernel)),
    Column("kernel", "kernel", value=lambda row: row.name),
)


def kernel_table(
    measured: Sequence[MeasuredProfile],
    labels: Sequence[Column],
    top: int,
    full_names: bool,
    *,
    without_matmul: bool = False,
) -> Table:
    """Build the table of the ``top`` kernels of each phase by time."""
    rows = []
    for run in measured:
        for phase in run.profile.phases:
            kernels = run.kernels(phase.name)
            phase_ns = sum(kernel.total_ns for kernel in kernels)
            if without_matmul:
                kernels = [kernel for kernel in kernels if category_of(kernel.kernel) != Category.MATMUL]
            names = shown_names([kernel.kernel for kernel in kernels[:top]], full_names)
            for kernel, name in zip(kernels[:top], names, strict=True):
                row = SimpleNamespace(name=name, kernel=kernel, phase=phase, phase_ns=phase_ns)
                rows.append({**run.labels, **fill_row(_KERNEL_COLUMNS, row)})
    name, without = ("other kernels", ", without matrix products") if without_matmul else ("kernels", "")
    heading = f"nsys: the {top} kernels of each phase that take most time{without}"
    columns = (*labels, *_KERNEL_COLUMNS)
    return Table(name, heading, columns, rows, notes=("share: of the time of all kernels of the phase",))


def shown_names(kernels: Sequence[str], full_names: bool) -> list[str]:
    """Return the names of different kernels as tables show them, with numbers where short names are equal."""
    seen: Counter[str] = Counter()
    names = []
    for name in kernels if full_names else map(short_name, kernels):
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def share_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """Build the table of each kind's share of kernel time, in each phase and in the whole step."""
    columns = (
        *labels,
        *named_columns("phase", kernel_ms="kernels"),
        *(Column(_share_key(category), category, "percent") for category in Category),
    )
    notes = (
        "share of kernel time, by the kernels' names; in the step, all that the optimizer launches counts as its own",
        *unclassified_note((kernel.kernel, kernel.total_ns) for run in measured for kernel in run.profile.kernels),
    )
    rows = [{**run.labels, **row} for run in measured for row in _shares(run)]
    return Table("shares", "nsys: share of each kind of kernel", columns, rows, notes=notes)


def _shares(run: MeasuredProfile) -> Iterator[dict[str, Any]]:
    """Yield for each phase, and for the step, the time of its kernels and which part of that each kind takes."""
    totals: dict[str, Counter[str]] = {row.name: Counter() for row in run.ranges_of_all_gpus}
    for kernel in run.profile.kernels:
        category = category_of(kernel.kernel)
        totals[kernel.range][category] += kernel.total_ns  # Its range is a phase; their sum is the step.
        if run.profile.step:
            # The course's AdamW is made of elementwise kernels: the phase says more than their names.
            totals[STEP][Category.OPTIMIZER if kernel.range == "optimizer" else category] += kernel.total_ns
    for phase_or_step in run.ranges_of_all_gpus:
        total_ns = totals[phase_or_step.name].total()
        shares = {_share_key(kind): 100 * ns / total_ns for kind, ns in totals[phase_or_step.name].items() if ns}
        kernel_ms = total_ns / phase_or_step.count / 1e6  # Of one occurrence.
        yield {"phase": phase_or_step.name, "kernel_ms": kernel_ms, **shares}


def unclassified_note(times: Iterable[tuple[str, float]]) -> list[str]:
    """Return a note that names the ten longest kernels of no known kind; none without any."""
    totals: dict[str, float] = {}
    for kernel, time in times:
        if category_of(kernel) == Category.UNCLASSIFIED:
            totals[short_name(kernel)] = totals.get(short_name(kernel), 0) + time
    longest = sorted(totals, key=lambda name: -totals[name])[:10]
    return [f"unclassified: {', '.join(longest)}"] if longest else []


def _share_key(category: str) -> str:
    return f"{category.replace('/', '_')}_percent"


_INCHES_PER_BAR = 0.23
_INCHES_BETWEEN = 0.55  # The title, and the distance to the next size.


def plot_shares(measured: Sequence[MeasuredProfile], labels: Sequence[Column], path: Path) -> None:
    """Draw axes in a row for each size and a column for each phase, and in them each profile's shares as a bar.

    The time of all kernels of the phase stands next to its bar. Without profiles the picture is empty.
    """
    from matplotlib.patches import Patch

    keys = [label.key for label in labels if label.key not in ("size", "parameters")]
    groups: dict[str, list[tuple[str, dict[str, Mapping[str, Any]]]]] = {}  # Bars (name, rows by phase) by size.
    for run in measured:
        name = ", ".join(f"context {run.labels[key]}" if key == "context" else str(run.labels[key]) for key in keys)
        row_of_phase: dict[str, Mapping[str, Any]] = {row["phase"]: row for row in _shares(run)}
        groups.setdefault(str(run.labels.get("size", "")), []).append((name, row_of_phase))
    rows = [row for bars in groups.values() for _, of_phases in bars for row in of_phases.values()]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    heights = [len(bars) for bars in groups.values()] or [1]
    figure_size = 2 + 2.1 * len(phases), 0.8 + sum(heights) * _INCHES_PER_BAR + len(heights) * _INCHES_BETWEEN
    figure, axes = new_axes(*figure_size, len(heights), max(1, len(phases)), gridspec_kw={"height_ratios": heights})
    for axes_of_size, (size, bars) in zip(axes, groups.items(), strict=False):  # An empty picture has axes, too.
        for phase_axes, phase in zip(axes_of_size, phases, strict=True):
            for number, (_, row_of_phase) in enumerate(bars):
                if phase in row_of_phase:
                    _draw_bar(phase_axes, number, row_of_phase[phase])
            phase_axes.set_xlim(0, 100)
            phase_axes.set_ylim(len(bars) - 0.5, -0.5)  # The first bar on top.
            phase_axes.set_yticks([])
            phase_axes.set_xticks([0, 50, 100], ["0", "50", "100 %"], fontsize=7)
            phase_axes.set_title(phase, fontsize=9, loc="left")
            phase_axes.spines[["top", "right"]].set_visible(False)
        axes_of_size[0].set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        axes_of_size[0].set_ylabel(size, fontsize=10, fontweight="bold")
    shown = [kind for kind in Category if any(row.get(_share_key(kind)) for row in rows)]
    if shown:
        patches = [Patch(color=kind.color, label=kind) for kind in shown]
        figure.legend(handles=patches, title="share of kernel time", loc="outside right upper", fontsize=9)
    write_figure(figure, path)


def _draw_bar(axes: Axes, y: int, row: Mapping[str, Any]) -> None:
    left = 0.0
    for category in Category:
        if not (percent := row.get(_share_key(category))):
            continue
        axes.barh(y, width=percent, height=0.8, left=left, color=category.color)
        if percent >= 14.0:  # Then its number fits into its part of the bar.
            middle = left + percent / 2
            axes.text(middle, y, f"{percent:.0f}", fontsize=6.5, color="white", ha="center", va="center")
        left += percent
    axes.text(100, y, f" {format_number(row['kernel_ms'], 'ms')} ms", fontsize=6.5, va="center")
