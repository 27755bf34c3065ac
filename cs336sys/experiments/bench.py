"""Measures one cell of ``bench``: steps in CUDA graphs or of our kernels are checked first, then phases are timed."""

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.cuda_graphs import require_graphs
from cs336sys.experiments import user_models
from cs336sys.experiments.models import build_compared_model, build_model
from cs336sys.experiments.optimizers import build_optimizer
from cs336sys.experiments.step_counts import counted_columns
from cs336sys.experiments.training import TrainStep, set_matmul_precision, time_steps, train_for_check
from cs336sys.experiments.weight_check import (
    OPTIMIZER_SETTINGS,
    STEPS,
    Difference,
    difference,
    plainly_trained,
    tolerance,
)
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
    checked: Difference | None,
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
        derived |= _difference_columns(checked)
    return Outcome("ok", dict(samples), derived)


# Blocks that are checked for what looks into steps: with two, a norm also computes the addition that ends a block.
_FEW_BLOCKS = 2

# What was found for steps that are looked into in several ways.
_of_few_blocks: dict[Workload, tuple[Difference | None, Outcome | None]] = {}


def check_few_blocks(workload: Workload, device: torch.device, progress: Progress) -> tuple[list[str], Outcome | None]:
    """:func:`check_training` of a model of few blocks, before a step of ours is looked into by what compares nothing.

    Returns:
        what was compared, in words, nothing where nothing is ours; and a ``wrong`` outcome if rounding does not explain
        what was found.
    """
    workload = replace(workload, warmup=0, steps=1)
    if workload.is_ours:
        few = min(_FEW_BLOCKS, workload.size.num_layers)
        workload = replace(workload, size=replace(workload.size, num_layers=few))
    if workload not in _of_few_blocks:
        _of_few_blocks[workload] = check_training(workload, device, progress)
    checked, wrong = _of_few_blocks[workload]
    if checked is None:
        return [], wrong
    blocks = f"{checked.num_layers} block{'s' if checked.num_layers > 1 else ''}"
    return [
        f"checked first, {blocks} against PyTorch's operations: after {STEPS} steps off by at most "
        f"{100 * checked.relative:.2g} % ({checked.parameter})"
    ], wrong


def check_training(
    workload: Workload, device: torch.device, progress: Progress
) -> tuple[Difference | None, Outcome | None]:
    """Train as the workload says and as it is plainly done, on the same batches, and compare weights and losses.

    A step in CUDA graphs is compared with a launched one, and one of our kernels with PyTorch's operations.

    The model has one block where attention alone is ours: the others compute alike. Modes without an optimizer are
    checked with one, as the loss of random weights hardly depends on what computes it; and mode ``forward`` on one
    block, as a model that fits without gradients may not fit with them. (Of the user's models it compares losses.)

    Returns:
        how far they are apart, and a ``wrong`` outcome if rounding does not explain that; twice None for a workload
        that is neither.

    Raises:
        CapabilityError: the step cannot be captured, or the kernels cannot run.
    """
    plain = plainly_trained(workload)
    if plain == workload:
        return None, None
    is_attention_alone = replace(plain, attention=workload.attention, compile=workload.compile) == workload
    if is_attention_alone or (workload.is_ours and workload.mode == "forward"):
        workload = replace(workload, size=replace(workload.size, num_layers=1))
    if workload.mode == "forward-backward" or (workload.is_ours and workload.mode == "forward"):
        # Ours writes the copies of weights that fused kernels read, but does not scale gradients.
        is_ours = workload.optimizer == "adamw" or (workload.kernels == "fused" and workload.precision != "fp16")
        workload = replace(workload, mode="train", optimizer="adamw" if is_ours else "fused")
    plain = plainly_trained(workload)
    if workload.is_ours:
        return _checked(workload, plain, device, progress)
    with user_models.nothing_dropped():
        checked = _checked(workload, plain, device, progress)
    if workload.compile != "off":
        # It was compiled without dropout.
        torch.compiler.reset()
    return checked


def _checked(
    workload: Workload, plain: Workload, device: torch.device, progress: Progress
) -> tuple[Difference | None, Outcome | None]:
    if workload.cuda_graph == "on":
        require_graphs(device)
    progress("checking: launched steps")
    expected = _trained_for_check(plain, device, build_compared_model(workload, device))
    # In host memory, so that a step is checked that fills the GPU.
    expected = {name: value.cpu() for name, value in expected.items()}
    _free_memory(device)
    progress("checking: steps as measured")
    found = _trained_for_check(workload, device, build_model(workload, device))
    _free_memory(device)
    start: dict[str, Tensor] = dict(build_compared_model(workload, device).named_parameters())
    start |= {name: torch.zeros_like(value) for name, value in found.items() if name not in start}
    # Copies differ from nothing that they copy.
    expected = {name: torch.zeros_like(value) for name, value in found.items()} | expected
    checked = difference(start, expected, found, workload.size.num_layers)
    del found, start
    _free_memory(device)
    if checked.relative <= tolerance(workload):
        return checked, None
    how = "replayed" if workload.cuda_graph == "on" else "with our kernels"
    reason = (
        f"{how}: after {STEPS} steps {checked.parameter} is off by {100 * checked.relative:.3g} % of how far "
        f"launched steps move it, more than rounding explains ({100 * tolerance(workload):g} %)"
    )
    return checked, Outcome("wrong", derived=_difference_columns(checked), reason=reason)


def _difference_columns(checked: Difference) -> dict[str, float]:
    return {"largest_difference": checked.largest, "relative_difference_percent": 100 * checked.relative}


def _trained_for_check(workload: Workload, device: torch.device, model: nn.Module) -> dict[str, Tensor]:
    """The weights after :func:`train_for_check`, and the losses of its steps."""
    optimizer = build_optimizer(workload, model, **OPTIMIZER_SETTINGS) if workload.mode == "train" else None
    step = TrainStep(workload, device, model=model, optimizer=optimizer)
    losses = train_for_check(step, step.warmup_of_capture)
    weights, stale = step.weights(dict(model.named_parameters()))
    return {f"the loss of step {number}": loss for number, loss in enumerate(losses, 1)} | weights | stale


def _free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
