"""The rates of a machine in saved results: FLOP/s, bandwidth, calls, and what one device needs for a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cs336sys.accounting.communication import bus_factor, measured_slowdown
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.hardware import NVLINK_BYTES_PER_S, Cluster
from cs336sys.accounting.scaling import DeviceTime, Dtypes
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, read_several
from cs336sys.settings.parallel import DATA_PARALLEL_STRATEGIES, ParallelWorkload
from cs336sys.settings.sizes import SIZES, ModelSize
from cs336sys.settings.strategies import STRATEGIES
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import Value
from cs336sys.tables.table import Column, Table, fill_row, named_columns, sentences

_FLOPS = 4e14  # An H200 reaches 4.19e14 in a step of xl with fused kernels: docs/results/bench-turn-h200.jsonl.gz.


@dataclass(frozen=True)
class MeasuredRate:
    """A rate, and where it was measured, in words."""

    value: float
    source: str


def measured_flops(cells: Sequence[Cell], precision: str) -> MeasuredRate:
    """Return the most model FLOP/s that a whole training step of ``bench`` reached on one device."""
    steps = [cell for cell in _bench(cells, {"precision": precision, "mode": "train"}) if cell.derived.get("tflops")]
    if not steps:
        raise UsageError(*sentences(__name__, "no_flops", precision=precision))
    cell = max(steps, key=lambda step: step.derived["tflops"])
    source = f"bench, {_bench_step_label(cell)}: model FLOPs of the whole step"
    return MeasuredRate(cell.derived["tflops"] * 1e12, source)


def measured_bandwidth(cells: Sequence[Cell]) -> MeasuredRate:
    """Return the bytes/s that a rank sent (bus bandwidth) in the largest all-reduce, of several that of most ranks."""
    all_reduces = [cell for cell in _all_reduces(cells) if cell.derived.get("back_to_back_busbw_gbps")]
    if not all_reduces:
        raise UsageError(*sentences(__name__, "no_bandwidth"))
    largest = max(all_reduces, key=lambda cell: [cell.configuration[name] for name in ("message_bytes", "world_size")])
    settings = largest.configuration
    source = f"{settings['backend']}, {settings['world_size']} ranks, {settings['message_bytes'] / 1e6:g} MB: busbw"
    return MeasuredRate(largest.derived["back_to_back_busbw_gbps"] * 1e9, f"allreduce, {source}")


def measured_ranks(cells: Sequence[Cell]) -> dict[int, float]:
    """Return the bytes/s that a rank sent in the largest all-reduce of each number of ranks, the fewest first."""
    cells_by_ranks: dict[int, list[Cell]] = {}
    for cell in _all_reduces(cells):
        if cell.derived.get("back_to_back_busbw_gbps"):
            cells_by_ranks.setdefault(cell.configuration["world_size"], []).append(cell)
    return {ranks: measured_bandwidth(of_ranks).value for ranks, of_ranks in sorted(cells_by_ranks.items())}


def measured_call(cells: Sequence[Cell]) -> MeasuredRate:
    """Return the seconds of an all-reduce of the smallest message, which its call takes whatever it sends."""
    all_reduces = [cell for cell in _all_reduces(cells) if "back_to_back" in cell.samples]
    if not all_reduces:
        return MeasuredRate(0.0, source="left out")
    cell = min(all_reduces, key=lambda candidate: candidate.configuration["message_bytes"])
    source = f"allreduce, {cell.configuration['message_bytes']} bytes"
    return MeasuredRate(cell.samples["back_to_back"].median / 1e6, source)  # Its samples are in microseconds.


def measured_device_time(
    cells: Sequence[Cell], size: ModelSize, precision: str, state_dtype: str = "fp32"
) -> tuple[DeviceTime, str]:
    """Return what one device needs, from the fastest step of this size and context in ``bench``, and its name.

    Without one of the size, from the step of the most FLOP/s: passes scaled by FLOPs, the optimizer by parameters.
    Steps that update parameters in the backward pass do not tell the two apart.
    """
    settings = {"precision": precision, "state_dtype": state_dtype, "update": "step"}
    steps = [
        cell
        for cell in _bench(cells, settings)
        if cell.configuration.get("size") in SIZES and {"forward", "backward", "optimizer"} <= cell.samples.keys()
    ]
    if not steps:
        raise UsageError(*sentences(__name__, "no_device_time", precision=precision, state_dtype=state_dtype))
    shape = ("d_model", "d_ff", "num_layers", "context")
    alike = [cell for cell in steps if all(cell.configuration.get(name) == getattr(size, name) for name in shape)]
    cell = min(alike or steps, key=_ms_per_flop)
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
    """Return one device's time, measured or from FLOP/s, and a note that says which."""
    if flops is not None and cells:
        raise UsageError("--flops and --measured: both say how fast a device is; give one of them")
    if cells:
        time, source = measured_device_time(cells, size, dtypes.computed, dtypes.state)
    else:
        rate = _FLOPS if flops is None else flops
        if rate <= 0:
            raise UsageError(f"--flops {rate:g}: must be positive")
        time = DeviceTime(model_flops(replace(size, batch_size=1)) / rate, optimizer_s=0.0)
        source = f"{rate:g} FLOP/s, {'assumed' if flops is None else '--flops'}; no time for the optimizer"
    (note,) = sentences(__name__, "device", time=time, source=source)
    return time, note


def simulated_cluster(
    cells: Sequence[Cell], bandwidth: float | None, node_bandwidth: float, node_devices: int, memory_bytes: float
) -> tuple[Cluster, Sequence[str]]:
    """Return devices with the links that were measured, or given in bytes/s, and notes that say which."""
    call, by_ranks = measured_call(cells), measured_ranks(cells) if bandwidth is None else {}
    if bandwidth is not None:
        rate = MeasuredRate(bandwidth, "--bandwidth")
    elif any(cell.command == "allreduce" for cell in cells):
        rate = measured_bandwidth(cells)
    else:
        rate = MeasuredRate(NVLINK_BYTES_PER_S, source="")  # The note then says that it is assumed.
    slowdown, steps = measured_slowdown(cells)
    links = node_devices, rate.value, node_bandwidth, call.value, memory_bytes
    cluster = Cluster(*links, ranks_bytes_per_s=tuple(by_ranks.items()), slowdown=slowdown)
    return cluster, sentences(__name__, "links", cluster=cluster, call=call, source=rate.source, steps=steps)


def _bench(cells: Sequence[Cell], settings: Mapping[str, str]) -> list[Cell]:
    return [cell for cell in cells if cell.command == "bench" and settings.items() <= cell.configuration.items()]


def _all_reduces(cells: Sequence[Cell]) -> list[Cell]:
    """Return all-reduces that ``allreduce`` measured: NCCL's, or Gloo's where there are no others."""
    all_reduces = [
        cell for cell in cells if cell.command == "allreduce" and cell.configuration.get("collective") == "all_reduce"
    ]
    return [cell for cell in all_reduces if cell.configuration["backend"] == "nccl"] or all_reduces


def _bench_step_label(cell: Cell) -> str:
    """Name a cell of ``bench`` by its settings."""
    settings = cell.configuration
    label = "{size} {precision} context {context} batch {batch_size} compile {compile}".format(**settings)
    # By setting: its name in a label, and its default, which labels leave out.
    names = {"cuda_graph": ("CUDA graph", "off"), "kernels": ("kernels", "reference")}
    names["state_dtype"] = ("state in", "fp32")
    for name, (word, default) in names.items():
        if settings.get(name, default) != default:
            label += f" {word} {settings[name]}"
    return label


def _ms_per_flop(cell: Cell) -> float:
    passes_ms = cell.samples["forward"].median + cell.samples["backward"].median
    return passes_ms / model_flops(Workload.from_configuration(cell.configuration).size)


_TOLERANCE = 0.10  # A measured step may be so far off a predicted one before the table says that the model is wrong.


def read_measured(paths: Sequence[Path]) -> list[Cell]:
    """Return the cells of these files that have numbers; a path may name several, ``a.jsonl,b.jsonl``.

    A UsageError says that one cannot be read, or that they are of several kinds of GPUs, or of CPUs without a GPU.
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
    """Return C, FLOP/s of bf16 steps, and W, bytes/s, as measured or given; and the table of measured steps, if any.

    It compares each step of ``ddp`` and ``shard`` with two predictions: full overlap, and none.
    """
    flops_rate = measured_flops(cells, "bf16") if flops is None else MeasuredRate(flops, "--flops")
    bytes_rate = measured_bandwidth(cells) if bandwidth is None else MeasuredRate(bandwidth, "--bandwidth")
    steps = [cell for cell in cells if cell.command in ("ddp", "shard")]
    rows = [row for cell in steps if (row := _measured_step_row(cell, flops_rate, bytes_rate))]
    columns = (
        *_STEP_COLUMNS,
        *named_columns(predicted_computing_ms="computing at C", computing_ms="computing, measured"),
        Column("sent_bytes", "sent", "decimal_bytes"),
        *named_columns(communication_ms="communication at W", overlapped_ms="step, overlapped"),
        *named_columns(in_turn_ms="step, not overlapped", step_ms="step, measured", off_percent="off the nearer"),
        *named_columns(verdict="what the model misses"),
    )
    facts = {"flops": flops_rate, "bandwidth": bytes_rate, "tolerance_percent": 100 * _TOLERANCE}
    title, notes = "Steps of several ranks compared with the model", sentences(__name__, "measured", **facts)
    table = Table("measured", title, columns, rows, notes)
    return (flops_rate.value, bytes_rate.value), [table] if steps else []


def _strategy_label(workload: ParallelWorkload) -> str:
    engines = "copy engines" if workload.uses_copy_engines else None
    return " ".join(word for word in (workload.strategy, workload.mesh, engines) if word is not None)


# Of the workload of a step.
_STEP_COLUMNS = (
    Column("command", "command"),
    Column("strategy", "strategy", value=_strategy_label),
    Column("size", "size", value=lambda workload: workload.training.size.name),
    Column("precision", "precision", value=lambda workload: workload.training.precision),
    Column("compile", "compile", value=lambda workload: workload.training.compile),
    Column("cuda_graph", "graph", value=lambda workload: workload.training.cuda_graph),
    Column("ranks", "ranks", value=lambda workload: workload.world_size),
)


def _measured_step_row(cell: Cell, flops: MeasuredRate, bandwidth: MeasuredRate) -> dict[str, Value] | None:
    """Return the row of a step; None if the step without communication, or the bytes sent, are unknown."""
    if not {"step", "unsynchronized"} <= cell.samples.keys():
        return None
    workload = ParallelWorkload.from_configuration(cell.configuration)
    sent = _sent_bytes(cell, workload)
    if sent is None:
        return None
    computing_ms, step_ms = cell.samples["unsynchronized"].median, cell.samples["step"].median
    communication_ms = sent / bandwidth.value * 1e3
    overlapped_ms, in_turn_ms = max(computing_ms, communication_ms), computing_ms + communication_ms
    # The prediction that is nearer, or the step's own time between both: it is off by nothing.
    nearest_ms = min(max(step_ms, overlapped_ms), in_turn_ms)
    return fill_row(_STEP_COLUMNS, workload) | {
        "command": cell.command,
        "predicted_computing_ms": model_flops(workload.training.size) / workload.world_size / flops.value * 1e3,
        "computing_ms": computing_ms,
        "sent_bytes": sent,
        "communication_ms": communication_ms,
        "overlapped_ms": overlapped_ms,
        "in_turn_ms": in_turn_ms,
        "step_ms": step_ms,
        "off_percent": 100 * (step_ms / nearest_ms - 1),
        "verdict": _verdict(cell, step_ms, overlapped_ms, in_turn_ms),
    }


def _verdict(cell: Cell, step_ms: float, overlapped_ms: float, in_turn_ms: float) -> str:
    """Say what a step outside of both predictions has that they do not count; nothing of one between them."""
    if step_ms < overlapped_ms * (1 - _TOLERANCE):
        if STRATEGIES[cell.configuration["strategy"]].shares_updates:
            return "faster than its parts: less is updated than without communication"
        return "faster than its parts, although as much is computed: noise"
    if step_ms <= in_turn_ms * (1 + _TOLERANCE):
        return ""
    communication = cell.samples.get("communication")
    # At W, the measured bandwidth. Calls explain a step's excess where communication alone has half as much.
    sent_ms = in_turn_ms - cell.samples["unsynchronized"].median
    if communication is not None and communication.median - sent_ms > (step_ms - in_turn_ms) / 2:
        return "calls: communication alone takes longer than its bytes at W"
    return "launches, or kernels that communication slows"


def _sent_bytes(cell: Cell, workload: ParallelWorkload) -> float | None:
    """Return the bytes that a rank sends in a step; None where they were not counted."""
    if workload.strategy not in DATA_PARALLEL_STRATEGIES:
        return cell.derived.get("sent_bytes")
    gradient_bytes = cell.derived.get("communicated_bytes")
    return gradient_bytes and gradient_bytes * bus_factor("all_reduce", workload.world_size)
