"""Whether a strategy trains the weights that one process trains on the whole batch."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.experiments.parallel.step import ParallelStep, rank_device
from cs336sys.experiments.training import (
    AUTOCAST_DTYPES,
    OPTIMIZER_CLASSES,
    TrainStep,
    build_model,
    set_matmul_precision,
)
from cs336sys.parallel.collectives import gather_objects
from cs336sys.workload import ParallelWorkload, Workload

STEPS = 5

# AdamW divides a gradient by its own size, which hides a sum where a mean should be, and turns the rounding error of a
# gradient that should be 0 into a full step. With this eps its steps are proportional to the gradients: the whole
# optimizer is in use, and weights differ by as much as gradients do.
OPTIMIZER_SETTINGS = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}

# How far a parameter may be from where one process takes it, relative to how far that moved it (both Euclidean norms).
# bf16 rounds by up to 2^-8, fp16 and TF32 by 2^-11. Measured at size tiny: up to 9e-6 in fp32 (mostly because the
# weights themselves are rounded), 1e-3 in fp16 and 8e-3 in bf16. Wrong strategies were off by 0.2 to 3: one parameter
# left out, a sum instead of a mean, the gradients of the step before.
TOLERANCES = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Difference:
    """How far one rank's weights are from those of one process, after :data:`STEPS` steps.

    Attributes:
        largest: of all weights, the largest absolute difference.
        relative: of all parameters, the largest ratio of the difference's norm to the norm of how far it was moved.
        parameter: which one that is.
        num_layers: of the model that was compared; fewer than the workload's where that does not fit into memory.
    """

    largest: float
    relative: float
    parameter: str
    num_layers: int


def tolerance(workload: ParallelWorkload) -> float:
    """The largest :attr:`Difference.relative` that rounding explains, for the precisions that the workload uses."""
    training = workload.training
    precision = "tf32" if training.tf32 and training.precision == "fp32" else training.precision
    return max(TOLERANCES[precision], TOLERANCES[workload.gradient_dtype])


def verify(workload: ParallelWorkload) -> Difference:
    """Train alike with the strategy and alone, on every rank, and compare all weights. All ranks call it together."""
    device = rank_device(workload)
    workload = replace(workload, training=_fitting(workload.training, device))
    expected = _expected(workload.training, device, workload.uses_autocast)
    gc.collect()
    step = ParallelStep(workload, device, **OPTIMIZER_SETTINGS)
    for _ in range(STEPS):
        step()
    found = step.replica.whole_parameters()
    start = dict(build_model(workload.training, device).named_parameters())
    return _difference(start, expected, found, workload.training.size.num_layers)


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
_kept: dict[tuple[Workload, bool], dict[str, Tensor]] = {}


def _expected(workload: Workload, device: torch.device, uses_autocast: bool) -> dict[str, Tensor]:
    """The weights of one process; on a CPU kept for the next strategy, but a GPU's memory is what is to be measured."""
    workload = replace(workload, compile="off")
    key = (workload, uses_autocast or workload.precision == "fp32")
    if key not in _kept:
        _kept.clear()
        expected = _trained_alone(workload, device, uses_autocast)
        if device.type != "cpu":
            return expected
        _kept[key] = expected
    return _kept[key]


def _trained_alone(workload: Workload, device: torch.device, uses_autocast: bool) -> dict[str, Tensor]:
    set_matmul_precision(workload)
    plain = build_model(workload, device)
    model: nn.Module = plain
    if not uses_autocast and workload.precision in AUTOCAST_DTYPES:
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision])
    scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "fp16")
    if model is not plain:
        workload = replace(workload, precision="fp32")
    optimizer_class, settings = OPTIMIZER_CLASSES[workload.optimizer]
    optimizer = optimizer_class(model.parameters(), **{**settings, **OPTIMIZER_SETTINGS})
    step = TrainStep(workload, device, model=model, optimizer=optimizer, scaler=scaler)
    for _ in range(STEPS):
        step()
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


def _difference(
    start: Mapping[str, Tensor], expected: Mapping[str, Tensor], found: Mapping[str, Tensor], num_layers: int
) -> Difference:
    largest, relative = [], []
    with torch.no_grad():
        for name, weight in expected.items():
            off, moved = found[name] - weight, weight - start[name]
            largest.append(off.abs().max())
            distance = torch.linalg.vector_norm(off)
            # A parameter that no step moves must not be moved by the strategy either.
            relative.append(torch.where(distance == 0, 0.0, distance / torch.linalg.vector_norm(moved)))
    # A weight that is NaN is farther off than any other.
    relatives = torch.stack(relative).nan_to_num(nan=torch.inf).tolist()
    worst = max(range(len(relatives)), key=relatives.__getitem__)
    return Difference(torch.stack(largest).max().item(), relatives[worst], list(expected)[worst], num_layers)
