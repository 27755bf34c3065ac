"""The rates of a machine in saved results: FLOP/s, bandwidth, calls, and what one device needs for a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cs336sys.accounting.communication import bus_factor
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.hardware import OverlapSlowdown
from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.scaling import DeviceTime
from cs336sys.errors import UsageError
from cs336sys.report.numbers import Value
from cs336sys.report.shard import sharding_sent_bytes
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell, Results, Samples, read_several
from cs336sys.sizes import SIZES, ModelSize
from cs336sys.workload import DATA_PARALLEL_STRATEGIES, ParallelWorkload, Workload


@dataclass(frozen=True)
class MeasuredRate:
    """A rate, and where it was measured, in words."""

    value: float
    source: str


def measured_flops(cells: Sequence[Cell], precision: str) -> MeasuredRate:
    """The most model FLOP/s that a whole training step of ``bench`` reached on one device.

    Raises:
        UsageError: no cell of ``bench`` computes in this precision.
    """
    steps = [
        (cell.derived["tflops"], cell)
        for cell in cells
        if cell.command == "bench"
        and cell.configuration.get("precision") == precision
        and cell.configuration.get("mode") == "train"
        and cell.derived.get("tflops")
    ]
    if not steps:
        raise UsageError(
            f"--measured: no step in {precision} to take FLOP/s from; "
            f"measure one with cs336sys bench --precision {precision} --save bench.jsonl"
        )
    tflops, cell = max(steps, key=lambda step: step[0])
    return MeasuredRate(tflops * 1e12, f"bench, {_of(cell)}: model FLOPs of the whole step")


def measured_bandwidth(cells: Sequence[Cell]) -> MeasuredRate:
    """What a rank sent a second in the largest all-reduces, the busbw of ``allreduce``; NCCL's before Gloo's.

    Raises:
        UsageError: no cell of ``allreduce`` is there.
    """
    found = [cell for cell in _all_reduces(cells) if cell.derived.get("back_to_back_busbw_gbps")]
    if not found:
        raise UsageError(
            "--measured: no all-reduce to take a bandwidth from; measure some with "
            "cs336sys allreduce --world-size 2 --save allreduce.jsonl"
        )
    cell = max(found, key=lambda one: (one.configuration["message_bytes"], one.configuration["world_size"]))
    settings = cell.configuration
    source = (
        f"allreduce, {settings['backend']}, {settings['world_size']} ranks, "
        f"{settings['message_bytes'] / 1e6:g} MB: busbw"
    )
    return MeasuredRate(cell.derived["back_to_back_busbw_gbps"] * 1e9, source)


def measured_ranks(cells: Sequence[Cell]) -> dict[int, float]:
    """The same for each number of ranks: bytes a second."""
    of_ranks: dict[int, list[Cell]] = {}
    for cell in _all_reduces(cells):
        if cell.derived.get("back_to_back_busbw_gbps"):
            of_ranks.setdefault(cell.configuration["world_size"], []).append(cell)
    return {ranks: measured_bandwidth(of_ranks[ranks]).value for ranks in sorted(of_ranks)}


def measured_call(cells: Sequence[Cell]) -> MeasuredRate:
    """Seconds of an all-reduce of the smallest message, which its call takes whatever it sends."""
    found = [cell for cell in _all_reduces(cells) if "back_to_back" in cell.samples]
    if not found:
        return MeasuredRate(0.0, "left out")
    cell = min(found, key=lambda one: one.configuration["message_bytes"])
    source = f"allreduce, {cell.configuration['message_bytes']} bytes"
    return MeasuredRate(cell.samples["back_to_back"].median / 1e6, source)


def measured_slowdown(cells: Sequence[Cell]) -> tuple[OverlapSlowdown, str]:
    """What communication and computing cost each other in steps of ``ddp`` in CUDA graphs, and how many those were.

    Of one profiled step it is known how long kernels ran, how long communication ran, and how long both did; of the
    same step without communication, and of communication alone, how long each takes by itself. What kernels took longer
    they lost while both ran. Launched steps are left out, in which a GPU also waits, and steps of copy engines, which
    take no multiprocessors. Medians over the steps.
    """
    computing, communication = [], []
    for cell in cells:
        timeline = cell.derived.get("timeline")
        settings = cell.configuration
        is_replayed = cell.command == "ddp" and settings.get("cuda_graph") == "on"
        by_engines = settings.get("transport") == "copy-engines"
        if (
            not is_replayed
            or by_engines
            or not timeline
            or not {"unsynchronized", "communication"} <= cell.samples.keys()
        ):
            continue
        # What mostly runs by itself says nothing of this.
        if timeline["overlap_ms"] < timeline["communication_ms"] / 2:
            continue
        lost_ms = timeline["compute_ms"] - cell.samples["unsynchronized"].median
        alone_ms = cell.samples["communication"].median
        if 0 <= lost_ms < timeline["overlap_ms"]:
            computing.append(1 - lost_ms / timeline["overlap_ms"])
            communication.append(min(1.0, alone_ms / timeline["communication_ms"]))
    if not computing:
        return OverlapSlowdown(), "assumed: no step of ddp in CUDA graphs says more"
    return OverlapSlowdown(median(computing), median(communication)), f"ddp, {len(computing)} steps in CUDA graphs"


def measured_device_time(
    cells: Sequence[Cell], size: ModelSize, precision: str, state_dtype: str = "fp32"
) -> tuple[DeviceTime, str]:
    """What one device needs, from the fastest step of this size and context in ``bench``; and which step that was.

    Without one of the size, from the step of the most FLOP/s: passes by FLOPs, the optimizer by parameters. Steps that
    update parameters in the backward pass do not tell the two apart.

    Raises:
        UsageError: there is none in this precision with this state.
    """
    steps = [
        cell
        for cell in cells
        if cell.command == "bench"
        and cell.configuration.get("precision") == precision
        and cell.configuration.get("state_dtype") == state_dtype
        and cell.configuration.get("update") == "step"
        and cell.configuration.get("size") in SIZES
        and {"forward", "backward", "optimizer"} <= cell.samples.keys()
    ]
    if not steps:
        more = "" if state_dtype == "fp32" else f" --optimizer adamw --state-dtype {state_dtype}"
        raise UsageError(
            f"--measured: no step in {precision} with state in {state_dtype} has the times of its forward, backward "
            f"and optimizer; measure one with cs336sys bench --precision {precision}{more} --save bench.jsonl"
        )
    alike = [cell for cell in steps if _shape(cell) == (size.d_model, size.d_ff, size.num_layers, size.context)]
    cell = min(alike or steps, key=_seconds_per_flop)
    workload = Workload.from_configuration(cell.configuration)
    passes_s = (cell.samples["forward"].median + cell.samples["backward"].median) / 1e3
    optimizer_s = cell.samples["optimizer"].median / 1e3
    if alike:
        time = DeviceTime(passes_s / workload.size.batch_size, optimizer_s)
        return time, f"bench, {_of(cell)}"
    of_sequence = replace(size, batch_size=1)
    passes_s *= model_flops(of_sequence) / model_flops(workload.size)
    optimizer_s *= count_parameters(size) / count_parameters(workload.size)
    return DeviceTime(passes_s, optimizer_s), f"bench, {_of(cell)}, by FLOPs and parameters"


def _all_reduces(cells: Sequence[Cell]) -> list[Cell]:
    """Measured by ``allreduce``; NCCL's, or Gloo's where there are no others."""
    found = [
        cell for cell in cells if cell.command == "allreduce" and cell.configuration.get("collective") == "all_reduce"
    ]
    return [cell for cell in found if cell.configuration["backend"] == "nccl"] or found


def _of(cell: Cell) -> str:
    settings = cell.configuration
    words = [f"{settings['size']}", f"{settings['precision']}", f"context {settings['context']}"]
    words += [f"batch {settings['batch_size']}", f"compile {settings['compile']}"]
    if settings.get("cuda_graph", "off") != "off":
        words.append(f"CUDA graph {settings['cuda_graph']}")
    if settings.get("kernels", "reference") != "reference":
        words.append(f"kernels {settings['kernels']}")
    if settings.get("state_dtype", "fp32") != "fp32":
        words.append(f"state in {settings['state_dtype']}")
    return " ".join(words)


def _shape(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell.configuration.get(name) for name in ("d_model", "d_ff", "num_layers", "context"))


def _seconds_per_flop(cell: Cell) -> float:
    passes_ms = cell.samples["forward"].median + cell.samples["backward"].median
    return passes_ms / model_flops(Workload.from_configuration(cell.configuration).size)


# Training steps in saved results, beside what the rates of their machine say.


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
