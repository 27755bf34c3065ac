"""The optimizer that somebody's ranks step by: its class and settings, from which one process builds it again."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.parity.weights import OPTIMIZER_SETTINGS
from cs336sys.processes import started_outside

# An optimizer's arguments that describe its rank, with their values in one process; and names of its process group.
_RANK_ARGUMENTS: dict[str, Any] = {"rank": 0, "local_rank": 0, "world_size": 1, "num_ranks": 1}
GROUP_NAMES = ("group", "process_group", "pg")

# Settings of optimizers that change no number, or that the class itself does not take.
_IGNORED_SETTINGS = ("initial_lr", "foreach", "fused", "capturable", "differentiable", "flat")

ADAMW_SETTINGS: dict[str, Any] = {"eps": OPTIMIZER_SETTINGS["eps"], "weight_decay": 0.01}


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


def is_ours(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("cs336sys.parallel")


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that updates this rank's parameters, or several of them, where others wrap it."""
    # A wrapper has the optimizer as its only attribute of that kind.
    while not is_ours(optimizer):
        inner = {id(value): value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)}
        if len(inner) != 1 or id(optimizer) in inner:  # One that refers to itself would be unwrapped for ever.
            break
        (optimizer,) = inner.values()
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    # An object of somebody's may have several, as attributes or in lists.
    lists = [values if isinstance(values, list | tuple) else [values] for values in vars(optimizer).values()]
    several = [value for values in lists for value in values if isinstance(value, torch.optim.Optimizer)]
    return Together(list(map(innermost, several))) if len(several) > 1 else optimizer


@contextlib.contextmanager
def refusing_optimizer(optimizer_class: type, failure: str) -> Iterator[None]:
    """Turn an optimizer's error in one process into a CapabilityError; ``failure`` says what it does: "fails"."""
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
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)  # Of what it updates on a rank.
    empty_groups: Sequence[Mapping[str, Any]] = ()  # Settings of its groups without parameters on a rank.

    def build(self, parameters: Mapping[str, torch.nn.Parameter]) -> Any:
        """Build it in one process, with an optimizer for each class and a group for each of its settings.

        Raises:
            CapabilityError: its class has further arguments, whose values are unknown here.
        """
        default = next(iter(self.settings.values()), (self.optimizer_class, {}))  # Of a parameter that no rank updates.
        groups_of_class: dict[type, dict[frozenset[tuple[str, Any]], list[torch.nn.Parameter]]] = {}
        for name, parameter in parameters.items():
            optimizer_class, settings = self.settings.get(name, default)
            groups = groups_of_class.setdefault(optimizer_class, {})
            groups.setdefault(frozenset(settings.items()), []).append(parameter)
        optimizers = [_build(optimizer_class, groups) for optimizer_class, groups in groups_of_class.items()]
        return optimizers[0] if len(optimizers) == 1 else Together(optimizers)


def read_spec(optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerSpec | None:
    """Read an :func:`innermost` optimizer's class and settings by the model's parameters; None for any but torch's."""
    parts = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
    if not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        return None
    # Ours shards an optimizer of any class.
    pairs = [
        (part._optimizer_cls if is_ours(part) else type(part), group) for part in parts for group in part.param_groups
    ]
    has_one_group = sum(bool(group["params"]) for _, group in pairs) == 1
    settings: dict[str, Any] = {}
    shapes: dict[str, torch.Size] = {}
    empty_groups = []
    for optimizer_class, group in pairs:
        group_settings = {
            key: value
            for key, value in group.items()
            if isinstance(value, int | float | tuple | None) and key not in _IGNORED_SETTINGS  # Not "params".
        }
        if not group["params"]:
            empty_groups.append(group_settings)
        for updated in group["params"]:
            for name in _names_of_updated(updated, parameters):
                settings[name] = optimizer_class, group_settings
                shapes[name] = updated.shape
        if group["params"] and not settings and has_one_group:
            # No parameter is or shares memory with one of its only group: it updates copies, so those of all.
            settings = dict.fromkeys(parameters, (optimizer_class, group_settings))
    return OptimizerSpec(pairs[0][0], settings, shapes, empty_groups)  # The first class: for parameters in no group.


def _names_of_updated(updated: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
    """Name the model's parameters that a tensor of the optimizer is, or of which it is a slice by its memory."""
    if names := [name for name, parameter in parameters.items() if parameter is updated]:
        return names
    if hasattr(updated, "to_local"):
        return []  # A DTensor has no address.
    start, end = _address_range(updated)
    local = {name: parameter for name, parameter in parameters.items() if not hasattr(parameter, "to_local")}
    spans = {name: _address_range(parameter) for name, parameter in local.items()}
    return [name for name, (first, last) in spans.items() if start < end and first < end and start < last]


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the tensor's first byte and of the one after its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _build(optimizer_class: Any, groups: Mapping[frozenset[tuple[str, Any]], list[torch.nn.Parameter]]) -> Any:
    """Build an optimizer of groups, parameters by the settings that they share, for the only rank that there is."""
    arguments = inspect.signature(optimizer_class).parameters
    takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    rank_values = {name: value for name, value in _RANK_ARGUMENTS.items() if name in arguments}
    rank_values |= {name: dist.group.WORLD for name in GROUP_NAMES if name in arguments and dist.is_initialized()}
    with refusing_optimizer(optimizer_class, failure="cannot be built"):
        if len(groups) > 1:
            dicts = [{"params": parameters, **dict(settings)} for settings, parameters in groups.items()]
            return optimizer_class(dicts, **rank_values)
        # Some classes make groups themselves, of a list of parameters, and take only some of a group's settings.
        ((group_settings, parameters),) = groups.items()
        settings = {name: value for name, value in group_settings if takes_all or name in arguments}
        return optimizer_class(parameters, **settings | rank_values)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Make a process group of this process alone meanwhile, for optimizers whose class communicates.

    Ranks that torchrun started, and a caller that has a group, keep theirs.
    """
    if dist.is_initialized() or started_outside() is not None:
        yield
        return
    # Unless an interface is set, Gloo would listen where the host's name leads, which may be a network.
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    with mock.patch.dict(os.environ, loopback | os.environ):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
