"""The optimizer that somebody's ranks step by, built again in one process from its class and settings."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.parity.weights import OPTIMIZER_SETTINGS
from cs336sys.processes import started_outside

# Names of an optimizer's arguments that are of the ranks, with what they are in one process.
_OF_RANKS: dict[str, Any] = {"rank": 0, "local_rank": 0, "world_size": 1, "num_ranks": 1}
GROUP_NAMES = ("group", "process_group", "pg")

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
    while not is_ours(optimizer):
        inner = {id(value): value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)}
        if len(inner) != 1 or id(optimizer) in inner:
            break
        (optimizer,) = inner.values()
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    lists = [values if isinstance(values, list | tuple) else [values] for values in vars(optimizer).values()]
    several = [value for values in lists for value in values if isinstance(value, torch.optim.Optimizer)]
    return Together(list(map(innermost, several))) if len(several) > 1 else optimizer


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
