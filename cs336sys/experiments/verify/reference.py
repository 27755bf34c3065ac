"""One process that trains the whole batch: what ranks are compared with, and how far rounding alone takes it."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cs336sys.errors import UserCodeError
from cs336sys.experiments import user_models
from cs336sys.experiments.verify.cases import (
    PROGRAMS,
    Program,
    Share,
    batch_of,
    build_subject,
    evaluation_batch,
    loss_of,
    shares_of,
    turned_off,
)
from cs336sys.workload.verification import VerifiedWorkload

# The first with which losses do not run away is used.
_LEARNING_RATES = (1.0, 0.1, 0.01, 0.001)
_AWAY = 1.5

# Losses of a batch as a whole and as the mean of its shares: farther apart, they are different sums.
_MEAN_LOSS = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class OptimizerSpec:
    """Recipe of an optimizer: its class, and its settings for each parameter by name."""

    optimizer_class: type[torch.optim.Optimizer]
    settings: Mapping[str, Mapping[str, Any]]

    def build(self, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = []
        for name, parameter in named.items():
            settings = dict(self.settings.get(name) or next(iter(self.settings.values()), {}))
            same = [group for group in groups if group["settings"] == settings]
            if same:
                same[0]["params"].append(parameter)
            else:
                groups.append({"params": [parameter], "settings": settings})
        return self.optimizer_class([{"params": group["params"], **group["settings"]} for group in groups])  # type: ignore[call-arg]


def default_optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW whose steps are proportional to the gradients, by a large eps: weights are off by as much as gradients."""
    return torch.optim.AdamW(parameters, lr=learning_rate, eps=1.0, weight_decay=0.01)


@dataclass
class Record:
    """State of one process, or one rank, at each moment of a program; tensors on the CPU, by names of the model.

    Attributes:
        losses: of each step, and ``evaluations`` after steps.
        gradients: of each step, before clipping.
        norms: of all gradients, of each step, where they were clipped.
        weights: after a number of steps; 0 is before the first.
        states: of the optimizer, after a number of steps: by parameter, then by its own name.
        outputs: of modules, in the first forward pass, where they were asked for.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[int, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


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


def moments(program: Program) -> tuple[int, ...]:
    """After how many steps weights and state are compared."""
    return (1, program.steps) if program.steps > 1 else (1,)


def clone(tensor: Tensor) -> Tensor:
    """Copy to the CPU."""
    return tensor.detach().to(torch.device("cpu"), copy=True)


def states_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by the names of parameters, tensors alone."""
    return {
        names[id(parameter)]: {
            key: torch.as_tensor(value)
            for key, value in state.items()
            if isinstance(value, Tensor) or (isinstance(value, int | float) and key == "step")
        }
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }


@contextlib.contextmanager
def captured_outputs(model: torch.nn.Module, outputs: dict[str, Tensor]) -> Any:
    """Keep what each module returns in its first call within this, where that is one tensor."""

    def keep(name: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and name not in outputs:
            outputs[name] = clone(output.full_tensor() if hasattr(output, "full_tensor") else output)

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    autocast: torch.dtype | None = None,
) -> Record:
    """Train in this process, the shares of each batch one after another.

    Args:
        optimizer: how to build it, or the learning rate of the default one.
        max_norm: of gradients, where the program clips.
        autocast: computes matrix products in this dtype.
    """
    record = Record()
    casts = torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext()
    with user_models.nothing_dropped(), casts:
        subject = build_subject(workload, program, device, dtype)
        model = subject.model
        named = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        trained = (
            default_optimizer(model.parameters(), optimizer) if isinstance(optimizer, float) else optimizer.build(named)
        )
        record.weights[0] = tree_map_only(Tensor, clone, named)
        for step in range(program.steps):
            batch = batch_of(workload, device, dtype, step)
            trained.zero_grad()
            total = 0.0
            capture = captured_outputs(model, record.outputs) if outputs and step == 0 else contextlib.nullcontext()
            with capture:
                for share in shares:
                    inputs, targets = share.of(batch)
                    off = program.unused and share.data == workload.data_ranks - 1
                    with turned_off(subject.switch, off):
                        loss = loss_of(workload, user_models.call_model(model, inputs), targets) * share.weight
                        loss.backward()
                    total += loss.item()
            record.losses.append(total)
            record.gradients.append(gradients_of(named))
            if program.clip:
                bound = math.inf if max_norm is None else max_norm
                record.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item())
            # Of this step one rank's loss is infinite.
            if not (program.scale and step == 1):
                trained.step()
            if program.evaluate and step < program.steps - 1:
                record.evaluations.append(evaluate_alone(workload, model, device, dtype, program))
            if step + 1 in moments(program):
                record.weights[step + 1] = tree_map_only(Tensor, clone, named)
                record.states[step + 1] = tree_map_only(Tensor, clone, states_of(trained, names))
        record.buffers = {name: clone(buffer) for name, buffer in model.named_buffers()}
    return record


def evaluate_alone(
    workload: VerifiedWorkload, model: Any, device: torch.device, dtype: torch.dtype, program: Program
) -> float:
    """The loss of the evaluation's batch."""
    model.eval()
    with torch.no_grad():
        batch = evaluation_batch(workload, device, dtype)
        losses = [
            share.weight * loss_of(workload, user_models.call_model(model, share.of(batch)[0]), share.of(batch)[1])
            for share in shares_of(workload, program, 1)
        ]
    model.train()
    return float(sum(losses))


def gradients_of(named: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that there are, dense."""
    return {name: clone(parameter.grad.to_dense()) for name, parameter in named.items() if parameter.grad is not None}


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
        for rate in _LEARNING_RATES:
            _learning_rates[key] = rate
            losses = train_in_one_process(
                workload, PROGRAMS["run"], device, dtype, _whole_batch(workload, Program()), rate
            ).losses
            if all(math.isfinite(loss) and loss <= losses[0] + _AWAY * abs(losses[0]) for loss in losses):
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
    """The same reference, with one process whose weights and products are ``half`` as another order of summation."""
    alone = program.trained_alone
    how = reference.learning_rate if optimizer is None else optimizer
    shares = shares_of(workload, alone, 1)
    # autocast leaves float64 alone.
    autocast = None if half == torch.float32 else half
    other = train_in_one_process(workload, alone, device, torch.float32, shares, how, max_norm, autocast=autocast)
    return replace(reference, others=[*reference.others, other], half=half)


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
    is_mean = abs(records[0].losses[0] - records[1].losses[0]) <= _MEAN_LOSS[dtype] * abs(records[0].losses[0])
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
            parts[share.data, share.micro] = gradients_of(named)
    return parts
