"""One process that trains the whole batch: what ranks are compared with, and how far rounding alone takes it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.errors import UserCodeError
from cs336sys.experiments import user_models
from cs336sys.experiments.verify.cases import PROGRAMS, Program, Share, build_subject, shares_of
from cs336sys.experiments.verify.program import ProgramRun
from cs336sys.experiments.verify.record import (
    OptimizerSpec,
    Record,
    captured_outputs,
    default_optimizer,
)
from cs336sys.experiments.verify.wraps import Wrapped
from cs336sys.parity.rounding import LEARNING_RATES, MEAN_LOSS, stay_near
from cs336sys.workload.verification import VerifiedWorkload


@dataclass
class Reference:
    """One process's training, and the same summed in other orders.

    Attributes:
        record: of the whole batch at once; of the ranks' shares where the loss of a batch is not their mean.
        others: the same in other orders.
        is_whole: whether ``record`` is of the whole batch at once.
        dtype: of the computation.
        learning_rate: of the optimizer that this program builds.
        half: the less precise dtype that ranks compute or send in, where they do.
    """

    record: Record
    others: Sequence[Record]
    is_whole: bool
    dtype: torch.dtype
    learning_rate: float
    half: torch.dtype | None = None

    def columns(self) -> dict[str, object]:
        """Return how it was trained, as derived columns of a cell."""
        return {"reference_dtype": str(self.dtype).removeprefix("torch."), "learning_rate": self.learning_rate}


class _Alone(ProgramRun):
    """A program in one process, which takes the shares of each batch one after another.

    Attributes:
        copies_dtype: of copies of weights and inputs that the model is called with; None calls it as it is.
    """

    copies_dtype: torch.dtype | None = None

    def prepare(self, process: "OneProcess") -> None:
        self.subject = build_subject(self.workload, self.program, self.device, self.dtype)
        model = self.subject.model
        self.wrapped = Wrapped(None, model)
        self.named, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.shapes = {name: parameter.shape for name, parameter in self.named.items()}
        self.max_norm = process.max_norm
        if process.optimizer is None:
            self.optimizer = default_optimizer(model.parameters(), process.learning_rate)
        else:
            self.optimizer = process.optimizer.build(self.named)
        self.record.weights[0] = self.weights()

    def call(self, inputs: Any) -> Any:
        if (dtype := self.copies_dtype) is None:
            return super().call(inputs)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        # As fully sharded models in half precision.
        model = self.wrapped.module
        copies = tree_map_only(Tensor, cast, dict(model.named_parameters(remove_duplicate=False)))
        inputs = tree_map_only(Tensor, cast, inputs)
        arguments, named = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
        return functional_call(model, copies, arguments, named, tie_weights=False)


# Dtype and learning rate of a workload on a device.
_choices: dict[Any, tuple[torch.dtype, float]] = {}
_references: dict[Any, Reference] = {}


@dataclass(frozen=True)
class OneProcess:
    """How one process trains the batches of all ranks.

    Attributes:
        learning_rate: of the default optimizer, where ``optimizer`` is None.
        max_norm: of gradients, where a program clips.
    """

    workload: VerifiedWorkload
    device: torch.device
    dtype: torch.dtype
    learning_rate: float = 0.0
    max_norm: float | None = None
    optimizer: OptimizerSpec | None = None

    @classmethod
    def choose(cls, workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype | None) -> "OneProcess":
        """Choose the dtype unless one is passed, and the largest learning rate with which losses do not run away.

        The dtype is float64 where the model computes in it, else float32; twenty steps show whether losses stay.
        """
        key = (workload.training, device)
        if key not in _choices:
            process = cls(workload, device, torch.float64)
            try:
                process.train(Program(steps=1))
            except UserCodeError:
                raise
            except (RuntimeError, TypeError, NotImplementedError):
                process = replace(process, dtype=torch.float32)
            for rate in LEARNING_RATES:
                if stay_near(replace(process, learning_rate=rate).train(PROGRAMS["run"], keeps=False).losses):
                    break
            _choices[key] = process.dtype, rate
        chosen, rate = _choices[key]
        return cls(workload, device, dtype or chosen, rate)

    def clipping(self) -> "OneProcess":
        """Return the same with ``max_norm`` at half the norm of the first step's gradients."""
        norms = replace(self, learning_rate=0.0).train(Program(steps=1, clip=True)).norms
        return replace(self, max_norm=0.5 * norms[0])

    def train(
        self,
        program: Program,
        shares: Sequence[Share] = (),
        *,
        outputs: bool = False,
        keeps: bool = True,
        half: torch.dtype | None = None,
        casts_weights: bool = False,
        only: tuple[int, Mapping[str, Tensor]] | None = None,
    ) -> Record:
        """Train in this process, the shares of each batch one after another.

        Args:
            shares: of each batch; without any, the whole batch at once.
            outputs: record those of modules in the first forward pass.
            keeps: record tensors, not losses alone.
            half: computes in this dtype: matrix products, or with ``casts_weights`` everything, with copies of the
                weights.
            only: a step to run alone, and the weights before it; None runs all.
        """
        run = _Alone(self.workload, program, self.device, self.dtype, Record())
        run.step_shares = shares or self._whole_batch(program)
        run.copies_dtype, run.keeps = half if casts_weights else None, keeps
        casts = torch.autocast(self.device.type, half) if half and not casts_weights else contextlib.nullcontext()
        with user_models.nothing_dropped(), casts:
            run.prepare(self)
            if outputs:
                run.outputs = captured_outputs(run.subject.model, run.record.outputs)
            if only is None:
                run.train()
            else:
                step, weights = only
                with torch.no_grad():
                    for name, value in weights.items():
                        run.named[name].copy_(value)
                run.one_step(step)
        return run.record

    def gradients_of_shares(
        self, program: Program, step: int, weights: Mapping[str, Tensor]
    ) -> dict[tuple[int, int], dict[str, Tensor]]:
        """The part of a step's gradients that each micro-batch of each data rank adds to those of the whole batch.

        Args:
            weights: before the step.
        """
        process, alone = replace(self, optimizer=None), program.trained_alone
        return {
            (share.data, share.micro): process.train(alone, [share], only=(step, weights)).gradients[0]
            for share in shares_of(self.workload, program, program.micro)
        }

    def _whole_batch(self, program: Program) -> list[Share]:
        size = self.workload.training.size.batch_size
        return [Share(0, 0, 1.0, slice(0, size - 1 if program.uneven else size))]

    def reference(self, program: Program) -> Reference:
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
        by_rank, in_micros = shares_of(workload, program, 1), shares_of(workload, program, 2)
        orders = [by_rank, in_micros, list(reversed(in_micros))]
        # A layer that is unused on one rank alone cannot be trained on the whole batch at once.
        whole = by_rank if program.unused else self._whole_batch(program)
        records = [self.train(program, order, outputs=order is whole) for order in (whole, *orders)]
        first, of_shares = records[0].losses[0], records[1].losses[0]
        if abs(first - of_shares) <= MEAN_LOSS[self.dtype] * abs(first):
            reference = Reference(records[0], records[1:], True, self.dtype, self.learning_rate)
        else:
            # Sequences of a batch look at each other, as in batch norm: ranks see their own shares.
            again = self.train(program, list(reversed(by_rank)))
            reference = Reference(records[1], [again], False, self.dtype, self.learning_rate)
        _references[key] = reference
        return reference

    def in_half_precision(self, reference: Reference, program: Program, half: torch.dtype) -> Reference:
        """The same reference, with one process that computes in ``half``, in parts or everything, as other orders."""
        alone = program.trained_alone
        # autocast leaves float64 alone.
        train = partial(replace(self, dtype=torch.float32).train, alone, shares_of(self.workload, alone, 1))
        if half == torch.float32:
            return replace(reference, others=[*reference.others, train()], half=half)
        others = [train(half=half)]
        # The model, or the device, may have operations that are none in half precision.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            others.append(train(half=half, casts_weights=True))
        return replace(reference, others=[*reference.others, *others], half=half)
