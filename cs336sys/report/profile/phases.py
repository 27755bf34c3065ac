"""Time of each phase, and fp32 against bf16."""

from collections.abc import Sequence
from typing import Any

from cs336sys.measure.profile.summary import RangeTime
from cs336sys.measure.range_names import STEP
from cs336sys.report.bench import LAUNCH_BOUND_IDLE_PERCENT
from cs336sys.report.profile.measured import Measured
from cs336sys.report.tables import Column, Table
from cs336sys.results import configuration_key

# From here on, two decimals would say 100.00.
_ALL_PERCENT = 99.995


def phase_table(
    measured: Sequence[Measured],
    failed: Sequence[dict[str, Any]],
    labels: Sequence[Column],
    title: str,
    notes: Sequence[str],
) -> Table:
    """How long each phase takes, how long the GPU was busy in it, and whether the CPU held it up.

    Args:
        failed: rows of cells without a profile.
        labels: the columns that say what was run.
    """
    on_gpu = all(m.profile.is_gpu for m in measured)
    work = "kernels" if on_gpu else "operations"
    columns = (
        *labels,
        Column("phase", "phase"),
        *([Column("gpu", "GPU")] if any(m.profile.of_gpus for m in measured) else []),
        Column("unprofiled_ms", "without profiler", "ms"),
        Column("annotated_ms", "annotated", "ms"),
        Column("wall_ms", "CPU wall", "ms"),
        Column("span_ms", "GPU span" if on_gpu else "span", "ms"),
        Column("busy_ms", "GPU busy" if on_gpu else "busy", "ms"),
        Column("kernel_ms", f"sum of {work}", "ms"),
        Column("idle_percent", "idle", "percent"),
        Column("launch_bound", "launch-bound"),
        Column("kernels", work),
        Column("status", "status"),
    )
    rows = [{**m.labels, **_phase_row(m, row), "status": "ok"} for m in measured for row in m.ranges]
    return Table("phases", title, columns, [*rows, *failed], notes=(*notes, *_notes(measured)))


def _phase_row(measured: Measured, row: RangeTime) -> dict[str, Any]:
    unprofiled = measured.unprofiled(row.name)
    wall_ms, busy_ms = row.wall_ns / row.count / 1e6, row.busy_ns / row.count / 1e6
    # A profiler slows the CPU down and not the GPU, so the step without one says how long the GPU really waits. The
    # operations of a CPU are themselves slowed down.
    whole_ms = unprofiled.median if unprofiled and measured.profile.is_gpu else wall_ms
    idle_percent = max(0.0, 100 * (1 - busy_ms / whole_ms))
    verdict = "yes" if idle_percent > LAUNCH_BOUND_IDLE_PERCENT else "no"
    return {
        "phase": row.name,
        "gpu": row.gpu,
        "unprofiled_ms": unprofiled,
        "annotated_ms": measured.unprofiled("annotated") if row.name == STEP else None,
        "wall_ms": wall_ms,
        "span_ms": row.span_ns / row.count / 1e6,
        "busy_ms": busy_ms,
        "kernel_ms": row.kernel_ns / row.count / 1e6,
        "idle_percent": idle_percent,
        "launch_bound": verdict if measured.profile.is_gpu else None,
        "kernels": row.kernels / row.count,
    }


def _notes(measured: Sequence[Measured]) -> list[str]:
    """How much of the work has a phase, and what is unusual."""
    if not measured:
        return []
    notes = []
    if all(m.profile.is_gpu for m in measured):
        least = min(m.profile.attributed_percent for m in measured)
        placed, rest = "all", ""
        if least < _ALL_PERCENT:
            placed, rest = f"at least {least:.2f} %", "; the rest has no recorded launch, or one between phases"
        notes.append(
            f"a kernel belongs to the phase that launched it: {placed} of the kernels' time could be given to phases"
            + rest
        )
    else:
        notes.append(
            "no GPU: operations of the CPU stand in the place of kernels, each with the time that it ran without those "
            "that it calls; idle is the time between them, Python's own"
        )
    for m in measured:
        kernels = {row.name: row.kernels for row in m.profile.phases}
        if kernels.get("backward", 0) < kernels.get("forward", 0) and "backward" in kernels:
            notes.append(f"warning: {_words(m)}the backward pass has fewer launches than the forward pass")
    if any(m.profile.of_gpus for m in measured):
        notes.append("the tables of kernels add up what all GPUs ran")
    if any(m.profile.configuration and not m.profile.parts for m in measured):
        notes.append(
            "softmax against matmuls is shown with --attention reference --compile off, for an attention that calls "
            "cs336_basics.model.softmax"
        )
    return notes


def _words(measured: Measured) -> str:
    words = [str(measured.labels[name]) for name in ("size", "context", "precision") if name in measured.labels]
    return f"{' '.join(words)}: " if words else ""


def precision_table(measured: Sequence[Measured], labels: Sequence[Column]) -> Table:
    """Each phase and each part of attention in fp32 and in bf16, all else equal."""
    pairs: dict[str, dict[str, Measured]] = {}
    for m in measured:
        all_else = configuration_key(m.labels, ignore=("precision",))
        pairs.setdefault(all_else, {})[m.labels["precision"]] = m
    rows = []
    for pair in pairs.values():
        if set(pair) == {"fp32", "bf16"}:
            rows += _precision_rows(pair["fp32"], pair["bf16"])
    columns = (
        *labels,
        Column("phase", "phase"),
        Column("fp32_busy_ms", "busy in fp32", "ms"),
        Column("bf16_busy_ms", "busy in bf16", "ms"),
        Column("busy_speedup", "busy speed-up", "ratio"),
        Column("fp32_ms", "without profiler in fp32", "ms"),
        Column("bf16_ms", "without profiler in bf16", "ms"),
        Column("speedup", "speed-up", "ratio"),
    )
    note = "Where kernels gain more than the phase they belong to, the CPU does not launch them fast enough."
    return Table("precisions", "nsys: fp32 against bf16", columns, rows, notes=(note,))


def _precision_rows(fp32: Measured, bf16: Measured) -> list[dict[str, Any]]:
    others = {row.name: row for row in (*bf16.ranges, *bf16.profile.parts)}
    rows = []
    for row in (*fp32.ranges, *fp32.profile.parts):
        if row.name not in others:
            continue
        busy = [row.busy_ns / fp32.steps / 1e6, others[row.name].busy_ns / bf16.steps / 1e6]
        values: dict[str, Any] = {"phase": row.name, "fp32_busy_ms": busy[0], "bf16_busy_ms": busy[1]}
        values["busy_speedup"] = busy[0] / busy[1] if busy[1] else None
        before, after = fp32.unprofiled(row.name), bf16.unprofiled(row.name)
        if before and after:
            values |= {"fp32_ms": before, "bf16_ms": after, "speedup": before.median / after.median}
        rows.append({**fp32.labels, **values})
    return rows
