"""The steps of a program in one process, which ranks override in part, and how far rounding alone takes them."""

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.commands.verify import cases
from cs336sys.commands.verify.record import OptimizerSpec, Record, captured_outputs, clone, default_optimizer
from cs336sys.commands.verify.wraps import Wrapped
from cs336sys.errors import UserCodeError
from cs336sys.parity.collectives import OBSERVED, CollectiveWatcher
from cs336sys.parity.rounding import LEARNING_RATES, MEAN_LOSS, stay_near
from cs336sys.settings.verification import VerifiedWorkload
from cs336sys.training import user_models

# So many elements, over all steps, are compared after every step; of more, after the first and the last.
_MOST_ELEMENTS = 2e7

# No step trains on the batch of this one.
_EVALUATION_STEP = 900


class ProgramRun:
    """A program run in one process; a rank overrides what it does otherwise.

    Attributes:
        record: filled as the program goes on.
        data: which of the batch's shares are its; None: all.
        step_shares: the shares that a step trains on.
        loss_factor: what the loss of a share is multiplied by, besides its weight.
        named, buffers: parameters and buffers by their names in the model; ``shapes`` of the model's parameters.
        inner: the optimizer that updates parameters, where ``optimizer`` wraps it.
        outputs: keeps the outputs of modules in the first forward pass.
        keeps: whether tensors are recorded, not losses alone.
        copies_dtype: of copies of weights and inputs that the model is called with; None calls it as it is.
    """

    subject: cases.Subject
    wrapped: Wrapped
    optimizer: Any
    named: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    names: Mapping[int, str]
    shapes: Mapping[str, torch.Size]

    def __init__(self, training: "Training", program: cases.Program):
        self.training, self.program, self.record = training, program, Record()
        self.workload, self.device, self.dtype = training.workload, training.device, training.dtype
        self.data: int | None = None
        self.step_shares: Sequence[cases.Share] = ()
        self.loss_factor = 1.0
        self.outputs: AbstractContextManager[Any] | None = None
        self.watcher = CollectiveWatcher([], is_late=False)
        self.keeps = True
        self.copies_dtype: torch.dtype | None = None

    @property
    def inner(self) -> Any:
        return self.optimizer

    def prepare(self) -> None:
        """Build the model and the optimizer, and record the weights."""
        self.subject = cases.build_subject(self.workload, self.program, self.device, self.dtype)
        model = self.subject.model
        self.wrapped = Wrapped(None, model)
        self.named, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.shapes = {name: parameter.shape for name, parameter in self.named.items()}
        if self.training.optimizer is None:
            self.optimizer = default_optimizer(model.parameters(), self.training.learning_rate)
        else:
            self.optimizer = self.training.optimizer.build(self.named)
        self.record.moments["start", 0] = self.weights()

    def shares(self, micro: int) -> list[cases.Share]:
        shares = cases.shares_of(self.workload, self.program, micro)
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
            record.rates[step + 1] = tuple(float(group["lr"]) for group in groups if group["params"] and "lr" in group)
            if program.evaluate and step < program.steps - 1:
                self.watcher.phase = "evaluation"
                record.add_number("evaluation", step + 1, self.evaluate())
            if self.keeps and step + 1 in compared:
                record.moments["weight", step + 1] = self.weights()
                record.moments["state", step + 1] = self.states()
            if self.ends_after(step):
                return
        if not program.start:
            self.record_buffers()

    def record_buffers(self) -> None:
        buffers = {name: clone(buffer) for name, buffer in self.buffers.items()}
        self.record.moments["buffer", self.program.steps] = buffers

    def one_step(self, step: int) -> None:
        watcher, record = self.watcher, self.record
        batch = cases.batch_of(self.workload, self.device, self.dtype, step)
        self.optimizer.zero_grad()
        total = 0.0
        for number, share in enumerate(self.step_shares):
            with self.around_share(number):
                watcher.phase = "forward"
                self.choose_layers(share)
                inputs, targets = self.part_of(share, batch)
                outputs = self.outputs if step == 0 and number == 0 else None
                with outputs or contextlib.nullcontext():
                    loss = self.loss(inputs, targets)
                total += loss.item() * share.weight
                watcher.phase = "backward"
                self.backward(loss * (share.weight * self.loss_factor), step)
        watcher.phase = "finish"
        self.finish()
        self.record_step(step, total)
        watcher.phase = "clip"
        if self.program.clip:
            record.add_number("norm", step + 1, self.clip())
        watcher.phase = "optimizer"
        self.update(step)

    def choose_layers(self, share: cases.Share) -> None:
        """Turn a layer off, or on, as the program says of the share."""
        self.subject.is_off = self.program.unused and share.data == self.workload.data_ranks - 1

    def record_step(self, step: int, loss: float) -> None:
        self.record.add_number("loss", step + 1, loss)
        self.record.moments["gradient", step + 1] = self.gradients() if self.keeps else {}

    def call(self, inputs: Any) -> Any:
        if (dtype := self.copies_dtype) is None:
            return user_models.call_model(self.wrapped.module, inputs)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        # As fully sharded models in half precision.
        model = self.wrapped.module
        copies = tree_map_only(Tensor, cast, dict(model.named_parameters(remove_duplicate=False)))
        inputs = tree_map_only(Tensor, cast, inputs)
        arguments, named = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
        return functional_call(model, copies, arguments, named, tie_weights=False)

    def loss(self, inputs: Any, targets: Any) -> Tensor:
        output = self.call(inputs)
        if self.wrapped.loss is not None:
            return self.wrapped.loss(output, targets)
        return cases.loss_of(self.workload, output, targets)

    def evaluate(self) -> float:
        """The loss of the evaluation's batch, of the shares that are trained on here."""
        module = self.wrapped.module
        module.eval()
        batch = cases.batch_of(self.workload, self.device, self.dtype, _EVALUATION_STEP)
        with torch.no_grad():
            losses = [self.loss(*self.part_of(share, batch)).item() * share.weight for share in self.shares(1)]
        module.train()
        return sum(losses)

    def part_of(self, share: cases.Share, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return share.of(batch)

    def around_share(self, number: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, step: int) -> None:
        loss.backward()

    def finish(self) -> None:
        """Finish gradients after the backward passes of a step."""

    def clip(self) -> float:
        bound = math.inf if self.training.max_norm is None else self.training.max_norm
        return torch.nn.utils.clip_grad_norm_(self.named.values(), bound).item()

    def update(self, step: int) -> None:
        # Of this step one rank's loss is infinite.
        if not (self.program.scale and step + 1 == cases.OVERFLOWN_STEP):
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
            return {name: clone(parameter.grad) for name, parameter in self.named.items() if parameter.grad is not None}

    def states(self) -> dict[str, Tensor]:
        """The optimizer's state by the names of parameters and its own, which order it; tensors alone."""
        with self.observed():
            states = [
                (key, self.names[id(parameter)], clone(torch.as_tensor(value)))
                for parameter, state in self.inner.state.items()
                if id(parameter) in self.names
                for key, value in state.items()
                if isinstance(value, Tensor) or (isinstance(value, int | float) and key == "step")
            ]
        return {f"{name} {key}": value for key, name, value in sorted(states, key=operator.itemgetter(0))}


@dataclass
class Reference:
    """One process's training, and the same summed in other orders.

    Attributes:
        record: of the whole batch at once; of the ranks' shares where the loss of a batch is not their mean.
        others: the same in other orders.
        is_whole: whether ``record`` is of the whole batch at once.
        half: the less precise dtype that ranks compute or send in, where they do.
    """

    record: Record
    others: Sequence[Record]
    is_whole: bool
    half: torch.dtype | None = None


# Dtype and learning rate of a workload on a device.
_choices: dict[Any, tuple[torch.dtype, float]] = {}
_references: dict[Any, Reference] = {}


@dataclass(frozen=True)
class Training:
    """Training of a workload's programs, on ranks and in one process.

    Attributes:
        learning_rate: of the default optimizer, where ``optimizer`` is None.
        max_norm: of gradients, where a program clips.
        optimizer: the wrap's, to be built in one process.
    """

    workload: VerifiedWorkload
    device: torch.device
    dtype: torch.dtype
    learning_rate: float = 0.0
    max_norm: float | None = None
    optimizer: OptimizerSpec | None = None

    def columns(self) -> dict[str, object]:
        """Return how one process trains, as derived columns of a cell."""
        return {"reference_dtype": str(self.dtype).removeprefix("torch."), "learning_rate": self.learning_rate}

    @classmethod
    def choose(cls, workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype | None) -> "Training":
        """Choose the dtype unless one is passed, and the largest learning rate with which losses do not run away.

        The dtype is float64 where the model computes in it, else float32; twenty steps show whether losses stay.
        """
        key = (workload.training, device)
        if key not in _choices:
            process = cls(workload, device, torch.float64)
            try:
                process.train(cases.Program(steps=1))
            except UserCodeError:
                raise
            except (RuntimeError, TypeError, NotImplementedError):
                process = replace(process, dtype=torch.float32)
            for rate in LEARNING_RATES:
                run = replace(process, learning_rate=rate).train(cases.PROGRAMS["run"], keeps=False)
                if stay_near(run.numbers("loss")):
                    break
            _choices[key] = process.dtype, rate
        chosen, rate = _choices[key]
        return cls(workload, device, dtype or chosen, rate)

    def clipping(self) -> "Training":
        """Return the same with ``max_norm`` at half the norm of the first step's gradients."""
        norms = replace(self, learning_rate=0.0).train(cases.Program(steps=1, clip=True)).numbers("norm")
        return replace(self, max_norm=0.5 * norms[0])

    def train(
        self,
        program: cases.Program,
        shares: Sequence[cases.Share] = (),
        *,
        outputs: bool = False,
        keeps: bool = True,
        half: torch.dtype | None = None,
        casts_weights: bool = False,
    ) -> Record:
        """Train in this process, the shares of each batch one after another.

        Args:
            shares: of each batch; without any, the whole batch at once.
            outputs: record those of modules in the first forward pass.
            keeps: record tensors, not losses alone.
            half: computes in this dtype: matrix products, or with ``casts_weights`` everything, with copies of the
                weights.
        """
        run = ProgramRun(self, program)
        run.step_shares = shares or self._whole_batch(program)
        run.copies_dtype, run.keeps = half if casts_weights else None, keeps
        casts = torch.autocast(self.device.type, half) if half and not casts_weights else contextlib.nullcontext()
        with user_models.nothing_dropped(), casts:
            run.prepare()
            if outputs:
                run.outputs = captured_outputs(run.subject.model, run.record.outputs)
            run.train()
        return run.record

    def gradients_of_shares(
        self, program: cases.Program, step: int, weights: Mapping[str, Tensor]
    ) -> dict[tuple[int, int], dict[str, Tensor]]:
        """The part of a step's gradients that each micro-batch of each data rank adds to those of the whole batch.

        Args:
            step: from 1, and ``weights`` before it.
        """
        run, gradients = ProgramRun(replace(self, optimizer=None), program.trained_alone), {}
        with user_models.nothing_dropped():
            run.prepare()
            for share in cases.shares_of(self.workload, program, program.micro):
                with torch.no_grad():
                    for name, value in weights.items():
                        run.named[name].copy_(value)
                run.step_shares = [share]
                run.one_step(step - 1)
                gradients[share.data, share.micro] = run.record.at("gradient", step)
        return gradients

    def _whole_batch(self, program: cases.Program) -> list[cases.Share]:
        size = self.workload.training.size.batch_size
        return [cases.Share(0, 0, 1.0, slice(0, size - 1 if program.uneven else size))]

    def reference(self, program: cases.Program) -> Reference:
        """Train the program in several orders; kept for other cases of the same training."""
        program, workload = program.trained_alone, self.workload
        described = self.optimizer and (self.optimizer.optimizer_class, repr(self.optimizer.settings))
        numbers = self.device, self.dtype, self.learning_rate, self.max_norm
        # Cases and wraps differ in what ranks do alone.
        key = (workload.training, workload.data_ranks, program, described, numbers)
        if key in _references:
            return _references[key]
        if len(_references) > 8:
            _references.clear()
        by_rank, in_micros = cases.shares_of(workload, program, 1), cases.shares_of(workload, program, 2)
        orders = [by_rank, in_micros, list(reversed(in_micros))]
        # A layer that is unused on one rank alone cannot be trained on the whole batch at once.
        whole = by_rank if program.unused else self._whole_batch(program)
        records = [self.train(program, order, outputs=order in (whole, by_rank)) for order in (whole, *orders)]
        first, of_shares = records[0].numbers("loss")[0], records[1].numbers("loss")[0]
        if abs(first - of_shares) <= MEAN_LOSS[self.dtype] * abs(first):
            reference = Reference(records[0], records[1:], True)
        else:
            # Sequences of a batch look at each other, as in batch norm: ranks see their own shares.
            reversed_record = self.train(program, list(reversed(by_rank)))
            reference = Reference(records[1], [reversed_record], False)
        _references[key] = reference
        return reference

    def in_half_precision(self, reference: Reference, program: cases.Program, half: torch.dtype) -> Reference:
        """The same reference, with one process that computes in ``half``, in parts or everything, as other orders."""
        one_process = program.trained_alone
        # autocast leaves float64 alone.
        shares = cases.shares_of(self.workload, one_process, 1)
        train = partial(replace(self, dtype=torch.float32).train, one_process, shares)
        if half == torch.float32:
            return replace(reference, others=[*reference.others, train()], half=half)
        others = [train(half=half)]
        # The model, or the device, may have operations that are none in half precision.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            others.append(train(half=half, casts_weights=True))
        return replace(reference, others=[*reference.others, *others], half=half)
