"""Train the whole batch in one process, for the weights and gradients that strategies are compared with.

A sum is rounded differently in each order. What that can do differs by parameter: a key's bias has a gradient that is
zero but for rounding, as softmax does not see it, and a router may choose another expert. So one process can sum the
same batch in other orders, and each parameter is judged by how far those are apart.
"""

import operator
import random
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.experiments.models import blocks_of, build_by_layers, build_compared_model
from cs336sys.experiments.optimizers import build_optimizer
from cs336sys.experiments.parallel.sharded_strategies import return_dtype_of_sharded
from cs336sys.experiments.training import AUTOCAST_DTYPES, TrainStep, set_matmul_precision, train_for_check
from cs336sys.parallel.fsdp.calls import cast_floating, compute_in_own_dtype
from cs336sys.parallel.fsdp.plan import plan_sharding
from cs336sys.parity.weights import OPTIMIZER_SETTINGS, plainly_trained
from cs336sys.workload import ParallelWorkload


@dataclass(frozen=True)
class Order:
    """The order in which one process sums the batch: part after part.

    Attributes:
        parts: the sequences of each, all parts equally many; those of rank r are its share, in ``shares``.
        scale: what losses are multiplied by, and gradients divided by, so that all of the backward pass is rounded
            elsewhere.
        shares: whether the parts are those of ranks, which draw the ranks' random numbers.
    """

    parts: tuple[tuple[int, ...], ...]
    scale: float = 1.0
    shares: bool = False


@dataclass(frozen=True)
class Trained:
    """The result of some steps.

    Attributes:
        weights: after the last.
        gradients: in the first, before the update.
        losses: of all.
        loss_dtype: theirs.
        draws: whether a step drew random numbers.
        start: a sum of each tensor of the model at first.
    """

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    loss_dtype: torch.dtype
    draws: bool
    start: str


def shares_of_ranks(parallel: ParallelWorkload, scale: float = 1.0) -> Order:
    shares = parallel.training.size.batch_size // parallel.share
    return Order(tuple(tuple(range(n * parallel.share, (n + 1) * parallel.share)) for n in range(shares)), scale, True)


def other_orders(parallel: ParallelWorkload, reference: Order) -> list[Order]:
    """Orders that differ from the reference's by rounding alone, if the loss is a mean over the batch.

    Models that normalize over a rank's share, or draw random numbers for it, are the same for whole shares alone.
    """
    if reference.shares:
        return [shares_of_ranks(parallel, scale) for scale in (1.1, 0.9, 0.7)]
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


def draw_alike(step: int, rank: int) -> None:
    """Let the random numbers of a step be those that every process draws for this rank's share of its batch."""
    seed = 1_000_003 * step + rank
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def random_state(device: torch.device) -> Any:
    """Identify the random numbers drawn so far."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None,
        random.getstate(),
        str(numpy.random.get_state()) if numpy is not None else None,
    )


def train_alone(
    parallel: ParallelWorkload, device: torch.device, warmup: int, order: Order, learning_rate: float
) -> Trained:
    """Train on the whole batch, in this order."""
    workload = parallel.training
    set_matmul_precision(workload)
    plain = starting_model(parallel, device)
    start = str([tensor.sum(dtype=torch.float64).item() for tensor in (*plain.parameters(), *plain.buffers())])
    workload = plainly_trained(workload)
    model: nn.Module = plain
    if not parallel.uses_autocast and workload.precision in AUTOCAST_DTYPES:
        blocks = None if workload.is_ours else list(blocks_of(workload, plain).values()) or None
        model = _InHalfPrecision(plain, AUTOCAST_DTYPES[workload.precision], blocks)
    scaler = torch.amp.GradScaler(device.type, enabled=workload.scales_loss)
    if model is not plain:
        workload = replace(workload, precision="fp32")
    optimizer = build_optimizer(workload, model.parameters(), **OPTIMIZER_SETTINGS | {"lr": learning_rate})
    step = _PartAfterPart(order, workload, device, model=model, optimizer=optimizer, scaler=scaler)
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                # In the host's memory: a GPU may hold just what training needs.
                gradients[name] = parameter.grad.detach().to_dense().to("cpu", copy=True)

    losses = train_for_check(step, warmup, begin=step.begin, before_update=keep_gradients)
    return Trained(
        {name: parameter.detach() for name, parameter in plain.named_parameters()},
        gradients,
        torch.stack(losses).float().tolist(),
        losses[0].dtype,
        step.draws,
        start,
    )


class _PartAfterPart(TrainStep):
    """A step of one process that computes one part of the batch after another, and adds up their gradients.

    Attributes:
        draws: whether a step drew random numbers.
    """

    def __init__(self, order: Order, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._order = order
        self._number = 0
        self.draws = False
        self.phases = {"passes": self._passes, "optimizer": self.optimizer_step}

    def begin(self, number: int) -> None:
        self._number = number

    def _passes(self) -> None:
        whole = self.inputs, self.targets
        parts, scale = self._order.parts, self._order.scale
        losses = []
        for rank, part in enumerate(parts):
            if len(parts) > 1:
                index = slice(part[0], part[-1] + 1)
                self.inputs, self.targets = tree_map_only(Tensor, operator.itemgetter(index), whole)
            elif part != tuple(sorted(part)):
                self.inputs, self.targets = tree_map_only(Tensor, lambda tensor: tensor.flip(0), whole)
            before = None
            if not self.workload.is_ours:
                draw_alike(self._number, rank)
                before = random_state(self.device)
            self.forward()
            assert self.loss is not None
            losses.append(self.loss.detach())
            if scale != 1.0:
                self.loss = self.loss * scale
            self.backward()
            self.draws = self.draws or (before is not None and random_state(self.device) != before)
        self.inputs, self.targets = whole
        self.loss = torch.stack(losses).mean()
        # Not the losses, as ranks do not: they average gradients.
        factor = 1 / (scale * len(parts))
        if factor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


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
