"""Train some steps of a check, as configured or in one process, and keep what is compared.

A sum is rounded differently in each order. What that can do differs by parameter: a key's bias has a gradient that is
zero but for rounding, as softmax does not see it, and a router may choose another expert. So one process can sum the
same batch in other orders, and each parameter is judged by how far those are apart.
"""

import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.parity.weights import STEPS

# The name of a step's loss among compared tensors, before the step's number.
LOSS = "the loss of step "


@dataclass(frozen=True)
class Order:
    """The order in which one process sums the batch: part after part.

    Attributes:
        parts: the sequences of each, all parts equally many; those of rank r are its share, in ``shares``. Without any,
            the batch as it is.
        scale: what losses are multiplied by, and gradients divided by, so that all of the backward pass is rounded
            elsewhere.
        shares: whether the parts are those of ranks, which draw the ranks' random numbers.
    """

    parts: tuple[tuple[int, ...], ...] = ()
    scale: float = 1.0
    shares: bool = False


# Other ways of rounding the same sum.
SCALES = (1.1, 0.9, 0.7)


@dataclass(frozen=True)
class Trained:
    """The result of some steps.

    Attributes:
        weights: after the last.
        losses: of all, () each.
        gradients: in the first step, before the update, in the host's memory: a GPU may hold just what training needs.
        copies: how far each copy that the model computes with is from its weight.
        draws: whether a step drew random numbers.
        start: a sum of each tensor of the model at first.
    """

    weights: dict[str, Tensor]
    losses: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    draws: bool = False
    start: str = ""

    @property
    def loss(self) -> float:
        """Return the loss of the first step."""
        return self.losses[0].item()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Losses, weights and differences of copies, by name."""
        losses = {f"{LOSS}{number}": loss for number, loss in enumerate(self.losses, 1)}
        return losses | self.weights | self.copies


def run_steps(
    step: Any,
    warmup: int,
    *,
    begin: Callable[[int], None] = lambda number: None,
    before_update: Callable[[], None] | None = None,
) -> list[Tensor]:
    """Run some steps, each on a batch of its own, after ``warmup`` on the first batch; the losses, () each.

    A workload with CUDA graphs is captured, and its own warm-up must be as long as the one asked for.

    Args:
        step: a :class:`~cs336sys.experiments.training.TrainStep`.
        begin: called before each step, with its number from 1.
        before_update: called in the first step before its last phase, which updates parameters.
    """
    if step.workload.cuda_graph == "on":
        assert step.warmup_of_capture == warmup, "the weights could not be compared"
        step.capture()
    else:
        for _ in range(warmup):
            step()
    losses = []
    for number in range(1, STEPS + 1):
        step.use_batch(number)
        begin(number)
        if number == 1 and before_update is not None:
            *others, update = step.phases.values()
            for phase in others:
                phase()
            before_update()
            update()
        else:
            step()
        # Replays overwrite it.
        losses.append(step.loss.detach().clone())
    return losses


def train(step: Any, model: nn.Module, warmup: int) -> Trained:
    """Train a model by a step as it is configured."""
    losses = run_steps(step, warmup)
    weights, copies = step.weights(dict(model.named_parameters()))
    return Trained(weights, losses, copies=copies)


def train_in_order(step: Any, model: nn.Module, warmup: int, order: Order, *, seeds: bool) -> Trained:
    """Train a model in one process, and sum each batch in an order.

    Args:
        model: what the step trains, without wrappers.
        seeds: let each part draw the random numbers that :func:`draw_alike` sets.
    """
    start = str([tensor.sum(dtype=torch.float64).item() for tensor in (*model.parameters(), *model.buffers())])
    passes = _Passes(step, order, seeds)
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().to_dense().to("cpu", copy=True)

    losses = run_steps(step, warmup, begin=passes.begin, before_update=keep_gradients)
    weights, copies = step.weights(dict(model.named_parameters()))
    return Trained(weights, losses, gradients, copies, passes.draws, start)


class _Passes:
    """The passes of a step, of one part of the batch after another, whose gradients are averaged.

    Attributes:
        draws: whether they drew random numbers.
    """

    def __init__(self, step: Any, order: Order, seeds: bool):
        self._step, self._order, self._seeds = step, order, seeds
        self._number = 0
        self.draws = False
        step.phases = {"passes": self.run, "optimizer": step.optimizer_step}

    def begin(self, number: int) -> None:
        self._number = number

    def run(self) -> None:
        step = self._step
        parts, scale = self._order.parts or ((),), self._order.scale
        whole = step.inputs, step.targets
        losses = []
        for rank, part in enumerate(parts):
            if len(parts) > 1:
                index = slice(part[0], part[-1] + 1)
                step.inputs, step.targets = tree_map_only(Tensor, operator.itemgetter(index), whole)
            elif part != tuple(sorted(part)):
                step.inputs, step.targets = tree_map_only(Tensor, lambda tensor: tensor.flip(0), whole)
            before = None
            if self._seeds:
                draw_alike(self._number, rank)
                before = random_state(step.device)
            step.forward()
            losses.append(step.loss.detach())
            if scale != 1.0:
                step.loss = step.loss * scale
            step.backward()
            self.draws = self.draws or (before is not None and random_state(step.device) != before)
        step.inputs, step.targets = whole
        step.loss = torch.stack(losses).mean()
        # Not the losses, as ranks do not: they average gradients.
        factor = 1 / (scale * len(parts))
        if factor != 1.0:
            for parameter in step.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


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
