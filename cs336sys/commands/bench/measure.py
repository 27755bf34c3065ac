"""The cells of ``bench``, one alone or several in turn: steps in graphs or of our kernels are checked first."""

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
    reading_gpu,
    reset_peak_memory,
    reset_peak_resident,
)
from cs336sys.parity.step import Checked, check_training
from cs336sys.results.model import Samples, configuration_key
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.choices import COUNTING_MODULE
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import StepTimer, gpu_busy_ms
from cs336sys.training import user_models
from cs336sys.training.model import use_attention
from cs336sys.training.step import TrainStep, set_matmul_precision, time_steps, training_warnings, with_notes


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
        observed: dict[str, Any] = {"peak_gib": peak_memory_gib(device), "gpu_readings": readings.columns()}
        observed["gpu_busy_ms"] = _profile_busy_ms(built.step, progress)
        measured_ms = samples["wall"].measured
        drawn_j = readings.drawn_j(sum(measured_ms) / 1e3)  # The measured steps come last, after the warm-up.
        if drawn_j is not None:
            observed["step_energy_j"] = drawn_j / len(measured_ms)
        if resident_before_gib is not None:
            observed |= {"resident_before_gib": resident_before_gib, "peak_resident_gib": peak_resident_gib()}
        return training_outcome(built, samples, checked, observed)


def _profile_busy_ms(step: TrainStep, progress: Progress) -> float | None:
    """Return for how many ms of one more step the GPU is busy; None on a CPU."""
    if step.device.type != "cuda":
        return None
    progress("profiling one step")
    return gpu_busy_ms(step)


@dataclass(frozen=True)
class BuiltStep:
    """A step that is ready, its graphs captured.

    Attributes:
        flop_columns: as of :func:`~cs336sys.training.flop_counting.counted_columns`.
        build_s: seconds that building the model took, and capturing.
    """

    step: TrainStep
    flop_columns: Mapping[str, Any]
    build_s: float


def build_step(make: Callable[[], TrainStep], device: torch.device, progress: Progress) -> BuiltStep:
    """Make a step, count what it computes, and capture its graphs if its workload asks for them."""
    progress("building the model")
    started_s = time.perf_counter()
    step = make()
    build_s = time.perf_counter() - started_s
    flop_columns = {"parameters": step.workload.parameters}
    if not step.workload.is_ours:
        flop_columns = import_module(COUNTING_MODULE).counted_columns(step, progress)
    reset_peak_memory(device)  # Building and counting may have taken more than a step.
    if step.workload.uses_graphs:
        progress("capturing")
        capture_started_s = time.perf_counter()
        step.capture()
        build_s += time.perf_counter() - capture_started_s
    return BuiltStep(step, flop_columns, build_s)


def training_outcome(
    built: BuiltStep, samples: Mapping[str, Samples], checked: Checked | None, observed: Mapping[str, Any]
) -> Outcome:
    """Report a measured step: samples, columns derived from them, and those ``observed`` of memory and the GPU."""
    step, flop_columns = built.step, built.flop_columns
    workload, wall = step.workload, samples["wall"]
    gpu_peak_tflops = None
    # Where FLOPs are only an upper bound, no MFU is derived from them.
    if step.device.type == "cuda" and not flop_columns.get("flops_are_upper_bound"):
        gpu_peak_tflops = peak_tflops(torch.cuda.get_device_name(step.device), workload.precision, workload.tf32)
    derived = {
        **flop_columns,
        "first_step_s": built.build_s + (wall.warmup + wall.measured)[0] / 1e3,  # Without warm-up, a measured one.
        **workload.rates(samples["step"], gpu_peak_tflops, flop_columns.get("flops")),
        **observed,
    }
    if step.graphs is not None:
        derived |= {"capture_s": step.graphs.capture_s, "graph_pool_gib": step.graphs.pool_bytes / GIB}
    if checked is not None:
        derived |= checked.columns()
    if (impossible := impossible_utilization(derived["mfu_percent"])) is not None:  # Above 100 %: a number is wrong.
        return Outcome("error", reason=impossible)
    return Outcome("ok", dict(samples), with_notes(derived, training_warnings(step.loss, workload)))


# Outcomes of the cells that were measured together last and have not been asked for yet, by configuration.
_unclaimed_outcomes: dict[str, Outcome] = {}


def measure_interleaved(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a cell of ``bench --interleave``, a step of it and of those that it is interleaved with in turn.

    A launch-bound step is as fast as the core that its thread runs on. On a shared machine that differs by half and
    more, and stays the same for a dozen steps; in turn, every workload gets its share of the slow ones. The others'
    outcomes are kept for the calls that ask for them, which should come next.

    Args:
        configuration: a workload's, with ``interleave``, the name of a setting, and ``interleaved``, its values with
            commas between them.

    Returns:
        As :func:`measure_training`. The peak is that of the warm-up steps, when later workloads have no memory yet,
        without what earlier ones hold.
    """
    key = configuration_key(configuration)
    if key not in _unclaimed_outcomes:
        _unclaimed_outcomes.clear()
        setting = configuration["interleave"]
        by_value = {value: configuration | {setting: value} for value in configuration["interleaved"].split(",")}
        workloads = {value: Workload.from_configuration(settings) for value, settings in by_value.items()}
        with user_models.telling_user_errors(next(iter(workloads.values()))):  # All have the same user's code.
            for value, outcome in _measure_in_turn(workloads, progress).items():
                _unclaimed_outcomes[configuration_key(by_value[value])] = outcome
    return _unclaimed_outcomes.pop(key)


@dataclass(frozen=True)
class _WarmStep:
    """A step after its warm-up, with the peak of that in GiB, without what other steps held."""

    built: BuiltStep
    timer: StepTimer
    checked: Checked | None
    peak_gib: float | None

    def run(self) -> None:
        use_attention(self.built.step.workload)  # The last step may have set another, for all models of the process.
        self.timer.run()


def _measure_in_turn(workloads: Mapping[str, Workload], progress: Progress) -> dict[str, Outcome]:
    """Return outcomes by workload's name. TF32 is on or off for the whole process; each step sets its attention."""
    first = next(iter(workloads.values()))
    device = choose_device(first.device)
    set_matmul_precision(first)
    held_before_gib = held_memory_gib(device)
    warm_steps: dict[str, _WarmStep] = {}
    outcomes: dict[str, Outcome] = {}
    checks: dict[str, Checked | None] = {}
    for name, workload in workloads.items():
        # Before any workload's model is built: a check holds two models.
        checks[name], failure = check_training(workload, device, functools.partial(_tell, progress, name))
        if failure is not None:
            outcomes[name] = failure
    for name, workload in workloads.items():
        if name in outcomes:
            continue
        stage = f"{name}, {len(warm_steps)} more in memory" if warm_steps else name
        gc.collect()  # Else the memory of a refused step would count as held by the others.
        others_gib = held_memory_gib(device) - held_before_gib
        telling = functools.partial(_tell, progress, stage)
        built = build_step(functools.partial(TrainStep, workload, device), device, telling)
        # Several values of --attention may leave a user's model as it is: counting it has found which.
        without_effect = set(built.flop_columns.get("same_attention", ()))
        attentions = {warm.built.step.workload.attention for warm in warm_steps.values()} - {workload.attention}
        if workload.attention in without_effect and (same := attentions & without_effect):
            reason = f"--attention {' and '.join(sorted(same))} is the same, the model's own: measured once"
            outcomes[name] = Outcome("unsupported", reason=reason)
            continue
        timer = StepTimer(built.step.phases, device)
        for number in range(workload.warmup):
            telling(f"warm-up {number + 1}/{workload.warmup}")
            timer.run()
        peak_gib = peak_memory_gib(device)  # Of the warm-up: build_step() has reset it.
        peak_alone_gib = None if peak_gib is None else peak_gib - others_gib
        warm_steps[name] = _WarmStep(built, timer, checks[name], peak_alone_gib)
    with reading_gpu(device) as readings:
        for number in range(first.steps):
            progress(f"step {number + 1}/{first.steps} of each")
            for warm in warm_steps.values():
                warm.run()
    for name, warm in warm_steps.items():
        use_attention(warm.built.step.workload)  # The process has that of the step that ran last.
        busy_ms = _profile_busy_ms(warm.built.step, functools.partial(_tell, progress, name))
        observed = {"peak_gib": warm.peak_gib, "gpu_busy_ms": busy_ms, "gpu_readings": readings.columns()}
        outcomes[name] = training_outcome(warm.built, warm.timer.samples(first.warmup), warm.checked, observed)
    return outcomes


def _tell(progress: Progress, name: str, stage: str) -> None:
    progress(f"{name}: {stage}")
