"""Whether a strategy trains the weights that one process trains on the whole batch."""

import gc
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.experiments import weight_check
from cs336sys.experiments.optimizers import build_optimizer
from cs336sys.experiments.parallel.step import ParallelStep, rank_device, warmup_of_capture
from cs336sys.experiments.training import (
    AUTOCAST_DTYPES,
    TrainStep,
    build_model,
    set_matmul_precision,
    train_for_check,
)
from cs336sys.experiments.weight_check import OPTIMIZER_SETTINGS, TOLERANCES, Difference, difference, plainly_trained
from cs336sys.parallel.collectives import gather_objects
from cs336sys.workload import ParallelWorkload, Workload


def tolerance(workload: ParallelWorkload) -> float:
    """The largest :attr:`Difference.relative` that rounding explains, for the precisions that the workload uses."""
    return max(weight_check.tolerance(workload.training), TOLERANCES[workload.gradient_dtype])


def verify(workload: ParallelWorkload) -> Difference:
    """Train alike with the strategy and alone, on every rank, and compare all weights. All ranks call it together."""
    device = rank_device(workload)
    workload = replace(workload, training=_fitting(workload.training, device))
    # Before a step is captured it is trained a little.
    warmup = warmup_of_capture(workload) if workload.training.cuda_graph == "on" else 0
    expected = _expected(workload.training, device, workload.uses_autocast, warmup)
    gc.collect()
    step = ParallelStep(workload, device, **OPTIMIZER_SETTINGS)
    train_for_check(step, warmup)
    found, stale = step.weights(step.replica.whole_parameters())
    start: dict[str, Tensor] = dict(build_model(plainly_trained(workload.training), device).named_parameters())
    nothing = {name: torch.zeros_like(value) for name, value in stale.items()}
    start, expected, found = start | nothing, expected | nothing, found | stale
    return difference(start, expected, found, workload.training.size.num_layers)


def _fitting(workload: Workload, device: torch.device) -> Workload:
    """The workload, or one with so few layers that it fits into the GPU together with two more copies of its weights.

    One process trains the whole batch here, which needs more memory than a rank does. The same on every rank.
    """
    if device.type == "cpu":
        return workload
    free = min(gather_objects(torch.cuda.mem_get_info(device)[0]))
    size = workload.size
    while size.num_layers > 1:
        peak = predicted_peak(size, workload.precision, "train", workload.attention)
        if peak.total + 2 * peak.parameters < 0.9 * free:
            break
        size = replace(size, num_layers=size.num_layers // 2)
    return replace(workload, size=size)


# The weights that one process trained for the last check, with what it trained.
_kept: dict[tuple[Workload, bool, int], dict[str, Tensor]] = {}


def _expected(workload: Workload, device: torch.device, uses_autocast: bool, warmup: int) -> dict[str, Tensor]:
    """The weights of one process; on a CPU kept for the next strategy, but a GPU's memory is what is to be measured."""
    workload = replace(plainly_trained(workload), compile="off")
    key = (workload, uses_autocast or workload.precision == "fp32", warmup)
    if key not in _kept:
        _kept.clear()
        expected = _trained_alone(workload, device, uses_autocast, warmup)
        if device.type != "cpu":
            return expected
        _kept[key] = expected
    return _kept[key]


def _trained_alone(workload: Workload, device: torch.device, uses_autocast: bool, warmup: int) -> dict[str, Tensor]:
    set_matmul_precision(workload)
    plain = build_model(workload, device)
    model: nn.Module = plain
    if not uses_autocast and workload.precision in AUTOCAST_DTYPES:
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision])
    scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "fp16")
    if model is not plain:
        workload = replace(workload, precision="fp32")
    optimizer = build_optimizer(workload, model, **OPTIMIZER_SETTINGS)
    train_for_check(TrainStep(workload, device, model=model, optimizer=optimizer, scaler=scaler), warmup)
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


class _InHalfPrecision(nn.Module):
    """Computes with copies of all matrices in ``dtype``, as a fully sharded model does, and keeps them in fp32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module = module
        self._dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        copies = {
            name: parameter.to(self._dtype) for name, parameter in self.module.named_parameters() if parameter.dim() > 1
        }
        return functional_call(self.module, copies, (tokens,))
