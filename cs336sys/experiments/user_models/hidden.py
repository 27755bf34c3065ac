"""Tensors that a model computes with and that require gradients, but are no parameters of it: nothing trains them."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

# Of these modules know themselves.
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))

_NAMED = 3


def hidden_parameters(model: nn.Module) -> list[str]:
    """Names of tensors that require gradients in attributes, lists and dictionaries, modules in these among them."""
    known = {id(parameter) for parameter in model.parameters()}
    found: dict[int, str] = {}
    visited = {id(part) for part in model.modules()}
    for name, part in model.named_modules():
        for own, value in vars(part).items():
            if own not in _REGISTERED:
                for where, tensor in _tensors(value, f"{name}.{own}".removeprefix("."), visited):
                    if id(tensor) not in known:
                        found.setdefault(id(tensor), where)
    return list(found.values())


def hidden_warnings(reference: str, names: list[str]) -> list[str]:
    """A note where :func:`hidden_parameters` has found some."""
    if not names:
        return []
    named = ", ".join(names[:_NAMED]) + (", ..." if names[_NAMED:] else "")
    return [
        f"warning: {reference}: {len(names)} tensors that require gradients ({named}) are not among its parameters(), "
        "so nothing trains or counts them: keep modules in nn.ModuleList, tensors as nn.Parameter"
    ]


def _tensors(value: Any, name: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        # What was computed is of no concern, only what was made to be trained.
        if value.requires_grad and value.is_leaf:
            yield name, value
        return
    if id(value) in visited or not isinstance(value, list | tuple | dict | set | nn.Module):
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for own, parameter in value.named_parameters():
            yield f"{name}.{own}", parameter
        return
    members: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        yield from _tensors(member, f"{name}.{key}", visited)
