"""Measures one cell of ``bench``: steps in CUDA graphs or of our kernels are checked first, then phases are timed."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.experiments import user_models
from cs336sys.experiments.step_counts import counted_columns
from cs336sys.experiments.training import TrainStep, loss_warnings, set_matmul_precision, time_steps, with_notes
from cs336sys.experiments.training_check import Checked, check_training
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.device import choose_device
from cs336sys.measure.gpu_readings import reading_gpu
from cs336sys.measure.memory import peak_memory_gib, peak_resident_gib, reset_peak_memory, reset_peak_resident
from cs336sys.measure.timing import gpu_busy_ms
from cs336sys.results import Samples
from cs336sys.workload import Workload


def measure_training(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``bench``: runs in the worker process.

    Samples (ms): one series a phase, ``step`` and ``wall``. Derived columns: see ``docs/columns.md``.
    """
    workload = Workload.from_configuration(configuration)
    with user_models.telling_user_errors(workload):
        return _measure(workload, progress)


def _measure(workload: Workload, progress: Progress) -> Outcome:
    device = choose_device(workload.device)
    set_matmul_precision(workload)
    checked, wrong = check_training(workload, device, progress)
    if wrong is not None:
        return wrong
    progress("building the model")
    resident_before_gib = reset_peak_resident() if device.type == "cpu" else None
    started = time.perf_counter()
    step = TrainStep(workload, device)
    build_s = time.perf_counter() - started
    counted = counted_columns(step, progress)
    reset_peak_memory(device)
    if workload.cuda_graph == "on":
        progress("capturing")
        step.capture()
        build_s = time.perf_counter() - started
    with reading_gpu(device) as readings:
        samples = time_steps(step, step.phases, progress)
    peak_gib = peak_memory_gib(device)
    busy_ms = None
    if device.type == "cuda":
        progress("profiling one step")
        busy_ms = gpu_busy_ms(step)
    surroundings: dict[str, Any] = {"gpu_readings": readings.columns()}
    if resident_before_gib is not None:
        surroundings |= {"resident_before_gib": resident_before_gib, "peak_resident_gib": peak_resident_gib()}
    return training_outcome(
        step,
        samples,
        checked,
        counted,
        build_s=build_s,
        peak_gib=peak_gib,
        busy_ms=busy_ms,
        surroundings=surroundings,
    )


def training_outcome(
    step: TrainStep,
    samples: Mapping[str, Samples],
    checked: Checked | None,
    counted: Mapping[str, Any],
    *,
    build_s: float,
    peak_gib: float | None,
    busy_ms: float | None,
    surroundings: Mapping[str, Any],
) -> Outcome:
    """What a cell of ``bench`` reports of a measured step: its samples, and the columns derived from them.

    Args:
        counted: as of :func:`~cs336sys.experiments.step_counts.counted_columns`.
        surroundings: what was observed beside the steps, of the GPU's clocks and of the process's memory.
    """
    workload, wall = step.workload, samples["wall"]
    peak = None
    if step.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(step.device), workload.precision, workload.tf32)
    derived = {
        **counted,
        "first_step_s": build_s + (wall.warmup + wall.measured)[0] / 1e3,
        "peak_gib": peak_gib,
        **workload.rates(samples["step"], peak, counted.get("flops")),
        "gpu_busy_ms": busy_ms,
        **surroundings,
    }
    if step.graphs is not None:
        derived["capture_s"] = step.graphs.capture_s
        derived["graph_pool_gib"] = step.graphs.pool_bytes / GIB
    if checked is not None:
        derived |= checked.columns()
    return Outcome("ok", dict(samples), with_notes(derived, loss_warnings(step.loss, workload)))
