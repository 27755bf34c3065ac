"""Train in one process, and sum each batch in several orders: a parameter is judged by how far those are apart.

A key's bias has a gradient that is zero but for rounding, as softmax does not see it, and a router may choose another
expert: each differs in every order.
"""

import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.parity.record import clone
from cs336sys.parity.training import run_steps
from cs336sys.training.step import draw_alike, random_state


@dataclass(frozen=True)
class Order:
    """The order in which one process sums the batch: part after part."""

    parts: tuple[tuple[int, ...], ...]  # The sequences of each, all parts equally many.
    scale: float = 1.0  # Multiplies losses, and divides gradients, so that all of the backward pass rounds elsewhere.
    shares: bool = False  # Whether the parts are those of ranks, in their order, which draw the ranks' random numbers.


@dataclass(frozen=True)
class Trained:
    """The result of some steps."""

    weights: dict[str, Tensor]  # After the last.
    losses: list[Tensor]  # Of all, () each.
    gradients: dict[str, Tensor]  # In the first step, in the host's memory: a GPU may hold just what training needs.
    draws: bool  # Whether a step drew random numbers.
    start: str  # A sum of each tensor of the model at first, by which trainings from other weights are told apart.

    @property
    def loss(self) -> float:
        """Return the loss of the first step."""
        return self.losses[0].item()


def train_in_order(step: Any, model: nn.Module, warmup: int, order: Order) -> Trained:
    """Train a model in one process, and sum each batch in an order.

    Args:
        step: a :class:`~cs336sys.training.step.TrainStep`; parts of users' models draw as :func:`draw_alike` says.
        model: what the step trains, without wrappers.
    """
    # For Trained.start, before training overwrites them.
    start = str([tensor.sum(dtype=torch.float64).item() for tensor in (*model.parameters(), *model.buffers())])
    passes = _Passes(step, model, order)
    step.phases = {"passes": passes.run, "optimizer": step.optimizer_step}
    losses = run_steps(step, warmup, begin=partial(setattr, passes, "step_number"))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Trained(weights, losses, passes.gradients, passes.draws, start)


@dataclass
class _Passes:
    """The passes of a step, of one part of the batch after another, whose gradients are averaged."""

    step: Any
    model: nn.Module
    order: Order
    step_number: int = 0  # From 1; 0 in the warm-up. Each step draws its own numbers.
    draws: bool = False  # Whether they drew random numbers.
    gradients: dict[str, Tensor] = field(default_factory=dict)  # Of the first step.

    def run(self) -> None:
        """Run forward and backward passes of all parts, and average losses and gradients."""
        step, parts, scale = self.step, self.order.parts, self.order.scale
        inputs, targets = step.inputs, step.targets
        losses = []
        for rank, part in enumerate(parts):
            step.inputs, step.targets = tree_map_only(Tensor, operator.itemgetter(list(part)), (inputs, targets))
            state_before = None
            # Ours draws no random numbers: it has no dropout.
            if not step.workload.is_ours:
                draw_alike(self.step_number, rank)
                state_before = random_state(step.device)
            step.forward()
            losses.append(step.loss.detach())
            if scale != 1.0:
                step.loss = step.loss * scale
            step.backward()
            self.draws = self.draws or (state_before is not None and random_state(step.device) != state_before)
        step.inputs, step.targets = inputs, targets
        step.loss = torch.stack(losses).mean()
        # As ranks do: each runs the backward pass of its own loss, and the gradients are averaged.
        factor = 1 / (scale * len(parts))
        if factor != 1.0:
            for parameter in step.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.step_number == 1:
            named = self.model.named_parameters()
            self.gradients = {name: clone(parameter.grad) for name, parameter in named if parameter.grad is not None}
