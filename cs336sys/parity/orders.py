"""Train in one process, and sum each batch in an order.

A sum is rounded differently in each order. What that can do differs by parameter: a key's bias has a gradient that is
zero but for rounding, as softmax does not see it, and a router may choose another expert. So one process can sum the
same batch in other orders, and each parameter is judged by how far those are apart.
"""

import operator
import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.parity.training import run_steps


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
        losses: of all, () each.
        gradients: in the first step, before the update, in the host's memory: a GPU may hold just what training needs.
        draws: whether a step drew random numbers.
        start: a sum of each tensor of the model at first.
    """

    weights: dict[str, Tensor]
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    draws: bool
    start: str

    @property
    def loss(self) -> float:
        """Return the loss of the first step."""
        return self.losses[0].item()


def train_in_order(step: Any, model: nn.Module, warmup: int, order: Order) -> Trained:
    """Train a model in one process, and sum each batch in an order.

    Args:
        step: a :class:`~cs336sys.training.step.TrainStep`; of models that are not ours, each part draws the
            random numbers of :func:`draw_alike`.
        model: what the step trains, without wrappers.
    """
    start = str([tensor.sum(dtype=torch.float64).item() for tensor in (*model.parameters(), *model.buffers())])
    passes = _Passes(step, order)
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().to_dense().to("cpu", copy=True)

    losses = run_steps(step, warmup, begin=partial(setattr, passes, "number"), before_update=keep_gradients)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Trained(weights, losses, gradients, passes.draws, start)


class _Passes:
    """The passes of a step, of one part of the batch after another, whose gradients are averaged.

    Attributes:
        number: of the step, from 1.
        draws: whether they drew random numbers.
    """

    def __init__(self, step: Any, order: Order):
        self._step, self._order = step, order
        self.number = 0
        self.draws = False
        step.phases = {"passes": self.run, "optimizer": step.optimizer_step}

    def run(self) -> None:
        step = self._step
        parts, scale = self._order.parts, self._order.scale
        whole = step.inputs, step.targets
        losses = []
        for rank, part in enumerate(parts):
            step.inputs, step.targets = tree_map_only(Tensor, operator.itemgetter(list(part)), whole)
            before = None
            if not step.workload.is_ours:
                draw_alike(self.number, rank)
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
    of_gpu = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    of_numpy = str(numpy.random.get_state()) if numpy is not None else None
    return torch.get_rng_state().tolist(), of_gpu, random.getstate(), of_numpy
