"""What checkpoints hold of an optimizer: its groups and state with the names of parameters in place of numbers."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError

Groups = Sequence[Mapping[str, Any]]


def is_cut(key: str, value: Any) -> bool:
    """Whether a state has an element for each of its parameter's. "step" never has, as in torch itself."""
    return isinstance(value, Tensor) and value.dim() > 0 and key != "step"


def named_groups(
    optimizer: torch.optim.Optimizer, held: Mapping[str, nn.Parameter], slices: Container[str]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names in place of parameters.

    Args:
        held: the parameters of the module as it is now, by their first names.
        slices: the names of those that are slices.

    Raises:
        UsageError: the optimizer has a parameter or a state of something that the module has not, or a state of
            a slice that is neither of its shape nor a single number.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in held.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the module has not (any "
                    "more): build it over parameters() of the wrapped module as it is"
                )
    for parameter, values in optimizer.state.items():
        if parameter not in names:
            of = f"a tensor of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
            raise UsageError(
                f"the optimizer keeps state of {of}, which is no parameter of the module: remove it from "
                "optimizer.state, or save it as extra"
            )
        for key, value in values.items():
            if names[parameter] in slices and is_cut(key, value) and value.shape != parameter.shape:
                raise UsageError(
                    f"{key} of {names[parameter]} is {tuple(value.shape)} where the slice is "
                    f"{tuple(parameter.shape)}: only state of the slice's shape can be shared out to other ranks"
                )
    return [dict(group) | {"params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]


def load_named_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]], groups: Groups) -> None:
    """Load a state by names of parameters, and groups as :func:`named_groups` returned them.

    What was saved in fp32 of half-precision parameters stays so: ``Optimizer.load_state_dict`` alone would round it.
    """
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    by_number = {numbers[name]: dict(values) for name, values in state.items()}
    numbered = [
        {key: _on_device_of(current.get(key), value) for key, value in group.items()}
        | {"params": [numbers[name] for name in group["params"]]}
        for group, current in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": by_number, "param_groups": numbered})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in by_number.items():
        kept = optimizer.state.get(parameters[number], {})
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)


def _on_device_of(current: Any, value: Any) -> Any:
    """An option that was loaded, where the optimizer has it: a learning rate may be a tensor on a GPU."""
    return value.to(current.device) if isinstance(current, Tensor) and isinstance(value, Tensor) else value
