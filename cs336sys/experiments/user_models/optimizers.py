"""Optimizers that a function of the user's makes of parameters."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import CapabilityError, UserCodeError, a_value
from cs336sys.experiments.user_models.loading import load, telling_errors_of


def make_optimizer(reference: str, parameters: Iterable[Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The user's optimizer.

    Args:
        settings: what to change in each of its groups, where groups have it.

    Raises:
        UserCodeError: the function raises, or returns something else.
    """
    function = load(reference)
    with telling_errors_of(reference):
        optimizer = function(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"{reference} returned {a_value(optimizer)}: it should return a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        group.update(changeable(group, settings))
    return optimizer


def changeable(own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that take the place of an optimizer's own: all that it has, if it is like AdamW."""
    # Without eps, lr scales something else than a bounded step; Adafactor has two, of other meanings.
    if not isinstance(own.get("eps"), int | float):
        return {}
    return {name: value for name, value in settings.items() if name in own}


def optimizer_class(reference: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of what the user's function makes, and its settings: for what makes one of some of the parameters.

    Raises:
        CapabilityError: it gives parameters different settings by their shape.
    """
    # Groups are often made of matrices and of all else.
    made = make_optimizer(reference, [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))], {})
    known = inspect.signature(type(made)).parameters
    settings = [{name: value for name, value in group.items() if name in known} for group in made.param_groups]
    for group in settings:
        group.pop("params", None)
    if any(group != settings[0] for group in settings):
        raise CapabilityError(
            f"{reference} gives matrices and vectors different settings, which a sharded optimizer does not receive: "
            f"give all parameters the same settings, or choose strategy fsdp"
        )
    return type(made), settings[0]
