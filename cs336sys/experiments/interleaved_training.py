"""Measures cells of ``bench`` that differ in one setting together: a step of each in turn, in one process.

A launch-bound step is as fast as the core that its thread runs on. On a shared machine that differs by half and more,
and stays the same for a dozen steps; when steps are taken in turn, every workload gets its share of the slow ones.
"""

import functools
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cs336sys.experiments.bench import training_outcome
from cs336sys.experiments.models import use_attention
from cs336sys.experiments.step_counts import counted_columns
from cs336sys.experiments.training import TrainStep, set_matmul_precision
from cs336sys.experiments.training_check import Checked, check_training
from cs336sys.experiments.user_models import telling_user_errors
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.device import choose_device
from cs336sys.measure.gpu_readings import reading_gpu
from cs336sys.measure.memory import held_memory_gib, peak_memory_gib, reset_peak_memory
from cs336sys.measure.timing import StepTimer, gpu_busy_ms
from cs336sys.results import configuration_key
from cs336sys.workload import Workload

# Outcomes of the cells that were measured together last and have not been asked for yet, by configuration.
_waiting: dict[str, Outcome] = {}


def measure_interleaved(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``bench --interleave``, and with it those that it is interleaved with: runs in the worker.

    The others' outcomes are kept for the calls that ask for them, which should come next.

    Args:
        configuration: of a workload, with two entries more: ``interleave``, the name of a setting, and ``interleaved``,
            its values separated by commas, one of which is the workload's.

    Returns:
        As :func:`~cs336sys.experiments.bench.measure_training`, with one sample of each series for every turn. The
        peak is that of the warm-up steps, when the later workloads have no memory yet; what the earlier ones hold is
        subtracted.
    """
    key = configuration_key(configuration)
    if key not in _waiting:
        _waiting.clear()
        setting = configuration["interleave"]
        together = {value: configuration | {setting: value} for value in configuration["interleaved"].split(",")}
        workloads = {value: Workload.from_configuration(one) for value, one in together.items()}
        with telling_user_errors(next(iter(workloads.values()))):
            for value, outcome in _measure_in_turn(workloads, progress).items():
                _waiting[configuration_key(together[value])] = outcome
    return _waiting.pop(key)


@dataclass(frozen=True)
class _Warm:
    """A workload that has done its warm-up steps."""

    step: TrainStep
    timer: StepTimer
    checked: Checked | None
    counted: Mapping[str, Any]
    build_s: float
    peak_gib: float | None

    def run(self) -> None:
        use_attention(self.step.workload)
        self.timer.run()


def _measure_in_turn(workloads: Mapping[str, Workload], progress: Progress) -> dict[str, Outcome]:
    """One outcome for each workload; of what is set for the whole process, they differ in attention alone."""
    first = next(iter(workloads.values()))
    device = choose_device(first.device)
    set_matmul_precision(first)
    held_at_first = held_memory_gib(device)
    warm: dict[str, _Warm] = {}
    outcomes: dict[str, Outcome] = {}
    differences: dict[str, Checked | None] = {}
    for name, workload in workloads.items():
        # Before any workload's model is built: the check itself holds two.
        differences[name], wrong = check_training(workload, device, functools.partial(_tell, progress, name))
        if wrong is not None:
            outcomes[name] = wrong
    for name, workload in workloads.items():
        if name in outcomes:
            continue
        stage = f"{name}, {len(warm)} beside it" if warm else name
        gc.collect()
        others_gib = held_memory_gib(device) - held_at_first
        warm[name] = _warm_up(workload, device, others_gib, stage, differences[name], progress)
    with reading_gpu(device) as readings:
        for number in range(first.steps):
            progress(f"step {number + 1}/{first.steps} of each")
            for one in warm.values():
                one.run()
    for name, measured in warm.items():
        samples = measured.timer.samples(first.warmup)
        busy_ms = None
        if device.type == "cuda":
            progress(f"{name}: profiling one step")
            use_attention(measured.step.workload)
            busy_ms = gpu_busy_ms(measured.step)
        outcomes[name] = training_outcome(
            measured.step,
            samples,
            measured.checked,
            measured.counted,
            build_s=measured.build_s,
            peak_gib=measured.peak_gib,
            busy_ms=busy_ms,
            surroundings={"gpu_readings": readings.columns()},
        )
    return outcomes


def _tell(progress: Progress, name: str, stage: str) -> None:
    progress(f"{name}: {stage}")


def _warm_up(
    workload: Workload,
    device: torch.device,
    others_gib: float,
    stage: str,
    checked: Checked | None,
    progress: Progress,
) -> _Warm:
    progress(f"{stage}: building the model")
    started = time.perf_counter()
    step = TrainStep(workload, device)
    build_s = time.perf_counter() - started
    counted = counted_columns(step, progress)
    reset_peak_memory(device)
    if workload.cuda_graph == "on":
        progress(f"{stage}: capturing")
        step.capture()
        build_s = time.perf_counter() - started
    timer = StepTimer(step.phases, device)
    for number in range(workload.warmup):
        progress(f"{stage}: warm-up {number + 1}/{workload.warmup}")
        timer.run()
    peak_gib = peak_memory_gib(device)
    return _Warm(step, timer, checked, counted, build_s, None if peak_gib is None else peak_gib - others_gib)
