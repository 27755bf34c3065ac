"""Whether a strategy trains the weights that one process trains on the whole batch."""

import functools
import gc
import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.experiments import user_models, weight_check
from cs336sys.experiments.models import blocks_of, build_by_layers, build_compared_model
from cs336sys.experiments.optimizers import build_optimizer
from cs336sys.experiments.parallel.sharded_strategies import return_dtype_of_sharded
from cs336sys.experiments.parallel.step import ParallelStep, rank_device, warmup_of_capture
from cs336sys.experiments.step_counts import count_step
from cs336sys.experiments.training import AUTOCAST_DTYPES, TrainStep, set_matmul_precision, train_for_check
from cs336sys.experiments.weight_check import OPTIMIZER_SETTINGS, TOLERANCES, Difference, difference, plainly_trained
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.fsdp.calls import cast_floating, compute_in_own_dtype
from cs336sys.parallel.fsdp.plan import plan_sharding
from cs336sys.workload import FULLY_SHARDED, ParallelWorkload, Workload


def tolerance(workload: ParallelWorkload) -> float:
    """The largest :attr:`Difference.relative` that rounding explains, for the precisions that the workload uses."""
    return max(weight_check.tolerance(workload.training), TOLERANCES[workload.gradient_dtype])


def verify(workload: ParallelWorkload) -> Difference:
    """Train alike with the strategy and alone, on every rank, and compare all weights. All ranks call it together."""
    device = rank_device(workload)
    if not workload.training.is_ours:
        user_models.without_dropout()
    workload = replace(workload, training=_fitting(_with_layers(workload.training, workload.check_layers), device))
    # Before a step is captured it is trained a little.
    warmup = warmup_of_capture(workload) if workload.training.cuda_graph == "on" else 0
    expected = _expected(workload, device, warmup)
    gc.collect()
    step = ParallelStep(workload, device, **OPTIMIZER_SETTINGS)
    train_for_check(step, warmup)
    found, stale = step.weights(step.replica.whole_parameters())
    start: dict[str, Tensor] = dict(_start(workload, device).named_parameters())
    nothing = {name: torch.zeros_like(value) for name, value in stale.items()}
    start, expected, found = start | nothing, expected | nothing, found | stale
    return difference(start, expected, found, workload.training.size.num_layers)


def _with_layers(workload: Workload, layers: int | None) -> Workload:
    """The workload with so many layers at most."""
    if layers is None or workload.size.num_layers <= layers:
        return workload
    return replace(workload, size=replace(workload.size, num_layers=layers))


def _fitting(workload: Workload, device: torch.device) -> Workload:
    """The workload, or one with so few layers that it fits into the GPU together with two more copies of its weights.

    One process trains the whole batch here, which needs more memory than a rank does. The same on every rank.
    """
    if device.type == "cpu":
        return workload
    free = min(gather_objects(torch.cuda.mem_get_info(device)[0]))
    size = workload.size
    while size.num_layers > 1:
        if workload.is_ours:
            peak = plainly_trained(replace(workload, size=size)).predicted_peak()
            needed = peak.total + 2 * peak.parameters
        else:
            # Weights, gradients, two states and two copies more, in fp32; and as much again for activations.
            needed = 2 * 6 * 4 * (count_step(replace(workload, size=size)).parameters or 0)
        if needed < 0.9 * free:
            break
        size = replace(size, num_layers=size.num_layers // 2)
    return replace(workload, size=size)


# The weights that one process trained for the last check, with what it trained.
_kept: dict[tuple[Workload, bool, bool, int], dict[str, Tensor]] = {}


def _expected(parallel: ParallelWorkload, device: torch.device, warmup: int) -> dict[str, Tensor]:
    """The weights of one process; on a CPU kept for the next strategy, but a GPU's memory is what is to be measured."""
    workload = replace(parallel.training, compile="off", cuda_graph="off")
    parallel = replace(parallel, training=workload)
    by_layers = not workload.is_ours and parallel.strategy in FULLY_SHARDED
    key = (workload, parallel.uses_autocast or workload.precision == "fp32", by_layers, warmup)
    if key not in _kept:
        _kept.clear()
        expected = _trained_alone(parallel, device, warmup)
        if device.type != "cpu":
            return expected
        _kept[key] = expected
    return _kept[key]


def _start(workload: ParallelWorkload, device: torch.device) -> nn.Module:
    """The model with the values that ranks start with."""
    if workload.strategy in FULLY_SHARDED:
        return build_by_layers(plainly_trained(workload.training), device)
    return build_compared_model(workload.training, device)


def _trained_alone(parallel: ParallelWorkload, device: torch.device, warmup: int) -> dict[str, Tensor]:
    workload = parallel.training
    set_matmul_precision(workload)
    plain = _start(parallel, device)
    workload = plainly_trained(workload)
    model: nn.Module = plain
    if not parallel.uses_autocast and workload.precision in AUTOCAST_DTYPES:
        blocks = None if workload.is_ours else list(blocks_of(workload, plain).values()) or None
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision], blocks)
    scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "fp16")
    if model is not plain:
        workload = replace(workload, precision="fp32")
    optimizer = build_optimizer(workload, model, **OPTIMIZER_SETTINGS)
    normalizes_batches = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in plain.modules())
    build_step = functools.partial(_ShareByShare, parallel.share) if normalizes_batches else TrainStep
    train_for_check(build_step(workload, device, model=model, optimizer=optimizer, scaler=scaler), warmup)
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


class _InHalfPrecision(nn.Module):
    """Computes with copies of what a fully sharded model shards, in ``dtype``, as that does, and keeps them in fp32.

    Args:
        blocks: whose inputs are converted, as those of its units.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, blocks: Collection[nn.Module] | None):
        super().__init__()
        self.module = module
        self._dtype = dtype
        plan = plan_sharding(module, blocks)
        self._sharded = [entry.names[0] for entry in plan.all_sharded]
        for owner in {owner: None for entry in plan.replicated for owner, _ in entry.owners}:
            compute_in_own_dtype(owner, dtype)
        if blocks is not None:
            return_dtype_of_sharded(module, blocks, dtype)
        for block in blocks or ():
            block.register_forward_pre_hook(
                lambda _, args, kwargs: cast_floating((args, kwargs), dtype), with_kwargs=True
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        copies = {name: self.module.get_parameter(name).to(self._dtype) for name in self._sharded}
        args, kwargs = cast_floating((args, kwargs), self._dtype)
        return functional_call(self.module, copies, args, kwargs)


class _ShareByShare(TrainStep):
    """The step of one process that normalizes over each rank's share of the batch alone, as ranks do.

    Args:
        share: sequences of a rank.
    """

    def __init__(self, share: int, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._sequences = share

    def __call__(self) -> None:
        batch_size = self.workload.size.batch_size
        whole = self.inputs, self.targets
        for first in range(0, batch_size, self._sequences):
            part = slice(first, first + self._sequences)
            self.inputs, self.targets = tree_map_only(Tensor, operator.itemgetter(part), whole)
            self.forward()
            assert self.loss is not None
            self.loss = self.loss * (self._sequences / batch_size)
            self.backward()
        self.inputs, self.targets = whole
        self.optimizer_step()
