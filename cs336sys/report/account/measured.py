"""Training steps in saved results, beside what the rates of their machine say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336sys.accounting.collectives import bus_factor
from cs336sys.accounting.flops import model_flops
from cs336sys.errors import UsageError
from cs336sys.report.account.rates import MeasuredRate, measured_bandwidth, measured_flops
from cs336sys.report.numbers import Value
from cs336sys.report.parallel.shard import sharding_sent_bytes
from cs336sys.report.tables import Column, Table
from cs336sys.results import Cell, Results, Samples, read_several
from cs336sys.workload import DATA_PARALLEL_STRATEGIES, ParallelWorkload

# A measured step may differ by so much from a predicted one before the table says that the model is wrong.
_TOLERANCE = 0.10

# Whose steps without communication update all parameters on every rank, and those with it a part of them.
_SHARED_UPDATES = ("optimizer", "optimizer-flat", "fsdp", "torch-zero", "torch-fsdp")


def read_measured(paths: Sequence[Path]) -> list[Cell]:
    """The cells of these files that have numbers; a path may name several, ``a.jsonl,b.jsonl``.

    Raises:
        UsageError: a file cannot be read, or all of them together are of several kinds of GPUs (CPUs, without any).
    """
    files: list[Results] = [read_several(str(path)) for path in paths]
    machines = [run.machine for file in files for run in file.runs.values()]
    kinds = sorted({str(machine.get("gpu") or machine.get("cpu")) for machine in machines})
    if len(kinds) > 1:
        raise UsageError(f"--measured: these files are of several machines, {', '.join(kinds)}: give those of one")
    return [cell for file in files for cell in file.cells if cell.status == "ok"]


def compare_with_measured(
    cells: Sequence[Cell], flops: float | None, bandwidth: float | None
) -> tuple[tuple[float, float], list[Table]]:
    """The rates C and W, in FLOP/s of bf16 steps and bytes/s, and the tables of measured steps beside them.

    Args:
        flops, bandwidth: in the place of what was measured.

    Raises:
        UsageError: there is neither a rate nor a measurement of it.
    """
    c = measured_flops(cells, "bf16") if flops is None else MeasuredRate(flops, "--flops")
    w = measured_bandwidth(cells) if bandwidth is None else MeasuredRate(bandwidth, "--bandwidth")
    has_steps = any(cell.command in ("ddp", "shard") for cell in cells)
    return (c.value, w.value), [measured_steps_table(cells, c, w)] if has_steps else []


def measured_steps_table(cells: Sequence[Cell], flops: MeasuredRate, bandwidth: MeasuredRate) -> Table:
    """Each step of ``ddp`` and ``shard`` beside two predictions: communication beside computing, and after it."""
    rows = [row for cell in cells if cell.command in ("ddp", "shard") if (row := _row(cell, flops, bandwidth))]
    columns = (
        Column("command", "command"),
        Column("strategy", "strategy"),
        Column("size", "size"),
        Column("precision", "precision"),
        Column("compile", "compile"),
        Column("cuda_graph", "graph"),
        Column("ranks", "ranks"),
        Column("predicted_computing_ms", "computing at C", "ms"),
        Column("computing_ms", "computing, measured", "ms"),
        Column("sent_bytes", "sent", "decimal_bytes"),
        Column("communication_ms", "communication at W", "ms"),
        Column("overlapped_ms", "step, overlapped", "ms"),
        Column("in_turn_ms", "step, in turn", "ms"),
        Column("step_ms", "step, measured", "ms"),
        Column("off_percent", "off the nearer", "percent"),
        Column("verdict", "what the model misses"),
    )
    notes = (
        f"C is {flops.value / 1e12:.4g} TFLOP/s ({flops.source}); W is {bandwidth.value / 1e9:.4g} GB/s "
        f"({bandwidth.source}).",
        "computing, measured: the same step without communication; both predictions start from it, so that they judge "
        "communication alone. overlapped: the longer of both; in turn: their sum.",
        f"A step between both predictions, or within {100 * _TOLERANCE:g} % of them, is explained by them.",
    )
    return Table("measured", "Steps of several ranks beside the model", columns, rows, notes)


def _row(cell: Cell, flops: MeasuredRate, bandwidth: MeasuredRate) -> dict[str, Value] | None:
    if not {"step", "unsynchronized"} <= cell.samples.keys():
        return None
    workload = ParallelWorkload.from_configuration(cell.configuration)
    sent = _sent_bytes(cell, workload)
    if sent is None:
        return None
    training, ranks = workload.training, workload.world_size
    computing_ms, step_ms = cell.samples["unsynchronized"].median, cell.samples["step"].median
    communication_ms = sent / bandwidth.value * 1e3
    overlapped_ms, in_turn_ms = max(computing_ms, communication_ms), computing_ms + communication_ms
    nearer = min(max(step_ms, overlapped_ms), in_turn_ms)
    return {
        "command": cell.command,
        "strategy": _strategy(workload),
        "size": training.size.name,
        "precision": training.precision,
        "compile": training.compile,
        "cuda_graph": training.cuda_graph,
        "ranks": ranks,
        "predicted_computing_ms": model_flops(training.size) / ranks / flops.value * 1e3,
        "computing_ms": computing_ms,
        "sent_bytes": sent,
        "communication_ms": communication_ms,
        "overlapped_ms": overlapped_ms,
        "in_turn_ms": in_turn_ms,
        "step_ms": step_ms,
        "off_percent": 100 * (step_ms / nearer - 1),
        "verdict": _verdict(cell, step_ms, overlapped_ms, in_turn_ms),
    }


def _verdict(cell: Cell, step_ms: float, overlapped_ms: float, in_turn_ms: float) -> str:
    """What a step that is outside of both predictions has that they do not count."""
    if step_ms < overlapped_ms * (1 - _TOLERANCE):
        strategy = cell.configuration["strategy"]
        if strategy in _SHARED_UPDATES or strategy.startswith("fsdp+"):
            return "faster than its parts: less is updated than without communication"
        return "faster than its parts, although as much is computed: noise"
    if step_ms <= in_turn_ms * (1 + _TOLERANCE):
        return ""
    alone: Samples | None = cell.samples.get("communication")
    more_ms = step_ms - in_turn_ms
    if alone is not None and alone.median - (in_turn_ms - cell.samples["unsynchronized"].median) > more_ms / 2:
        return "calls: communication alone takes longer than its bytes at W"
    return "launches, or kernels that communication slows"


def _sent_bytes(cell: Cell, workload: ParallelWorkload) -> float | None:
    """What a rank sends in a step: as counted, else by the formula; of data parallel ones that of all-reduces."""
    counted: Any = cell.derived.get("sent_bytes")
    if counted:
        return float(counted)
    if workload.strategy in DATA_PARALLEL_STRATEGIES:
        communicated = cell.derived.get("communicated_bytes")
        return None if not communicated else communicated * bus_factor("all_reduce", workload.world_size)
    return sharding_sent_bytes(workload)


def _strategy(workload: ParallelWorkload) -> str:
    words = [workload.strategy, *([] if workload.mesh is None else [workload.mesh])]
    return " ".join([*words, *(["copy engines"] if workload.transport == "copy-engines" else [])])
