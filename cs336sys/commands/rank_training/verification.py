"""Check that a strategy trains the weights that one process trains on the whole batch."""

import gc
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cs336sys.commands.rank_training.rank import rank_job
from cs336sys.findings import sentence
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.fsdp.calls import cast_floating, compute_in_own_dtype
from cs336sys.parallel.fsdp.parameter import plan_sharding
from cs336sys.parity.orders import Order, Trained, train_in_order
from cs336sys.parity.rounding import LARGEST_ROUNDING, LEARNING_RATES, MEAN_LOSS, stay_near, tolerance
from cs336sys.parity.training import SCALES, run_steps
from cs336sys.parity.weights import OPTIMIZER_SETTINGS, TensorComparison, WeightDifference, norm, rounding_note
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.flop_counting import count_step
from cs336sys.training.model import blocks_of, build_by_layers, build_compared_model, build_optimizer, plainly_trained
from cs336sys.training.ranks.step import ParallelStep, rank_device, warmup_of_capture
from cs336sys.training.ranks.strategies import Replica, cast_outputs_of_replicated
from cs336sys.training.step import AUTOCAST_DTYPES, TrainStep, draw_alike, set_matmul_precision


def mean_gradients(replica: Replica) -> dict[str, tuple[Tensor | None, range | None]]:
    """Return each parameter's mean gradient on this rank, and which rows of the parameter it is of, None for all.

    All ranks call it together.
    """
    gradients: dict[str, tuple[Tensor | None, range | None]] = {}
    model: Any = replica.model
    if hasattr(model, "sharded_parameters"):  # This project's FSDP, whose other parameters every rank has whole.
        gradients = {name: (part.shard.grad, part.rows) for name, part in model.sharded_parameters.items()}
        replicated = model.replicated_parameters
    else:
        replicated = replica.named_parameters()
    for name, parameter in replicated.items():  # Or cut by torch's fully_shard(): DTensors.
        whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        gradients[name] = whole, None
    return gradients


@dataclass
class _Reference:
    """The training of one process."""

    trained: Trained
    order: Order
    learning_rate: float  # Of the check's optimizer.
    # In other orders, once they are asked for; without those of a loss that is no mean over the batch.
    others: list[Trained] | None = None
    loss_of_parts: float | None = None  # Of the first batch, as the mean of its parts' losses, where that is another.
    is_repeatable: bool = True  # Whether the model was the same each time that it was built.


@rank_job
def verify_training(workload: ParallelWorkload) -> WeightDifference:
    """Train alike with the strategy and alone, on every rank, and compare all weights. All ranks call it together.

    Where ranks hold gradients, those of the first step are compared, too: weights do not show those that are smaller
    than their last bit.

    What is farther off than the precision explains is held against what one process makes of the same batch in other
    orders: a gradient that is zero but for rounding differs from order to order.
    """
    device = rank_device(workload)
    if not workload.training.is_ours:  # Ours has no dropout, whose masks would differ from those of one process.
        user_models.without_dropout()
    training = workload.training.with_layers(workload.check_layers or workload.training.size.num_layers)
    workload = replace(workload, training=_with_fitting_layers(training, device))
    # A capture runs steps before, which train: the one process runs as many.
    warmup = warmup_of_capture(workload) if workload.training.uses_graphs else 0
    reference = _reference(workload, device, warmup)
    gc.collect()  # The strategy needs the memory.
    training, trained, reason = workload.training, reference.trained, ""
    if not training.is_ours and not math.isfinite(trained.loss):
        reason = sentence(__package__, "no finite loss", model=training.user.model, loss=trained.loss)
    elif trained.draws and (training.is_compiled or training.uses_graphs):
        reason = sentence(__package__, "other draws", model=training.user.model)
    if reason:
        num_layers = training.size.num_layers
        return WeightDifference(largest=math.nan, relative=math.nan, parameter="", num_layers=num_layers, reason=reason)
    return _Comparison(workload, device, warmup, reference).farthest()


def _with_fitting_layers(workload: Workload, device: torch.device) -> Workload:
    """Return the workload with so few layers that it fits into the GPU with two more copies of its weights.

    The copies are the weights at the start and those of one process, which stay to be compared. One process trains the
    whole batch here, which needs more memory than a rank does. The same on every rank.
    """
    if device.type == "cpu":
        return workload
    free_bytes = min(gather_objects(torch.cuda.mem_get_info(device)[0]))
    while workload.size.num_layers > 1:
        if workload.is_ours:
            peak = plainly_trained(workload).predicted_peak()
            needed_bytes = peak.total + 2 * peak.parameters
        else:
            # Weights, gradients, two states and two copies more, in fp32; and as much again for activations.
            needed_bytes = 2 * 6 * 4 * (count_step(workload).parameters or 0)  # 0 if it cannot be counted: it is tried.
        if needed_bytes < 0.9 * free_bytes:  # Not all can be filled, see fits_on_one_rank().
            break
        workload = workload.with_layers(workload.size.num_layers // 2)
    return workload


def _cut_in_parts(batch_size: int, part_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + part_size)) for first in range(0, batch_size, part_size))


def shares_of_ranks(parallel: ParallelWorkload, scale: float = 1.0) -> Order:
    return Order(_cut_in_parts(parallel.training.size.batch_size, parallel.sequences_per_rank), scale, shares=True)


def other_orders(parallel: ParallelWorkload, reference: Order) -> list[Order]:
    """Return orders that differ from the reference's by rounding alone, if the loss is a mean over the batch.

    Models that normalize over a rank's share, or draw random numbers for it, are the same for whole shares alone: these
    are only scaled. Scales that are no powers of two let the backward pass round elsewhere.
    """
    if reference.shares:
        return [shares_of_ranks(parallel, scale) for scale in SCALES]
    batch_size = parallel.training.size.batch_size
    # The largest that divides the batch and is smaller than a share, but for a share of one sequence.
    part_size = max(size for size in range(1, max(2, parallel.sequences_per_rank)) if batch_size % size == 0)
    return [  # Of the reference's parts, the whole batch, all differ; scales are those of SCALES.
        shares_of_ranks(parallel),
        shares_of_ranks(parallel, scale=1.1),
        Order(_cut_in_parts(batch_size, part_size)[::-1], scale=0.9),
        Order((tuple(reversed(range(batch_size))),), scale=0.7),
    ]


def starting_model(workload: ParallelWorkload, device: torch.device) -> nn.Module:
    """Build the model with the values that ranks start with: fully sharded ones are built layer by layer."""
    if not workload.uses_autocast:
        return build_by_layers(plainly_trained(workload.training), device)
    return build_compared_model(workload.training, device)


def train_alone(
    parallel: ParallelWorkload, device: torch.device, warmup: int, order: Order, learning_rate: float
) -> Trained:
    """Train in one process on the whole batch, summed in an order, in the precision of the strategy."""
    set_matmul_precision(parallel.training)
    model = plain = starting_model(parallel, device)
    workload = plainly_trained(parallel.training)
    scaler = torch.amp.GradScaler(device.type, enabled=workload.scales_loss)  # Asked before the precision is replaced.
    if not parallel.uses_autocast and workload.precision in AUTOCAST_DTYPES:
        # None, for a model of ours or one without blocks: plan_sharding() finds the units.
        blocks = None if workload.is_ours else list(blocks_of(workload, plain).values()) or None
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision], blocks)
        workload = replace(workload, precision="fp32")  # Without autocast.
    optimizer = build_optimizer(workload, model.parameters(), **OPTIMIZER_SETTINGS | {"lr": learning_rate})
    step = TrainStep(workload, device, model=model, optimizer=optimizer, scaler=scaler)
    return train_in_order(step, plain, warmup, order)


class _InHalfPrecision(nn.Module):
    """Computes with copies of what a fully sharded model shards, in ``dtype``, and keeps weights in fp32, as that does.

    Parameters that such a model replicates stay in fp32: layers that have some convert their inputs and outputs. The
    inputs of ``blocks`` are converted, as those of its units are; with None, :func:`plan_sharding` finds the units.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, blocks: Collection[nn.Module] | None):
        super().__init__()
        self.module, self._dtype = module, dtype
        plan = plan_sharding(module, blocks)
        self._sharded_names = [entry.names[0] for entry in plan.all_sharded]  # Any name of a tied parameter will do.
        for owner in {owner: None for entry in plan.replicated for owner, _ in entry.owners}:  # Each once.
            compute_in_own_dtype(owner, dtype)  # Does nothing to layers that are not of torch.nn.
        if blocks is not None:  # Layers of a user's own, which may return fp32; ours return what they take.
            cast_outputs_of_replicated(module, blocks, dtype)
        for block in blocks or ():
            block.register_forward_pre_hook(
                lambda _, args, kwargs: cast_floating((args, kwargs), dtype), with_kwargs=True
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        copies = {name: self.module.get_parameter(name).to(self._dtype) for name in self._sharded_names}
        args, kwargs = cast_floating((args, kwargs), self._dtype)
        return functional_call(self.module, copies, args, kwargs)


# The last check's training in one process, by what decides it.
_kept: dict[tuple[Workload, bool, bool, int, int], _Reference] = {}


def _reference(parallel: ParallelWorkload, device: torch.device, warmup: int) -> _Reference:
    """Train in one process; on a CPU keep that for the next strategy. On a GPU it would fill what is measured."""
    workload = replace(parallel.training, compile="off", cuda_graph="off")  # One process does neither.
    parallel = replace(parallel, training=workload)
    # Strategies that agree in the following train alike: see starting_model() and train_alone().
    starts_by_layers = not workload.is_ours and not parallel.uses_autocast  # Ours starts alike, however it is built.
    autocasts = parallel.uses_autocast or not workload.is_half  # In fp32 nothing is cast: True for all, to be equal.
    key = (workload, autocasts, starts_by_layers, warmup, parallel.sequences_per_rank)
    if key in _kept:
        return _kept[key]
    _kept.clear()
    reference = _trained_reference(parallel, device, warmup)
    if device.type == "cpu":
        _kept[key] = reference
    return reference


def _trained_reference(parallel: ParallelWorkload, device: torch.device, warmup: int) -> _Reference:
    """Train in one process, as far as possible in one part, with a learning rate that losses do not run away with."""
    batch_size = parallel.training.size.batch_size
    order = Order(_cut_in_parts(batch_size, part_size=batch_size))  # The whole batch is one part.
    if parallel.training.is_ours:
        rate = LEARNING_RATES[0]  # Ours draws nothing, has no batch norm, and trains at this rate.
        return _Reference(train_alone(parallel, device, warmup, order, rate), order, rate)
    # Batch norm takes the statistics of a rank's share.
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in starting_model(parallel, device).modules()):
        order = shares_of_ranks(parallel)
    for rate in LEARNING_RATES:
        trained = train_alone(parallel, device, warmup, order, rate)
        if trained.draws and not order.shares:  # Random numbers, which each rank draws for its share: train again so.
            order = shares_of_ranks(parallel)
            trained = train_alone(parallel, device, warmup, order, rate)
        # No rate helps where the first loss is infinite: that is reported. Ranks agree, whose losses' last bits differ.
        is_stable = not math.isfinite(trained.loss) or stay_near(torch.stack(trained.losses).tolist())
        if all(gather_objects(is_stable)):
            break
    return _Reference(trained, order, rate)


class _Comparison:
    """A strategy's training compared with one process; gradients by the names of their parameters."""

    def __init__(self, workload: ParallelWorkload, device: torch.device, warmup: int, reference: _Reference):
        self._workload, self._device, self._warmup, self._reference = workload, device, warmup, reference
        self._tolerance = tolerance(workload.training, workload.gradient_dtype)
        self._gradients = TensorComparison({}, {}, {}, self._tolerance)  # Of none, unless they are compared.
        self._rows: dict[str, slice] = {}  # This rank's, of each gradient.
        compares_gradients = workload.strategy_record.leaves_mean_gradients
        if compares_gradients and workload.training.uses_graphs:
            # Replays cannot be looked into, so gradients are compared in another training, of launched steps.
            self._train(replace(workload, training=replace(workload.training, cuda_graph="off")), compares=True)
            gc.collect()  # The next training needs the memory.
            compares_gradients = False
        step = self._train(workload, compares=compares_gradients)
        # Of copies in half precision that the model computes with, how far they are off their weights: to be zeros.
        weights, copies = step.weights(step.replica.whole_parameters())
        start = dict(starting_model(workload, device).named_parameters())
        self._weights = TensorComparison(start, reference.trained.weights, weights | copies, self._tolerance)
        for name in copies:  # Rounding, which is looked for in ``far``, explains no copy that differs from its weight.
            self._weights.far.pop(name, None)

    def _train(self, workload: ParallelWorkload, *, compares: bool) -> ParallelStep:
        """Train by the strategy; ``compares``: the first step's gradients, too."""
        step = ParallelStep(workload, self._device, **OPTIMIZER_SETTINGS | {"lr": self._reference.learning_rate})
        rank = torch.distributed.get_rank()
        run_steps(
            step,
            self._warmup,
            begin=lambda number: None if workload.training.is_ours else draw_alike(number, rank),
            before_update=(lambda: self._compare_gradients(step.replica)) if compares else None,
        )
        return step

    def _compare_gradients(self, replica: Replica) -> None:
        """Compare this rank's rows of all gradients with those of one process."""
        rank_gradients = mean_gradients(replica)
        expected, trained = {}, {}
        for name, (gradient, rows) in rank_gradients.items():
            whole = self._reference.trained.gradients.get(name)
            self._rows[name] = slice(None) if rows is None else slice(rows.start, rows.stop)
            if whole is not None:
                expected[name] = whole[self._rows[name]]
            if gradient is not None:
                trained[name] = gradient.to_dense()  # As the reference's: embeddings may have sparse ones.
        values = (*expected.values(), *trained.values())
        if self._workload.training.scales_loss and not all(tensor.isfinite().all() for tensor in values):
            return  # Scaled, they may overflow in the first step, which is skipped then: none are compared.
        # Without a start, distances are relative to gradients, not to how far they have moved.
        self._gradients = TensorComparison({}, expected, trained, self._tolerance)

    def farthest(self) -> WeightDifference:
        """Return the parameter that is farthest off, those aside that the rounding of one process explains."""
        allowed, num_layers = self._tolerance, self._workload.training.size.num_layers
        weights, gradients, reference = self._weights, self._gradients, self._reference
        explained = weights.explained(lambda name: (other.weights[name].cpu() for other in self._reordered_trainings()))
        difference = weights.farthest(num_layers, explained)
        explained_gradients = gradients.explained(self._other_gradients)
        gradient_difference = gradients.farthest(num_layers, explained_gradients)
        if gradient_difference.relative > allowed >= difference.relative:  # No weight shows what is wrong.
            difference = replace(gradient_difference, of_gradients=True)
        if not reference.is_repeatable:
            reason = sentence(__package__, "other model", model=self._workload.training.user.model)
            return replace(difference, relative=math.nan, reason=reason)  # NaN: nothing could be compared.
        names = list(dict.fromkeys([*explained, *explained_gradients]))
        note = f"{self._workload.strategy}: {rounding_note(names, len(weights.distances), allowed)}"
        reason = ""
        if reference.loss_of_parts is not None and difference.relative > allowed:  # It may be the cause.
            losses = {"of_parts": reference.loss_of_parts, "whole": reference.trained.loss}
            reason = sentence(__package__, "loss of parts", **losses)
        return replace(difference, allowed=allowed, notes=(note,) if names else (), reason=reason)

    def _other_gradients(self, name: str) -> Iterator[Tensor]:
        """Yield this rank's rows of a gradient, from each training of one process that sums in another order."""
        trained, _ = self._gradients.far[name]
        for other in self._reordered_trainings():
            gradient = other.gradients.get(name)  # None counts as zeros, as in TensorComparison.
            yield torch.zeros_like(trained) if gradient is None else gradient[self._rows[name]]

    def _reordered_trainings(self) -> list[Trained]:
        """Train in one process in other orders, once, and keep the trainings that differ by rounding alone."""
        reference = self._reference
        if reference.others is not None:
            return reference.others
        reference.others = []
        whole_loss = reference.trained.loss
        # Rounding takes a loss so far: by its dtype, or by the precision computed in. A tenth of weights' tolerance is
        # what MEAN_LOSS has for that: 1e-2 in bf16, 2e-3 in fp16.
        bound = max(MEAN_LOSS[reference.trained.losses[0].dtype], self._tolerance / 10) * abs(whole_loss)
        for order in other_orders(self._workload, reference.order):
            trained = train_alone(self._workload, self._device, self._warmup, order, reference.learning_rate)
            if trained.start != reference.trained.start:  # The user's function has built another model.
                reference.is_repeatable = False
                break
            if not abs(trained.loss - whole_loss) <= bound:  # Or NaN.
                reference.loss_of_parts = trained.loss  # Another sum, not the same one rounded otherwise.
            elif _relative_to_all(reference.trained.gradients, trained.gradients) <= LARGEST_ROUNDING:
                reference.others.append(trained)  # Farther apart, gradients are of another computation.
        return reference.others


def _relative_to_all(expected: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> float:
    """Return the norm of all differences over the norm of all that is expected; infinite where names differ."""
    if expected.keys() != trained.keys():
        return math.inf
    off = math.hypot(*(norm(trained[name] - value) for name, value in expected.items()))
    return off / (math.hypot(*map(norm, expected.values())) or math.inf)
