"""Train some steps of a check, and keep what is compared."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cs336sys.parity.weights import STEPS

# Factors of the loss, by which gradients are divided again: what one process can make of a gradient by rounding alone.
SCALES = (1.1, 0.9, 0.7)

# The name of a step's loss among compared tensors, before the step's number.
LOSS = "the loss of step "


def run_steps(
    step: Any,
    warmup: int,
    *,
    begin: Callable[[int], None] = lambda number: None,
    before_update: Callable[[], None] | None = None,
) -> list[Tensor]:
    """Run steps, each on a batch of its own, after ``warmup`` on the first batch; return their losses, scalar tensors.

    A workload with CUDA graphs is captured, and its own warm-up must be as long as the one asked for.

    Args:
        step: a :class:`~cs336sys.training.step.TrainStep`.
        begin: called before each step, with its number from 1.
        before_update: called in the first step before its last phase, which updates parameters.
    """
    if step.workload.uses_graphs:
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


def train(step: Any, model: nn.Module, warmup: int) -> dict[str, Tensor]:
    """Train, and return by name the losses of all steps, the weights after the last, and how far copies are off them.

    The model may compute with copies of weights in half precision, whose differences should be zeros.
    """
    losses = {f"{LOSS}{number}": loss for number, loss in enumerate(run_steps(step, warmup), 1)}
    weights, copies = step.weights(dict(model.named_parameters()))
    return losses | weights | copies
