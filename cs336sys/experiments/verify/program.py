"""The steps of a program: the same code on a rank and in one process, which differ in a few methods."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.experiments import user_models
from cs336sys.experiments.verify.cases import OVERFLOWN_STEP, Program, Share, Subject, batch_of, loss_of, shares_of
from cs336sys.experiments.verify.record import Record, clone, cloned_gradients
from cs336sys.experiments.verify.wraps import Wrapped
from cs336sys.parity.collectives import OBSERVED, CollectiveWatcher
from cs336sys.workload.verification import VerifiedWorkload

# So many elements, over all steps, are compared after every step; of more, after the first and the last.
_MOST_ELEMENTS = 2e7

# No step trains on the batch of this one.
_EVALUATION_STEP = 900


class ProgramRun:
    """A program run in one process; a rank overrides what it does otherwise.

    Args:
        record: is filled as the program goes on.

    Attributes:
        data: which of the batch's shares are its; None: all.
        step_shares: the shares that a step trains on.
        loss_factor: what the loss of a share is multiplied by, besides its weight.
        max_norm: of gradients, where the program clips.
        named, buffers: parameters and buffers by their names in the model; ``shapes`` of the model's parameters.
        inner: the optimizer that updates parameters, where ``optimizer`` wraps it.
        outputs: keeps the outputs of modules in the first forward pass.
        keeps: whether tensors are recorded, not losses alone.
    """

    subject: Subject
    wrapped: Wrapped
    optimizer: Any
    named: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    names: Mapping[int, str]
    shapes: Mapping[str, torch.Size]

    def __init__(
        self, workload: VerifiedWorkload, program: Program, device: torch.device, dtype: torch.dtype, record: Record
    ):
        self.workload, self.program, self.device, self.dtype, self.record = workload, program, device, dtype, record
        self.data: int | None = None
        self.step_shares: Sequence[Share] = ()
        self.loss_factor = 1.0
        self.max_norm: float | None = None
        self.outputs: AbstractContextManager[Any] | None = None
        self.watcher = CollectiveWatcher(None, is_late=False)
        self.keeps = True

    @property
    def inner(self) -> Any:
        return self.optimizer

    def shares(self, micro: int) -> list[Share]:
        shares = shares_of(self.workload, self.program, micro)
        return [share for share in shares if self.data in (None, share.data)]

    def train(self, first: int = 0) -> None:
        """Run the steps from ``first`` on, and record."""
        program, record = self.program, self.record
        elements = program.steps * sum(shape.numel() for shape in self.shapes.values())
        compared = range(1, program.steps + 1) if elements <= _MOST_ELEMENTS else (1, program.steps)
        for step in range(first, program.steps):
            self.watcher.step = step
            self.one_step(step)
            groups = getattr(self.inner, "param_groups", ())
            record.rates.append(tuple(float(group["lr"]) for group in groups if group["params"] and "lr" in group))
            if program.evaluate and step < program.steps - 1:
                self.watcher.phase = "evaluation"
                record.evaluations.append(self.evaluate())
            if self.keeps and step + 1 in compared:
                record.weights[step + 1] = self.weights()
                record.states[step + 1] = self.states()
            if self.ends_after(step):
                return
        if not program.start:
            record.buffers = {name: clone(buffer) for name, buffer in self.buffers.items()}

    def one_step(self, step: int) -> None:
        watcher, record = self.watcher, self.record
        batch = batch_of(self.workload, self.device, self.dtype, step)
        self.optimizer.zero_grad()
        total = 0.0
        for number, share in enumerate(self.step_shares):
            with self.around_share(number):
                watcher.phase = "forward"
                inputs, targets = self.part_of(share, batch)
                outputs = self.outputs if step == 0 and number == 0 else None
                with self.unused_turned_off(share):
                    with outputs or contextlib.nullcontext():
                        loss = self.loss(inputs, targets)
                    total += loss.item() * share.weight
                    watcher.phase = "backward"
                    self.backward(loss * (share.weight * self.loss_factor), step)
        watcher.phase = "finish"
        self.finish()
        record.losses.append(total)
        record.gradients.append(self.gradients() if self.keeps else {})
        watcher.phase = "clip"
        if self.program.clip:
            record.norms.append(self.clip())
        watcher.phase = "optimizer"
        self.update(step)

    def unused_turned_off(self, share: Share) -> AbstractContextManager[None]:
        """Within this, a layer is unused if the program and the share say so."""
        return self.subject.turned_off(self.program.unused and share.data == self.workload.data_ranks - 1)

    def call(self, inputs: Any) -> Any:
        return user_models.call_model(self.wrapped.module, inputs)

    def loss(self, inputs: Any, targets: Any) -> Tensor:
        output = self.call(inputs)
        if self.wrapped.loss is not None:
            return self.wrapped.loss(output, targets)
        return loss_of(self.workload, output, targets)

    def evaluate(self) -> float:
        """The loss of the evaluation's batch, of the shares that are trained on here."""
        module = self.wrapped.module
        module.eval()
        batch = batch_of(self.workload, self.device, self.dtype, _EVALUATION_STEP)
        with torch.no_grad():
            losses = [self.loss(*self.part_of(share, batch)).item() * share.weight for share in self.shares(1)]
        module.train()
        return sum(losses)

    def part_of(self, share: Share, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return share.of(batch)

    def around_share(self, number: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, step: int) -> None:
        loss.backward()

    def finish(self) -> None:
        """Finish gradients after the backward passes of a step."""

    def clip(self) -> float:
        bound = math.inf if self.max_norm is None else self.max_norm
        return torch.nn.utils.clip_grad_norm_(self.named.values(), bound).item()

    def update(self, step: int) -> None:
        # Of this step one rank's loss is infinite.
        if not (self.program.scale and step + 1 == OVERFLOWN_STEP):
            self.optimizer.step()

    def ends_after(self, step: int) -> bool:
        """Do what follows a step, and return whether the program ends with it."""
        return False

    @contextlib.contextmanager
    def observed(self) -> Any:
        """Within this, collectives are none of the wrap's."""
        phase, self.watcher.phase = self.watcher.phase, OBSERVED
        yield
        self.watcher.phase = phase

    def weights(self) -> dict[str, Tensor]:
        with self.observed():
            return {name: clone(parameter) for name, parameter in self.named.items()}

    def gradients(self) -> dict[str, Tensor]:
        with self.observed():
            return cloned_gradients(self.named)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by the names of parameters, tensors alone."""
        with self.observed():
            return {
                self.names[id(parameter)]: {
                    key: clone(torch.as_tensor(value))
                    for key, value in state.items()
                    if isinstance(value, Tensor) or (isinstance(value, int | float) and key == "step")
                }
                for parameter, state in self.inner.state.items()
                if id(parameter) in self.names
            }
