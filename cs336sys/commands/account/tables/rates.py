"""The rates of a machine in saved results: FLOP/s, bandwidth, calls, and what one device needs for a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cs336sys.accounting.communication import bus_factor
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.hardware import Cluster, OverlapSlowdown
from cs336sys.accounting.scaling import DeviceTime, Dtypes
from cs336sys.accounting.sharding.cells import sharding_sent_bytes
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, read_several
from cs336sys.settings.parallel import DATA_PARALLEL_STRATEGIES, ParallelWorkload
from cs336sys.settings.sizes import SIZES, ModelSize
from cs336sys.settings.strategies import STRATEGIES
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import Value
from cs336sys.tables.table import Column, Table, fill_row, named_columns

# An H200 reaches 4.19e14 in a step of xl with fused kernels: docs/results/bench-turn-h200.jsonl.gz.
_FLOPS = 4e14

# NVLink 4: 18 links of 25 GB/s each way.
_NVLINK_BYTES_PER_S = 450e9


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
    steps = [cell for cell in _bench(cells, {"precision": precision, "mode": "train"}) if cell.derived.get("tflops")]
    if not steps:
        raise UsageError(
            f"--measured: no step in {precision} to take FLOP/s from; "
            f"measure one with cs336sys bench --precision {precision} --save bench.jsonl"
        )
    cell = max(steps, key=lambda step: step.derived["tflops"])
    source = f"bench, {_bench_step_label(cell)}: model FLOPs of the whole step"
    return MeasuredRate(cell.derived["tflops"] * 1e12, source)


def measured_bandwidth(cells: Sequence[Cell]) -> MeasuredRate:
    """Return what a rank sent per second in the largest all-reduces, the busbw of ``allreduce``; NCCL's before Gloo's.

    Raises:
        UsageError: no cell of ``allreduce`` is there.
    """
    all_reduces = [cell for cell in _all_reduces(cells) if cell.derived.get("back_to_back_busbw_gbps")]
    if not all_reduces:
        raise UsageError(
            "--measured: no all-reduce to take a bandwidth from; measure some with "
            "cs336sys allreduce --world-size 2 --save allreduce.jsonl"
        )
    cell = max(all_reduces, key=lambda cell: [cell.configuration[name] for name in ("message_bytes", "world_size")])
    settings = cell.configuration
    source = f"{settings['backend']}, {settings['world_size']} ranks, {settings['message_bytes'] / 1e6:g} MB: busbw"
    return MeasuredRate(cell.derived["back_to_back_busbw_gbps"] * 1e9, f"allreduce, {source}")


def measured_ranks(cells: Sequence[Cell]) -> dict[int, float]:
    """The same for each number of ranks: bytes a second."""
    by_ranks: dict[int, list[Cell]] = {}
    for cell in _all_reduces(cells):
        if cell.derived.get("back_to_back_busbw_gbps"):
            by_ranks.setdefault(cell.configuration["world_size"], []).append(cell)
    return {ranks: measured_bandwidth(by_ranks[ranks]).value for ranks in sorted(by_ranks)}


def measured_call(cells: Sequence[Cell]) -> MeasuredRate:
    """Seconds of an all-reduce of the smallest message, which its call takes whatever it sends."""
    all_reduces = [cell for cell in _all_reduces(cells) if "back_to_back" in cell.samples]
    if not all_reduces:
        return MeasuredRate(0.0, "left out")
    cell = min(all_reduces, key=lambda candidate: candidate.configuration["message_bytes"])
    source = f"allreduce, {cell.configuration['message_bytes']} bytes"
    return MeasuredRate(cell.samples["back_to_back"].median / 1e6, source)


def measured_slowdown(cells: Sequence[Cell]) -> tuple[OverlapSlowdown, str]:
    """Return what communication and computing cost each other in how many steps of ``ddp`` in CUDA graphs.

    Of one profiled step it is known how long kernels ran, how long communication ran, and how long both did; of the
    same step without communication, and of communication alone, how long each takes by itself. What kernels took longer
    they lost while both ran. Launched steps are left out, in which a GPU also waits, and steps of copy engines, which
    take no multiprocessors. Medians over the steps.
    """
    computing, communication = [], []
    for cell in cells:
        timeline, settings = cell.derived.get("timeline"), cell.configuration
        is_replayed = cell.command == "ddp" and settings.get("cuda_graph") == "on"
        is_whole = {"unsynchronized", "communication"} <= cell.samples.keys()
        if not timeline or not is_replayed or not is_whole or settings.get("transport") == "copy-engines":
            continue
        overlap_ms, sent_ms = timeline["overlap_ms"], timeline["communication_ms"]
        lost_ms = timeline["compute_ms"] - cell.samples["unsynchronized"].median
        # What mostly runs by itself says nothing of this.
        if overlap_ms >= sent_ms / 2 and 0 <= lost_ms < overlap_ms:
            computing.append(1 - lost_ms / overlap_ms)
            communication.append(min(1.0, cell.samples["communication"].median / sent_ms))
    if not computing:
        return OverlapSlowdown(), "assumed: no step of ddp in CUDA graphs says more"
    return OverlapSlowdown(median(computing), median(communication)), f"ddp, {len(computing)} steps in CUDA graphs"


def measured_device_time(
    cells: Sequence[Cell], size: ModelSize, precision: str, state_dtype: str = "fp32"
) -> tuple[DeviceTime, str]:
    """Return what one device needs, from the fastest step of this size and context in ``bench``, and its name.

    Without one of the size, from the step of the most FLOP/s: passes by FLOPs, the optimizer by parameters. Steps that
    update parameters in the backward pass do not tell the two apart.

    Raises:
        UsageError: there is none in this precision with this state.
    """
    settings = {"precision": precision, "state_dtype": state_dtype, "update": "step"}
    steps = [
        cell
        for cell in _bench(cells, settings)
        if cell.configuration.get("size") in SIZES and {"forward", "backward", "optimizer"} <= cell.samples.keys()
    ]
    if not steps:
        state_options = "" if state_dtype == "fp32" else f" --optimizer adamw --state-dtype {state_dtype}"
        raise UsageError(
            f"--measured: no step in {precision} with state in {state_dtype} has the times of its forward, backward "
            f"and optimizer; measure one with cs336sys bench --precision {precision}{state_options} --save bench.jsonl"
        )
    shape = ("d_model", "d_ff", "num_layers", "context")
    alike = [cell for cell in steps if all(cell.configuration.get(name) == getattr(size, name) for name in shape)]
    cell = min(alike or steps, key=_seconds_per_flop)
    workload = Workload.from_configuration(cell.configuration)
    passes_s = (cell.samples["forward"].median + cell.samples["backward"].median) / 1e3
    optimizer_s = cell.samples["optimizer"].median / 1e3
    source = f"bench, {_bench_step_label(cell)}"
    if alike:
        return DeviceTime(passes_s / workload.size.batch_size, optimizer_s), source
    passes_s *= model_flops(replace(size, batch_size=1)) / model_flops(workload.size)
    optimizer_s *= count_parameters(size) / count_parameters(workload.size)
    return DeviceTime(passes_s, optimizer_s), f"{source}, by FLOPs and parameters"


def device_time(cells: Sequence[Cell], size: ModelSize, dtypes: Dtypes, flops: float | None) -> tuple[DeviceTime, str]:
    """One device's time, measured or from FLOP/s, and a note that says which.

    Raises:
        UsageError: there are both, or what was measured says nothing of it.
    """
    if flops is not None and cells:
        raise UsageError("--flops and --measured: both say how fast a device is; give one of them")
    if cells:
        time, source = measured_device_time(cells, size, dtypes.computed, dtypes.state)
    else:
        rate = _FLOPS if flops is None else flops
        if rate <= 0:
            raise UsageError(f"--flops {rate:g}: must be positive")
        time = DeviceTime(model_flops(replace(size, batch_size=1)) / rate, 0.0)
        source = f"{rate:g} FLOP/s, {'assumed' if flops is None else '--flops'}; no time for the optimizer"
    sequence_ms, optimizer_ms = 1e3 * time.sequence_s, 1e3 * time.optimizer_s
    return time, f"One device: {sequence_ms:.4g} ms a sequence, {optimizer_ms:.4g} ms for the optimizer ({source})."


def simulated_cluster(
    cells: Sequence[Cell], bandwidth: float | None, node_bandwidth: float, node_devices: int, memory_bytes: float
) -> tuple[Cluster, list[str]]:
    """Devices with the links that were measured, or given, and notes that say which."""
    call, of_ranks = measured_call(cells), measured_ranks(cells) if bandwidth is None else {}
    if bandwidth is not None:
        in_node, source = bandwidth, f"{bandwidth / 1e9:.4g} GB/s in a node (--bandwidth)."
    elif not any(cell.command == "allreduce" for cell in cells):
        in_node, source = _NVLINK_BYTES_PER_S, "450 GB/s in a node: NVLink 4, assumed (--bandwidth)."
    else:
        rate = measured_bandwidth(cells)
        fewer = [f", {of_ranks[ranks] / 1e9:.4g} among {ranks} ranks" for ranks in sorted(of_ranks)[:-1]]
        in_node, source = rate.value, f"{rate.value / 1e9:.4g} GB/s in a node ({rate.source}){''.join(fewer)}."
    slowdown, steps = measured_slowdown(cells)
    ranks_bytes_per_s = tuple(of_ranks.items())
    cluster = Cluster(node_devices, in_node, node_bandwidth, call.value, memory_bytes, ranks_bytes_per_s, slowdown)
    return cluster, [
        source,
        f"{1e6 * call.value:.4g} us a collective, besides its bytes ({call.source}).",
        f"{node_bandwidth / 1e9:.4g} GB/s a device between nodes of {node_devices} (--node-bandwidth, --node-size): "
        "assumed; tp ranks share a node, and a ring over several nodes is as fast as that.",
        f"Beside each other computing has {slowdown.computing:.3g} of its speed, and communication "
        f"{slowdown.communication:.3g} ({steps}).",
    ]


def _bench(cells: Sequence[Cell], settings: Mapping[str, str]) -> list[Cell]:
    return [cell for cell in cells if cell.command == "bench" and settings.items() <= cell.configuration.items()]


def _all_reduces(cells: Sequence[Cell]) -> list[Cell]:
    """Measured by ``allreduce``; NCCL's, or Gloo's where there are no others."""
    all_reduces = [
        cell for cell in cells if cell.command == "allreduce" and cell.configuration.get("collective") == "all_reduce"
    ]
    return [cell for cell in all_reduces if cell.configuration["backend"] == "nccl"] or all_reduces


def _bench_step_label(cell: Cell) -> str:
    settings = cell.configuration
    parts = [f"{settings['size']}", f"{settings['precision']}", f"context {settings['context']}"]
    parts += [f"batch {settings['batch_size']}", f"compile {settings['compile']}"]
    # What everybody assumes is not named.
    for name, (word, assumed) in _NAMED.items():
        if settings.get(name, assumed) != assumed:
            parts.append(f"{word} {settings[name]}")
    return " ".join(parts)


_NAMED = {"cuda_graph": ("CUDA graph", "off"), "kernels": ("kernels", "reference"), "state_dtype": ("state in", "fp32")}


def _seconds_per_flop(cell: Cell) -> float:
    passes_ms = cell.samples["forward"].median + cell.samples["backward"].median
    return passes_ms / model_flops(Workload.from_configuration(cell.configuration).size)


# A measured step may differ by so much from a predicted one before the table says that the model is wrong.
_TOLERANCE = 0.10


def read_measured(paths: Sequence[Path]) -> list[Cell]:
    """The cells of these files that have numbers; a path may name several, ``a.jsonl,b.jsonl``.

    Raises:
        UsageError: a file cannot be read, or all of them together are of several kinds of GPUs (CPUs, without any).
    """
    files: list[Results] = [read_several(str(path)) for path in paths]
    machines = [run.machine for file in files for run in file.runs.values()]
    kinds = sorted({str(machine.get("gpu") or machine.get("cpu")) for machine in machines})
    if len(kinds) > 1:
        raise UsageError(
            f"--measured: these files are from several machines, {', '.join(kinds)}: give files of one machine"
        )
    return [cell for file in files for cell in file.cells if cell.status == "ok"]


def compare_with_measured(
    cells: Sequence[Cell], flops: float | None, bandwidth: float | None
) -> tuple[tuple[float, float], list[Table]]:
    """The rates C and W, in FLOP/s of bf16 steps and bytes/s, and the tables of measured steps next to them.

    Args:
        flops, bandwidth: instead of what was measured.

    Raises:
        UsageError: there is neither a rate nor a measurement of it.
    """
    c = measured_flops(cells, "bf16") if flops is None else MeasuredRate(flops, "--flops")
    w = measured_bandwidth(cells) if bandwidth is None else MeasuredRate(bandwidth, "--bandwidth")
    has_steps = any(cell.command in ("ddp", "shard") for cell in cells)
    return (c.value, w.value), [measured_steps_table(cells, c, w)] if has_steps else []


# Of the workload of a step.
_STEP_COLUMNS = (
    Column("command", "command"),
    Column("strategy", "strategy", value=lambda workload: _strategy(workload)),
    Column("size", "size", value=lambda workload: workload.training.size.name),
    Column("precision", "precision", value=lambda workload: workload.training.precision),
    Column("compile", "compile", value=lambda workload: workload.training.compile),
    Column("cuda_graph", "graph", value=lambda workload: workload.training.cuda_graph),
    Column("ranks", "ranks", value=lambda workload: workload.world_size),
)


def measured_steps_table(cells: Sequence[Cell], flops: MeasuredRate, bandwidth: MeasuredRate) -> Table:
    """Compare each step of ``ddp`` and ``shard`` with two predictions: full overlap, and none."""
    steps = [cell for cell in cells if cell.command in ("ddp", "shard")]
    rows = [row for cell in steps if (row := _measured_step_row(cell, flops, bandwidth))]
    columns = (
        *_STEP_COLUMNS,
        *named_columns(predicted_computing_ms="computing at C", computing_ms="computing, measured"),
        Column("sent_bytes", "sent", "decimal_bytes"),
        *named_columns(communication_ms="communication at W", overlapped_ms="step, overlapped"),
        *named_columns(in_turn_ms="step, not overlapped", step_ms="step, measured", off_percent="off the nearer"),
        *named_columns(verdict="what the model misses"),
    )
    notes = (
        f"C is {flops.value / 1e12:.4g} TFLOP/s ({flops.source}); W is {bandwidth.value / 1e9:.4g} GB/s "
        f"({bandwidth.source}).",
        "computing, measured: the same step without communication, from which both predictions start. overlapped: the "
        "longer of computing and communication; not overlapped: their sum.",
        f"A step between both predictions, or within {100 * _TOLERANCE:g} % of them, is explained by them.",
    )
    return Table("measured", "Steps of several ranks compared with the model", columns, rows, notes)


def _measured_step_row(cell: Cell, flops: MeasuredRate, bandwidth: MeasuredRate) -> dict[str, Value] | None:
    if not {"step", "unsynchronized"} <= cell.samples.keys():
        return None
    workload = ParallelWorkload.from_configuration(cell.configuration)
    sent = _sent_bytes(cell, workload)
    if sent is None:
        return None
    computing_ms, step_ms = cell.samples["unsynchronized"].median, cell.samples["step"].median
    predicted_ms = model_flops(workload.training.size) / workload.world_size / flops.value * 1e3
    communication_ms = sent / bandwidth.value * 1e3
    overlapped_ms, in_turn_ms = max(computing_ms, communication_ms), computing_ms + communication_ms
    nearer = min(max(step_ms, overlapped_ms), in_turn_ms)
    row = fill_row(_STEP_COLUMNS, workload) | {"command": cell.command, "sent_bytes": sent, "step_ms": step_ms}
    row |= {"predicted_computing_ms": predicted_ms, "computing_ms": computing_ms, "communication_ms": communication_ms}
    row |= {"overlapped_ms": overlapped_ms, "in_turn_ms": in_turn_ms, "off_percent": 100 * (step_ms / nearer - 1)}
    return row | {"verdict": _verdict(cell, step_ms, overlapped_ms, in_turn_ms)}


def _verdict(cell: Cell, step_ms: float, overlapped_ms: float, in_turn_ms: float) -> str:
    """Say what a step outside of both predictions has that they do not count."""
    if step_ms < overlapped_ms * (1 - _TOLERANCE):
        if STRATEGIES[cell.configuration["strategy"]].shares_updates:
            return "faster than its parts: less is updated than without communication"
        return "faster than its parts, although as much is computed: noise"
    if step_ms <= in_turn_ms * (1 + _TOLERANCE):
        return ""
    communication = cell.samples.get("communication")
    sent_ms = in_turn_ms - cell.samples["unsynchronized"].median
    if communication is not None and communication.median - sent_ms > (step_ms - in_turn_ms) / 2:
        return "calls: communication alone takes longer than its bytes at W"
    return "launches, or kernels that communication slows"


def _sent_bytes(cell: Cell, workload: ParallelWorkload) -> float | None:
    """Return what a rank sends in a step: as counted, else by the formula, of data parallel ones of all-reduces."""
    sent_bytes: Any = cell.derived.get("sent_bytes")
    if sent_bytes:
        return float(sent_bytes)
    if workload.strategy in DATA_PARALLEL_STRATEGIES:
        communicated = cell.derived.get("communicated_bytes")
        return None if not communicated else communicated * bus_factor("all_reduce", workload.world_size)
    return sharding_sent_bytes(workload)


def _strategy(workload: ParallelWorkload) -> str:
    engines = "copy engines" if workload.uses_copy_engines else None
    return " ".join(word for word in (workload.strategy, workload.mesh, engines) if word is not None)
