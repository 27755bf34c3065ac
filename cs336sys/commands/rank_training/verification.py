"""Check that a strategy trains the weights that one process trains on the whole batch."""

import gc
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp.calls import cast_floating, compute_in_own_dtype
from cs336sys.parallel.fsdp.plan import plan_sharding
from cs336sys.parity.orders import Order, Trained, draw_alike, train_in_order
from cs336sys.parity.rounding import LARGEST_ROUNDING, LEARNING_RATES, MEAN_LOSS, parallel_tolerance, stay_near
from cs336sys.parity.training import SCALES, run_steps
from cs336sys.parity.weights import OPTIMIZER_SETTINGS, TensorComparison, WeightDifference, norm, rounding_note
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.flop_counting import count_step
from cs336sys.training.model import blocks_of, build_by_layers, build_compared_model, plainly_trained
from cs336sys.training.optimizers import build_optimizer
from cs336sys.training.ranks.sharded_strategies import return_dtype_of_sharded
from cs336sys.training.ranks.step import ParallelStep, rank_device, warmup_of_capture
from cs336sys.training.step import AUTOCAST_DTYPES, TrainStep, set_matmul_precision

_WRAPPERS = (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, nn.parallel.DistributedDataParallel)


def mean_gradients(model: nn.Module, *, is_sharded: bool) -> dict[str, tuple[Tensor | None, range | None]]:
    """Each parameter's mean gradient on this rank, and the rows of the parameter that it is of; None is all of them.

    All ranks call it together.

    Args:
        is_sharded: whether the strategy is ``fsdp`` or ``torch-fsdp``.
    """
    plain: Any = model.module if isinstance(model, _WRAPPERS) else model
    sharded, named = {}, plain.named_parameters()
    if is_sharded:
        # It brings torch's compiler, which the ranks of other strategies are spared.
        from cs336sys.parallel.fsdp import FSDP

        if isinstance(model, FSDP):
            sharded, named = model.sharded_parameters, model.replicated_parameters.items()
    gradients: dict[str, tuple[Tensor | None, range | None]] = {
        name: (parameter.shard.grad, parameter.rows) for name, parameter in sharded.items()
    }
    for name, parameter in named:
        whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        gradients[name] = whole, None
    return gradients


@dataclass
class _Reference:
    """The training of one process.

    Attributes:
        trained: in the order that all are compared with.
        learning_rate: of the check's optimizer.
        others: in other orders, once they are asked for; without those of a loss that is no mean over the batch.
        of_parts: the loss of the first batch as the mean of its shares', where that is another one.
        is_repeatable: whether the model was the same each time that it was built.
    """

    trained: Trained
    order: Order
    learning_rate: float
    others: list[Trained] | None = None
    of_parts: float | None = None
    is_repeatable: bool = True


def verify_training(workload: ParallelWorkload) -> WeightDifference:
    """Train alike with the strategy and alone, on every rank, and compare all weights. All ranks call it together.

    Where ranks hold gradients, those of the first step are compared, too: weights do not show those that are smaller
    than their last bit.

    What is farther off than the precision explains is held against what one process makes of the same batch in other
    orders: a gradient that is zero but for rounding differs from order to order.
    """
    device = rank_device(workload)
    if not workload.training.is_ours:
        user_models.without_dropout()
    training = workload.training.with_layers(workload.check_layers or workload.training.size.num_layers)
    workload = replace(workload, training=_fitting_batch(training, device))
    # Before a step is captured it is trained a little.
    warmup = warmup_of_capture(workload) if workload.training.cuda_graph == "on" else 0
    reference = _reference(workload, device, warmup)
    gc.collect()
    reason = _why_not(workload, reference)
    if reason:
        return WeightDifference(math.nan, math.nan, "", workload.training.size.num_layers, reason=reason)
    comparison = _Comparison(workload, device, warmup, reference)
    comparison.train()
    return comparison.judge()


def _fitting_batch(workload: Workload, device: torch.device) -> Workload:
    """The workload, or one with so few layers that it fits into the GPU together with two more copies of its weights.

    One process trains the whole batch here, which needs more memory than a rank does. The same on every rank.
    """
    if device.type == "cpu":
        return workload
    free = min(gather_objects(torch.cuda.mem_get_info(device)[0]))
    while workload.size.num_layers > 1:
        if workload.is_ours:
            peak = plainly_trained(workload).predicted_peak()
            needed_bytes = peak.total + 2 * peak.parameters
        else:
            # Weights, gradients, two states and two copies more, in fp32; and as much again for activations.
            needed_bytes = 2 * 6 * 4 * (count_step(workload).parameters or 0)
        if needed_bytes < 0.9 * free:
            break
        workload = workload.with_layers(workload.size.num_layers // 2)
    return workload


def shares_of_ranks(parallel: ParallelWorkload, scale: float = 1.0) -> Order:
    shares = parallel.training.size.batch_size // parallel.share
    return Order(tuple(tuple(range(n * parallel.share, (n + 1) * parallel.share)) for n in range(shares)), scale, True)


def other_orders(parallel: ParallelWorkload, reference: Order) -> list[Order]:
    """Orders that differ from the reference's by rounding alone, if the loss is a mean over the batch.

    Models that normalize over a rank's share, or draw random numbers for it, are the same for whole shares alone.
    """
    if reference.shares:
        return [shares_of_ranks(parallel, scale) for scale in SCALES]
    batch, share = parallel.training.size.batch_size, parallel.share
    smaller = max(size for size in range(1, max(2, share)) if batch % size == 0)
    small = tuple(tuple(range(first, first + smaller)) for first in range(0, batch, smaller))
    return [
        shares_of_ranks(parallel),
        shares_of_ranks(parallel, 1.1),
        Order(small[::-1], 0.9),
        Order((tuple(reversed(range(batch))),), 0.7),
    ]


def starting_model(workload: ParallelWorkload, device: torch.device) -> nn.Module:
    """The model with the values that ranks start with."""
    if not workload.uses_autocast:
        return build_by_layers(plainly_trained(workload.training), device)
    return build_compared_model(workload.training, device)


def train_alone(
    parallel: ParallelWorkload, device: torch.device, warmup: int, order: Order, learning_rate: float
) -> Trained:
    """Train on the whole batch, in this order."""
    workload = parallel.training
    set_matmul_precision(workload)
    plain = starting_model(parallel, device)
    workload = plainly_trained(workload)
    model: nn.Module = plain
    scaler = torch.amp.GradScaler(device.type, enabled=workload.scales_loss)
    if not parallel.uses_autocast and workload.precision in AUTOCAST_DTYPES:
        blocks = None if workload.is_ours else list(blocks_of(workload, plain).values()) or None
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision], blocks)
        workload = replace(workload, precision="fp32")
    optimizer = build_optimizer(workload, model.parameters(), **OPTIMIZER_SETTINGS | {"lr": learning_rate})
    step = TrainStep(workload, device, model=model, optimizer=optimizer, scaler=scaler)
    return train_in_order(step, plain, warmup, order)


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


# What one process trained for the last check, with what it trained.
_kept: dict[tuple[Workload, bool, bool, int, int], _Reference] = {}


def _reference(parallel: ParallelWorkload, device: torch.device, warmup: int) -> _Reference:
    """Train in one process; on a CPU keep it for the next strategy. A GPU's memory is what is to be measured."""
    workload = replace(parallel.training, compile="off", cuda_graph="off")
    parallel = replace(parallel, training=workload)
    by_layers = not workload.is_ours and not parallel.uses_autocast
    key = (workload, parallel.uses_autocast or not workload.is_half, by_layers, warmup, parallel.share)
    if key not in _kept:
        _kept.clear()
        reference = _trained_reference(parallel, device, warmup)
        if device.type != "cpu":
            return reference
        _kept[key] = reference
    return _kept[key]


def _trained_reference(parallel: ParallelWorkload, device: torch.device, warmup: int) -> _Reference:
    order = Order((tuple(range(parallel.training.size.batch_size)),))
    if parallel.training.is_ours:
        rate = LEARNING_RATES[0]
        return _Reference(train_alone(parallel, device, warmup, order, rate), order, rate)
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in starting_model(parallel, device).modules()):
        order = shares_of_ranks(parallel)
    for rate in LEARNING_RATES:
        trained = train_alone(parallel, device, warmup, order, rate)
        if trained.draws and not order.shares:
            # Each rank draws for its share.
            order = shares_of_ranks(parallel)
            trained = train_alone(parallel, device, warmup, order, rate)
        stays = not math.isfinite(trained.loss) or stay_near(torch.stack(trained.losses).tolist())
        # Alike on all ranks, whatever the last bits of theirs are.
        if all(gather_objects(stays)):
            break
    return _Reference(trained, order, rate)


@dataclass
class _Comparison:
    """A strategy's training compared with one process; gradients by the names of their parameters."""

    workload: ParallelWorkload
    device: torch.device
    warmup: int
    reference: _Reference
    _rows: dict[str, slice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tolerance = parallel_tolerance(self.workload)
        # Of none, where no gradients are compared.
        self._gradients = TensorComparison({}, {}, {}, self._tolerance)

    def train(self) -> None:
        workload, trained = self.workload, self.reference.trained
        holds = workload.strategy_record.leaves_mean_gradients
        if holds and workload.training.cuda_graph == "on":
            # Replays cannot be looked into: gradients are those of launched steps.
            self._train(replace(workload, training=replace(workload.training, cuda_graph="off")), compares=True)
            gc.collect()
            holds = False
        step = self._train(workload, compares=holds)
        weights, copies = step.weights(step.replica.whole_parameters())
        start = dict(starting_model(workload, self.device).named_parameters())
        self._weights = TensorComparison(start, trained.weights, weights | copies, self._tolerance)
        # No rounding explains a copy that differs from its weight.
        for name in copies:
            self._weights.far.pop(name, None)

    def _train(self, workload: ParallelWorkload, *, compares: bool) -> ParallelStep:
        step = ParallelStep(workload, self.device, **OPTIMIZER_SETTINGS | {"lr": self.reference.learning_rate})
        rank = torch.distributed.get_rank()
        run_steps(
            step,
            self.warmup,
            begin=lambda number: None if workload.training.is_ours else draw_alike(number, rank),
            before_update=(lambda: self._compare_gradients(step.model)) if compares else None,
        )
        return step

    def _compare_gradients(self, model: nn.Module) -> None:
        rank_gradients = mean_gradients(model, is_sharded=not self.workload.uses_autocast)
        expected, trained = {}, {}
        for name, (gradient, rows) in rank_gradients.items():
            whole = self.reference.trained.gradients.get(name)
            self._rows[name] = slice(None) if rows is None else slice(rows.start, rows.stop)
            if whole is not None:
                expected[name] = whole[self._rows[name]]
            if gradient is not None:
                trained[name] = gradient.to_dense()
        values = (*expected.values(), *trained.values())
        if self.workload.training.scales_loss and not all(tensor.isfinite().all() for tensor in values):
            # Scaled, they may overflow in the first step, which is skipped then.
            return
        self._gradients = TensorComparison({}, expected, trained, self._tolerance)

    def judge(self) -> WeightDifference:
        """The parameter that is farthest off, those aside that the rounding of one process explains."""
        allowed, num_layers = self._tolerance, self.workload.training.size.num_layers
        weights, gradients = self._weights, self._gradients
        names = weights.explained(lambda name: (other.weights[name].cpu() for other in self._reordered_trainings()))
        difference = weights.farthest(num_layers, names)
        explained = gradients.explained(self._other_gradients)
        of_gradients = gradients.farthest(num_layers, explained)
        if of_gradients.relative > allowed >= difference.relative:
            difference = replace(of_gradients, of_gradients=True)
        names = list(dict.fromkeys([*names, *explained]))
        notes: tuple[str, ...] = ()
        if names:
            notes = (f"{self.workload.strategy}: {rounding_note(names, len(weights.distances), allowed)}",)
        if not self.reference.is_repeatable:
            reason = (
                f"{self.workload.training.user.model}: built twice from one seed it is not the same model, so no "
                "weights are compared; take its random numbers from torch"
            )
            return replace(difference, relative=math.nan, reason=reason)
        reason = ""
        of_parts = self.reference.of_parts
        if of_parts is not None and difference.relative > allowed:
            whole = self.reference.trained.loss
            reason = (
                f"the loss of a batch must be the mean of its parts' losses: that is {of_parts:.6g}, and the loss of "
                f"the whole batch {whole:.6g}"
            )
        return replace(difference, allowed=allowed, notes=notes, reason=reason)

    def _other_gradients(self, name: str) -> Iterator[Tensor]:
        """The rows of a gradient that one process has in other orders."""
        for other in self._reordered_trainings():
            gradient = other.gradients.get(name)
            zeros = torch.zeros_like(self._gradients.far[name][0])
            yield zeros if gradient is None else gradient[self._rows[name]]

    def _reordered_trainings(self) -> list[Trained]:
        reference = self.reference
        if reference.others is None:
            reference.others = []
            for order in other_orders(self.workload, reference.order):
                trained = train_alone(self.workload, self.device, self.warmup, order, reference.learning_rate)
                whole, of_parts = reference.trained.loss, trained.loss
                if trained.start != reference.trained.start:
                    reference.is_repeatable = False
                    return reference.others
                bound = max(MEAN_LOSS[reference.trained.losses[0].dtype], self._tolerance / 10)
                if not abs(of_parts - whole) <= bound * abs(whole):
                    # Another sum, not the same one rounded otherwise.
                    reference.of_parts = of_parts
                elif _total(reference.trained.gradients, trained.gradients) <= LARGEST_ROUNDING:
                    reference.others.append(trained)
        return reference.others


def _total(expected: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> float:
    """Norm of all differences over the norm of all that is expected."""
    if expected.keys() != trained.keys():
        return math.inf
    off = math.hypot(*(norm(trained[name] - value) for name, value in expected.items()))
    return off / (math.hypot(*map(norm, expected.values())) or math.inf)


def _why_not(workload: ParallelWorkload, reference: _Reference) -> str:
    """Explain why weights cannot be compared, or return nothing."""
    training, trained = workload.training, reference.trained
    name = training.user.model
    if not training.is_ours and not math.isfinite(trained.loss):
        return f"{name}: its loss is {trained.loss} in one process too, so no weights are compared"
    if trained.draws and (training.is_compiled or training.cuda_graph == "on"):
        return (
            f"{name}: a step draws random numbers, and compiled or captured draws others than one process does, so no "
            "weights are compared; choose --compile off and --cuda-graph off to have them compared"
        )
    return ""
