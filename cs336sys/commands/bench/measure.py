"""Measures one cell of ``bench``: steps in CUDA graphs or of our kernels are checked first, then phases are timed."""

import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from cs336sys.accounting.hardware import impossible_utilization, peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.machine.device import (
    choose_device,
    held_memory_gib,
    peak_memory_gib,
    peak_resident_gib,
    reset_peak_memory,
    reset_peak_resident,
)
from cs336sys.machine.gpu_readings import reading_gpu
from cs336sys.parity.step import Checked, check_training
from cs336sys.results.model import Samples, configuration_key
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.choices import COUNTING_MODULE
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import StepTimer, gpu_busy_ms
from cs336sys.training import user_models
from cs336sys.training.model import use_attention
from cs336sys.training.step import TrainStep, set_matmul_precision, time_steps, training_warnings, with_notes
from cs336sys.training.user_models import telling_user_errors


def measure_training(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``bench``: runs in the worker process.

    Samples (ms): one series a phase, ``step`` and ``wall``. Derived columns: see ``docs/columns.md``.
    """
    workload = Workload.from_configuration(configuration)
    with user_models.telling_user_errors(workload):
        device = choose_device(workload.device)
        set_matmul_precision(workload)
        checked, failure = check_training(workload, device, progress)
        if failure is not None:
            return failure
        resident_before_gib = reset_peak_resident() if device.type == "cpu" else None
        built = build_step(functools.partial(TrainStep, workload, device), device, progress)
        with reading_gpu(device) as readings:
            samples = time_steps(built.step, built.step.phases, progress)
        peak_gib = peak_memory_gib(device)
        busy_ms = None
        if device.type == "cuda":
            progress("profiling one step")
            busy_ms = gpu_busy_ms(built.step)
        measured_ms = samples["wall"].measured
        drawn_j = readings.drawn_j(sum(measured_ms) / 1e3)
        surroundings: dict[str, Any] = {"gpu_readings": readings.columns()}
        if drawn_j is not None:
            surroundings["step_energy_j"] = drawn_j / len(measured_ms)
        if resident_before_gib is not None:
            surroundings |= {"resident_before_gib": resident_before_gib, "peak_resident_gib": peak_resident_gib()}
        return training_outcome(built, samples, checked, peak_gib, busy_ms, surroundings)


@dataclass(frozen=True)
class BuiltStep:
    """A step that is ready, its graphs captured, with how long that took in seconds.

    Attributes:
        flop_columns: as of :func:`~cs336sys.training.flop_counting.counted_columns`.
    """

    step: TrainStep
    flop_columns: Mapping[str, Any]
    build_s: float


def build_step(make: Callable[[], TrainStep], device: torch.device, progress: Progress) -> BuiltStep:
    """Make a step, count what it computes, and capture its graphs if its workload asks for them."""
    progress("building the model")
    started = time.perf_counter()
    step = make()
    build_s = time.perf_counter() - started
    flop_columns = {"parameters": step.workload.parameters}
    if not step.workload.is_ours:
        flop_columns = import_module(COUNTING_MODULE).counted_columns(step, progress)
    reset_peak_memory(device)
    if step.workload.cuda_graph == "on":
        progress("capturing")
        step.capture()
        build_s = time.perf_counter() - started
    return BuiltStep(step, flop_columns, build_s)


def training_outcome(
    built: BuiltStep,
    samples: Mapping[str, Samples],
    checked: Checked | None,
    peak_gib: float | None,
    busy_ms: float | None,
    surroundings: Mapping[str, Any],
) -> Outcome:
    """Report a measured step: its samples, the columns derived from them, and ``surroundings``: what was observed of
    the GPU's clocks and of the process's memory.
    """
    step, flop_columns = built.step, built.flop_columns
    workload, wall = step.workload, samples["wall"]
    peak = None
    if step.device.type == "cuda" and not flop_columns.get("flops_are_upper_bound"):
        peak = peak_tflops(torch.cuda.get_device_name(step.device), workload.precision, workload.tf32)
    derived = {
        **flop_columns,
        "first_step_s": built.build_s + (wall.warmup + wall.measured)[0] / 1e3,
        "peak_gib": peak_gib,
        **workload.rates(samples["step"], peak, flop_columns.get("flops")),
        "gpu_busy_ms": busy_ms,
        **surroundings,
    }
    if step.graphs is not None:
        derived["capture_s"] = step.graphs.capture_s
        derived["graph_pool_gib"] = step.graphs.pool_bytes / GIB
    if checked is not None:
        derived |= checked.columns()
    impossible = impossible_utilization(derived["mfu_percent"])
    if impossible is not None:
        return Outcome("error", reason=impossible)
    return Outcome("ok", dict(samples), with_notes(derived, training_warnings(step.loss, workload)))


# Measures cells of ``bench`` that differ in one setting together: a step of each in turn, in one process.
#
# A launch-bound step is as fast as the core that its thread runs on. On a shared machine that differs by half and more,
# and stays the same for a dozen steps; when steps are taken in turn, every workload gets its share of the slow ones.


# Outcomes of the cells that were measured together last and have not been asked for yet, by configuration.
_waiting: dict[str, Outcome] = {}


def measure_interleaved(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``bench --interleave``, and with it those that it is interleaved with: runs in the worker.

    The others' outcomes are kept for the calls that ask for them, which should come next.

    Args:
        configuration: of a workload, with two entries more: ``interleave``, the name of a setting, and ``interleaved``,
            its values separated by commas, one of which is the workload's.

    Returns:
        As :func:`~cs336sys.commands.bench.measure.measure_training`, with one sample of each series for every turn. The
        peak is that of the warm-up steps, when the later workloads have no memory yet; what the earlier ones hold is
        subtracted.
    """
    key = configuration_key(configuration)
    if key not in _waiting:
        _waiting.clear()
        setting = configuration["interleave"]
        by_value = {value: configuration | {setting: value} for value in configuration["interleaved"].split(",")}
        workloads = {value: Workload.from_configuration(values) for value, values in by_value.items()}
        with telling_user_errors(next(iter(workloads.values()))):
            for value, outcome in _measure_in_turn(workloads, progress).items():
                _waiting[configuration_key(by_value[value])] = outcome
    return _waiting.pop(key)


@dataclass(frozen=True)
class _Warm:
    built: BuiltStep
    timer: StepTimer
    checked: Checked | None
    peak_gib: float | None

    def run(self) -> None:
        use_attention(self.built.step.workload)
        self.timer.run()


def _measure_in_turn(workloads: Mapping[str, Workload], progress: Progress) -> dict[str, Outcome]:
    """Return each workload's outcome; of settings of the whole process, workloads differ in attention alone."""
    first = next(iter(workloads.values()))
    device = choose_device(first.device)
    set_matmul_precision(first)
    held_at_first = held_memory_gib(device)
    warm: dict[str, _Warm] = {}
    outcomes: dict[str, Outcome] = {}
    differences: dict[str, Checked | None] = {}
    for name, workload in workloads.items():
        # Before any workload's model is built: the check itself holds two.
        differences[name], failure = check_training(workload, device, functools.partial(_tell, progress, name))
        if failure is not None:
            outcomes[name] = failure
    for name, workload in workloads.items():
        if name in outcomes:
            continue
        stage = f"{name}, {len(warm)} more in memory" if warm else name
        gc.collect()
        others_gib = held_memory_gib(device) - held_at_first
        telling = functools.partial(_tell, progress, stage)
        built = build_step(functools.partial(TrainStep, workload, device), device, telling)
        # Their attentions may be the same in a user's model.
        same = {other.built.step.workload.attention for other in warm.values()} - {workload.attention}
        same &= set(built.flop_columns.get("same_attention", ()))
        if same and workload.attention in built.flop_columns["same_attention"]:
            reason = f"--attention {' and '.join(sorted(same))} is the same, the model's own: measured once"
            outcomes[name] = Outcome("unsupported", reason=reason)
            continue
        timer = StepTimer(built.step.phases, device)
        for number in range(workload.warmup):
            telling(f"warm-up {number + 1}/{workload.warmup}")
            timer.run()
        peak_gib = peak_memory_gib(device)
        warm[name] = _Warm(built, timer, differences[name], None if peak_gib is None else peak_gib - others_gib)
    with reading_gpu(device) as readings:
        for number in range(first.steps):
            progress(f"step {number + 1}/{first.steps} of each")
            for warm_step in warm.values():
                warm_step.run()
    for name, measured in warm.items():
        samples = measured.timer.samples(first.warmup)
        busy_ms = None
        if device.type == "cuda":
            progress(f"{name}: profiling one step")
            use_attention(measured.built.step.workload)
            busy_ms = gpu_busy_ms(measured.built.step)
        columns = {"gpu_readings": readings.columns()}
        outcomes[name] = training_outcome(
            measured.built, samples, measured.checked, measured.peak_gib, busy_ms, columns
        )
    return outcomes


def _tell(progress: Progress, name: str, stage: str) -> None:
    progress(f"{name}: {stage}")
