"""Tensors of one process or rank at each moment of a program, and how its optimizer is built again elsewhere."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.parity.collectives import CollectiveLaunch
from cs336sys.processes import started_outside

# Names of an optimizer's arguments that are of the ranks, with what they are in one process.
_OF_RANKS: dict[str, Any] = {"rank": 0, "local_rank": 0, "world_size": 1, "num_ranks": 1}
GROUP_NAMES = ("group", "process_group", "pg")

# With an eps this large AdamW's steps are proportional to the gradients: weights are off by as much as these.
ADAMW_SETTINGS: dict[str, Any] = {"eps": 1.0, "weight_decay": 0.01}


def default_optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """Build the optimizer of wraps that have none."""
    return torch.optim.AdamW(parameters, lr=learning_rate, **ADAMW_SETTINGS)


@dataclass
class Together:
    """Several optimizers that step one after another, each with parameters of its own."""

    optimizers: list[Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {tensor: state for optimizer in self.optimizers for tensor, state in optimizer.state.items()}

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@contextlib.contextmanager
def refusing_optimizer(optimizer_class: type, failure: str) -> Iterator[None]:
    """Turn what an optimizer raises in one process within this into a CapabilityError that names the ``failure``."""
    try:
        yield
    except (CapabilityError, UserCodeError):
        raise
    except Exception as error:
        raise CapabilityError(
            f"{optimizer_class.__name__} {failure} in one process, so nothing is compared: "
            f"{type(error).__name__}: {error!s:.160}"
        ) from error


@dataclass(frozen=True)
class OptimizerSpec:
    """Recipe of an optimizer, or of several: a class and its settings for each parameter by name."""

    optimizer_class: type[torch.optim.Optimizer]  # Of parameters that have no ``settings``.
    settings: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]]

    def build(self, parameters: Mapping[str, torch.nn.Parameter]) -> Any:
        """Build it in one process, whose process group it gets where its class takes the ranks.

        Raises:
            CapabilityError: its class takes what nobody can know.
        """
        default = next(iter(self.settings.values()), (self.optimizer_class, {}))
        groups_of_class: dict[type, list[dict[str, Any]]] = {}
        for name, parameter in parameters.items():
            optimizer_class, settings = self.settings.get(name, default)
            groups = groups_of_class.setdefault(optimizer_class, [])
            group = next((group for group in groups if group["settings"] == settings), None)
            if group is None:
                group = {"params": [], "settings": settings}
                groups.append(group)
            group["params"].append(parameter)
        optimizers = [_build(optimizer_class, groups) for optimizer_class, groups in groups_of_class.items()]
        return optimizers[0] if len(optimizers) == 1 else Together(optimizers)


def _build(optimizer_class: Any, groups: list[dict[str, Any]]) -> Any:
    """Build an optimizer of ``groups`` of parameters, each with its settings, as one process has it."""
    parameters = inspect.signature(optimizer_class).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    of_ranks = {name: value for name, value in _OF_RANKS.items() if name in parameters}
    of_ranks |= {name: dist.group.WORLD for name in GROUP_NAMES if name in parameters and dist.is_initialized()}
    with refusing_optimizer(optimizer_class, "cannot be built"):
        if len(groups) > 1:
            return optimizer_class([{"params": group["params"], **group["settings"]} for group in groups], **of_ranks)
        # Some classes make groups themselves, of a list of parameters, and take only some settings of these.
        (group,) = groups
        settings = {name: value for name, value in group["settings"].items() if takes_all or name in parameters}
        return optimizer_class(group["params"], **settings | of_ranks)


def added_to_environment(variables: dict[str, str]) -> Any:
    """Return a context in which environment variables that were not set have these values."""
    return mock.patch.dict(os.environ, variables | os.environ)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Within this, there is a process group of this process alone, for optimizers whose class communicates.

    Ranks that torchrun started, and a caller that has a group, keep theirs.
    """
    if dist.is_initialized() or started_outside() is not None:
        yield
        return
    with added_to_environment({"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Record:
    """State of one process, or one rank, at each moment of a program; tensors on the CPU, by names of the model."""

    # By kind (start, gradient, loss, weight, state, norm, evaluation, buffer) and step from 1, in the order of time. Of
    # the optimizer's state names are ``layers.0.weight exp_avg``, and of numbers empty.
    moments: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # Of modules, in the first forward pass, where watched.
    rates: dict[int, tuple[float, ...]] = field(default_factory=dict)  # Learning rates of groups after each step.

    def add_number(self, kind: str, step: int, value: float) -> None:
        self.moments[kind, step] = {"": torch.tensor(value, dtype=torch.float64)}

    def at(self, kind: str, step: int) -> dict[str, Tensor]:
        """Return the tensors of a moment, none where it was not recorded."""
        return self.moments.get((kind, step), {})

    def numbers(self, kind: str) -> list[float]:
        """Return the numbers of all steps: losses, norms or evaluations."""
        return [tensors[""].item() for (recorded_kind, _), tensors in self.moments.items() if recorded_kind == kind]

    def weights_after(self, step: int) -> dict[str, Tensor]:
        """Return the weights after a step, or before the first."""
        return self.at("weight", step) if step else self.at("start", 0)


@dataclass
class RankReport:
    """A rank's record of a case, and what it says of the wrap."""

    record: Record  # As far as it came, where the rank failed.
    optimizer: OptimizerSpec | None = None  # The wrap's, to be built in one process.
    optimizer_shapes: dict[str, torch.Size] = field(default_factory=dict)  # Of its parameters, by their names.
    empty_groups: tuple[dict[str, Any], ...] = ()  # Settings of its groups without parameters.
    hides_optimizer: bool = False  # Whether it has an optimizer that cannot be built in one process.
    owned: tuple[str, ...] = ()  # Parameters that the optimizer updates on this rank.
    unmatched: tuple[str, ...] = ()  # Parameters of the wrapped module that have no name in the plain one.
    launches: list[CollectiveLaunch] = field(default_factory=list)  # Its collectives, where they were watched.
    # Less precise ones than asked for, in which its optimizer holds weights (``update weights``) or, where that was
    # watched, it computed (``compute``) or sent (``send``).
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    is_sliced: bool = False  # Whether it holds slices of weights.
    runs_steps: bool = False  # Whether the wrap runs whole steps.
    masks: Tensor | None = None  # Of the first dropout layer, whether each element was dropped.
    failure: str = ""  # The error, in one sentence.
    is_timeout: bool = False  # Whether other ranks did not come.
    applies: bool = True  # False where the case does not apply, and ``failure`` says why.
    at: str = ""  # Step and phase of a failure.


def clone(tensor: Any) -> Tensor:
    """Copy to the CPU: all of a DTensor, and a sparse tensor as a dense one."""
    whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return (whole.to_dense() if whole.is_sparse else whole).to(torch.device("cpu"), copy=True)


@contextlib.contextmanager
def captured_outputs(model: torch.nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    """Keep what each module returns in its first call within this, where that is one tensor."""

    def keep_output(name: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and name not in outputs:
            outputs[name] = clone(output)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(keep_output, name)).remove)
        yield
