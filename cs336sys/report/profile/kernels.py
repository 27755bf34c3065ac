"""Which kernels take the time, and of which kind they are."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cs336sys.measure.profile.summary import KernelTime
from cs336sys.measure.profile.taxonomy import (
    KERNEL_CATEGORIES,
    MATMUL,
    OPTIMIZER,
    UNCLASSIFIED,
    category_of,
    short_name,
)
from cs336sys.measure.range_names import STEP
from cs336sys.report.profile.measured import Measured
from cs336sys.report.tables import Column, Table

# Phases that make up "forward and backward pass together".
_BOTH_PASSES = ("forward", "loss", "backward")
_OPTIMIZER_PHASE = "optimizer"


def top_kernel_table(measured: Sequence[Measured], labels: Sequence[Column]) -> Table:
    """The kernel that takes most time in the first phase, and in forward and backward pass together."""
    rows = []
    for m in measured:
        by_phase = m.kernels_by_phase()
        passes = [phase for phase in by_phase if phase in _BOTH_PASSES]
        groups = {"first": list(by_phase)[:1], "both": passes if "backward" in passes else []}
        row = dict(m.labels)
        for group, phases in groups.items():
            totals: Counter[str] = Counter()
            counts: Counter[str] = Counter()
            for kernel in (kernel for phase in phases for kernel in by_phase[phase]):
                totals[kernel.kernel] += kernel.total_ns
                counts[kernel.kernel] += kernel.count
            if totals.total():
                name, total = totals.most_common(1)[0]
                row[f"{group}_kernel"] = short_name(name)
                row[f"{group}_percent"] = 100 * total / totals.total()
                row[f"{group}_instances"] = counts[name] / m.steps
        rows.append(row)
    first = measured[0].profile.phases[0].name
    columns = (
        *labels,
        Column("first_kernel", f"most time in {first}"),
        Column("first_percent", f"share of {first}", "percent"),
        Column("first_instances", f"times in {first}"),
        Column("both_kernel", "most time in forward and backward together"),
        Column("both_percent", "share of both", "percent"),
        Column("both_instances", "times in both"),
    )
    return Table("top kernel", "nsys: the kernel that takes most time", columns, rows)


def kernel_table(
    measured: Sequence[Measured], labels: Sequence[Column], top: int, full_names: bool, *, without_matmul: bool = False
) -> Table:
    """The ``top`` kernels of each phase by time."""
    rows = []
    for m in measured:
        by_phase = m.kernels_by_phase()
        for phase in m.profile.phases:
            kernels = by_phase[phase.name]
            total_ns = sum(kernel.total_ns for kernel in kernels)
            chosen = [k for k in kernels if not without_matmul or category_of(k.kernel) != MATMUL][:top]
            names = [kernel.kernel if full_names else short_name(kernel.kernel) for kernel in chosen]
            for kernel, name in zip(chosen, _numbered(names), strict=True):
                rows.append(
                    {**m.labels, **_kernel_row(kernel, total_ns, phase.count), "phase": phase.name, "kernel": name}
                )
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
    note = ("share is of the time of all kernels of the phase",)
    if without_matmul:
        heading = f"nsys: the {top} kernels of each phase that take most time, beside matrix products"
        return Table("other kernels", heading, columns, rows, notes=note)
    return Table("kernels", f"nsys: the {top} kernels of each phase that take most time", columns, rows, notes=note)


def _numbered(names: Sequence[str]) -> list[str]:
    """Different kernels of the same short name are told apart by a number."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def _kernel_row(kernel: KernelTime, total_ns: int, ranges: int) -> dict[str, Any]:
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


def share_table(measured: Sequence[Measured], labels: Sequence[Column]) -> Table:
    """What share of the kernel time each kind of kernel takes, in each phase and in the whole step."""
    rows = []
    unclassified: Counter[str] = Counter()
    for m in measured:
        by_phase = m.kernels_by_phase()
        for kernel in m.profile.kernels:
            if category_of(kernel.kernel) == UNCLASSIFIED:
                unclassified[short_name(kernel.kernel)] += kernel.total_ns
        for phase in m.profile.phases:
            totals: Counter[str] = Counter()
            for kernel in by_phase[phase.name]:
                totals[category_of(kernel.kernel)] += kernel.total_ns
            rows.append({**m.labels, "phase": phase.name, **_share_row(totals, phase.count)})
        if m.profile.step:
            totals = Counter()
            for kernel in m.profile.kernels:
                # The course's AdamW is made of elementwise kernels: what launched them says more than their names.
                launched_by_optimizer = kernel.range == _OPTIMIZER_PHASE
                totals[OPTIMIZER if launched_by_optimizer else category_of(kernel.kernel)] += kernel.total_ns
            rows.append({**m.labels, "phase": STEP, **_share_row(totals, m.steps)})
    columns = (
        *labels,
        Column("phase", "phase"),
        Column("kernel_ms", "kernels", "ms"),
        *(Column(share_key(category), category, "percent") for category in KERNEL_CATEGORIES),
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
