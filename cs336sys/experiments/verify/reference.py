"""One process that trains the whole batch: what ranks are compared with, and how far rounding alone takes it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.errors import UserCodeError
from cs336sys.experiments import user_models
from cs336sys.experiments.verify.cases import (
    PROGRAMS,
    Program,
    Share,
    batch_of,
    build_subject,
    loss_of,
    shares_of,
    turned_off,
)
from cs336sys.experiments.verify.program import ProgramRun
from cs336sys.experiments.verify.record import (
    OptimizerSpec,
    Record,
    captured_outputs,
    cloned_gradients,
    default_optimizer,
)
from cs336sys.experiments.verify.wraps import Wrapped
from cs336sys.parity.rank_rounding import LEARNING_RATES, MEAN_LOSS, stay_near
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


class _Alone(ProgramRun):
    """A program in one process, which takes the shares of each batch one after another."""

    optimizer_settings: OptimizerSpec | float
    half: torch.dtype | None = None
    casts_weights: bool = False

    def prepare(self) -> None:
        self.subject = build_subject(self.workload, self.program, self.device, self.dtype)
        model = self.subject.model
        self.wrapped = Wrapped(None, model)
        self.named, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.shapes = {name: parameter.shape for name, parameter in self.named.items()}
        how = self.optimizer_settings
        self.optimizer = default_optimizer(model.parameters(), how) if isinstance(how, float) else how.build(self.named)
        self.record.weights[0] = self.weights()

    def call(self, inputs: Any) -> Any:
        if self.casts_weights and self.half is not None:
            return _call_in(self.half, self.wrapped.module, inputs)
        return super().call(inputs)


def train_in_one_process(
    workload: VerifiedWorkload,
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    shares: Sequence[Share],
    optimizer: OptimizerSpec | float,
    max_norm: float | None = None,
    *,
    outputs: bool = False,
    half: torch.dtype | None = None,
    casts_weights: bool = False,
) -> Record:
    """Train in this process, the shares of each batch one after another.

    Args:
        optimizer: how to build it, or the learning rate of the default one.
        max_norm: of gradients, where the program clips.
        half: computes in this dtype: matrix products, or with ``casts_weights`` everything, with copies of the weights.
    """
    run = _Alone(workload, program, device, dtype, Record())
    run.step_shares, run.max_norm, run.optimizer_settings = shares, max_norm, optimizer
    run.half, run.casts_weights = half, casts_weights
    autocasts = half is not None and not casts_weights
    casts = torch.autocast(device.type, half) if autocasts else contextlib.nullcontext()
    with user_models.nothing_dropped(), casts:
        run.prepare()
        if outputs:
            run.outputs = captured_outputs(run.subject.model, run.record.outputs)
        run.train()
    return run.record


def _call_in(dtype: torch.dtype, model: torch.nn.Module, inputs: Any) -> Any:
    """Call the model with copies of its weights and inputs in ``dtype``, as fully sharded models in half precision."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    copies = tree_map_only(Tensor, cast, dict(model.named_parameters(remove_duplicate=False)))
    inputs = tree_map_only(Tensor, cast, inputs)
    arguments, named = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
    return functional_call(model, copies, arguments, named, tie_weights=False)


_dtypes: dict[Any, torch.dtype] = {}


def reference_dtype(workload: VerifiedWorkload, device: torch.device) -> torch.dtype:
    """float64 where the model computes in it, else float32."""
    key = (workload.training, device)
    if key not in _dtypes:
        _dtypes[key] = torch.float64
        try:
            train_in_one_process(
                workload, Program(steps=1), device, torch.float64, _whole_batch(workload, Program()), 0.0
            )
        except UserCodeError:
            raise
        except (RuntimeError, TypeError, NotImplementedError):
            _dtypes[key] = torch.float32
    return _dtypes[key]


def _whole_batch(workload: VerifiedWorkload, program: Program) -> list[Share]:
    size = workload.training.size.batch_size
    return [Share(0, 0, 1.0, slice(0, size - 1 if program.uneven else size))]


_learning_rates: dict[Any, float] = {}


def learning_rate_of(workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype) -> float:
    """The largest of some learning rates with which twenty steps do not run away."""
    key = (workload.training, device)
    if key not in _learning_rates:
        for rate in LEARNING_RATES:
            _learning_rates[key] = rate
            shares = _whole_batch(workload, Program())
            if stay_near(train_in_one_process(workload, PROGRAMS["run"], device, dtype, shares, rate).losses):
                break
    return _learning_rates[key]


def clipped_norm(workload: VerifiedWorkload, program: Program, device: torch.device, dtype: torch.dtype) -> float:
    """Half the norm of the first step's gradients: what a program that clips clips to."""
    first = Program(steps=1, clip=True)
    return 0.5 * train_in_one_process(workload, first, device, dtype, _whole_batch(workload, first), 0.0).norms[0]


_references: dict[Any, Reference] = {}


def in_half_precision(
    reference: Reference,
    workload: VerifiedWorkload,
    program: Program,
    device: torch.device,
    optimizer: OptimizerSpec | None,
    max_norm: float | None,
    half: torch.dtype,
) -> Reference:
    """The same reference, with one process that computes in ``half``, in parts or everything, as other orders."""
    alone = program.trained_alone
    how = reference.learning_rate if optimizer is None else optimizer
    shares = shares_of(workload, alone, 1)
    # autocast leaves float64 alone.
    train = partial(train_in_one_process, workload, alone, device, torch.float32, shares, how, max_norm)
    if half == torch.float32:
        return replace(reference, others=[*reference.others, train()], half=half)
    others = [train(half=half)]
    # The model, or the device, may have operations that are none in half precision.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        others.append(train(half=half, casts_weights=True))
    return replace(reference, others=[*reference.others, *others], half=half)


def reference_of(
    workload: VerifiedWorkload,
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    learning_rate: float,
    optimizer: OptimizerSpec | None,
    max_norm: float | None,
) -> Reference:
    """Train the program in this process, in several orders; kept for other cases of the same training."""
    program = program.trained_alone
    described = None if optimizer is None else (optimizer.optimizer_class, repr(optimizer.settings))
    key = (workload.training, workload.data_ranks, program, device, dtype, learning_rate, described, max_norm)
    if key in _references:
        return _references[key]
    if len(_references) > 8:
        _references.clear()
    how = learning_rate if optimizer is None else optimizer
    train = partial(train_in_one_process, workload, program, device, dtype, optimizer=how, max_norm=max_norm)
    by_rank, in_micros = shares_of(workload, program, 1), shares_of(workload, program, 2)
    orders = [by_rank, in_micros, list(reversed(in_micros))]
    # A layer that is unused on one rank alone cannot be trained on the whole batch at once.
    whole = by_rank if program.unused else _whole_batch(workload, program)
    records = [train(order, outputs=order is whole) for order in (whole, *orders)]
    is_mean = abs(records[0].losses[0] - records[1].losses[0]) <= MEAN_LOSS[dtype] * abs(records[0].losses[0])
    if is_mean:
        reference = Reference(records[0], records[1:], True, dtype, learning_rate)
    else:
        # Sequences of a batch look at each other, as in batch norm: ranks see their own shares.
        reference = Reference(records[1], [train(list(reversed(by_rank)))], False, dtype, learning_rate)
    _references[key] = reference
    return reference


def parts_of_gradients(
    workload: VerifiedWorkload, program: Program, device: torch.device, dtype: torch.dtype, step: int, at: Record
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The gradients that each micro-batch of each rank has by itself in a step, of its own mean loss.

    Args:
        at: has the weights before the step; those before the first are taken where it has none.
    """
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    with user_models.nothing_dropped():
        subject = build_subject(workload, program, device, dtype)
        named = dict(subject.model.named_parameters())
        with torch.no_grad():
            for name, value in at.weights.get(step, at.weights[0]).items():
                named[name].copy_(value)
        batch = batch_of(workload, device, dtype, step)
        for share in shares_of(workload, program, program.micro):
            subject.model.zero_grad()
            inputs, targets = share.of(batch)
            with turned_off(subject.switch, program.unused and share.data == workload.data_ranks - 1):
                loss_of(workload, user_models.call_model(subject.model, inputs), targets).backward()
            parts[share.data, share.micro] = cloned_gradients(named)
    return parts
