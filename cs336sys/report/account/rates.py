"""The rates of a machine in saved results: FLOP/s, bandwidth, calls, and what one device needs for a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cs336sys.accounting.cluster import OverlapSlowdown
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.scaling import DeviceTime
from cs336sys.errors import UsageError
from cs336sys.results import Cell
from cs336sys.sizes import SIZES, ModelSize
from cs336sys.workload import Workload


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
