"""A model's blocks, and tensors that it computes with and that are no parameters of it."""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from cs336sys.errors import UserCodeError


def find_blocks(model: nn.Module, patterns: str | None) -> dict[str, nn.Module]:
    """Return the model's blocks by name, in the order of its modules; there may be none.

    Without ``patterns`` take the most numerous class of modules that fill an ``nn.ModuleList`` or ``nn.Sequential``;
    lists inside a block do not count.

    Args:
        patterns: names, separated by commas; a star stands for anything between two dots, as in ``encoder.layers.*``.
    """
    if patterns is not None:
        named, pattern_list = dict(model.named_modules()), patterns.split(",")
        matching = {name: named[name] for name in named if any(_matches_pattern(name, part) for part in pattern_list)}
        if not matching:
            lists = {name.rpartition(".")[0] for name in named if name.rpartition(".")[2].isdigit()}
            listed = ", ".join(f"'{name}.*'" for name in sorted(lists)) or "none"
            raise UserCodeError(f"--blocks '{patterns}': no module has such a name; its lists are {listed}")
        return matching
    by_class: dict[type[nn.Module], dict[str, nn.Module]] = {}
    _collect_blocks(model, name="", by_class=by_class)
    return max(by_class.values(), key=len, default={})


def _matches_pattern(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.strip().split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))


def _collect_blocks(module: nn.Module, name: str, by_class: dict[type[nn.Module], dict[str, nn.Module]]) -> None:
    """Add to ``by_class`` the modules in each list whose members are of one class and have children."""
    children = {f"{name}.{child_name}" if name else child_name: child for child_name, child in module.named_children()}
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = {type(child) for child in children.values()}
    if is_list and len(classes) == 1:
        (block_class,) = classes
        # Layers of torch's own in a row, without children, are what blocks are made of.
        have_children = any(list(child.children()) for child in children.values())
        if have_children and not issubclass(block_class, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            by_class.setdefault(block_class, {}).update(children)
            return  # Lists inside a block do not count.
    for child_name, child in children.items():
        _collect_blocks(child, child_name, by_class)


_MOST_NAMES = 3  # In a warning.


def hidden_parameters(model: nn.Module) -> list[str]:
    """Name tensors that require gradients in attributes, lists and dictionaries, and in modules in these."""
    registered = {id(parameter) for parameter in model.parameters()}
    hidden: dict[int, str] = {}
    visited = {id(part) for part in model.modules()}
    for name, part in model.named_modules():
        for attribute, value in vars(part).items():
            # These hold what is registered.
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for where, tensor in _tensors(value, f"{name}.{attribute}".removeprefix("."), visited):
                    if id(tensor) not in registered:
                        hidden.setdefault(id(tensor), where)
    return list(hidden.values())


def hidden_warnings(reference: str, names: list[str]) -> list[str]:
    """Return a note where :func:`hidden_parameters` has named some, as a list."""
    if not names:
        return []
    listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if names[_MOST_NAMES:] else "")
    return [
        f"warning: {reference}: {len(names)} tensors that require gradients ({listed}) are not among its parameters(), "
        "so nothing trains or counts them: keep modules in nn.ModuleList, tensors as nn.Parameter"
    ]


def _tensors(value: Any, name: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained tensors in an attribute's value by name, outside of objects with ``visited`` ids."""
    if isinstance(value, Tensor):
        # A tensor that was computed is no leaf.
        if value.requires_grad and value.is_leaf:
            yield name, value
        return
    if id(value) in visited or not isinstance(value, list | tuple | dict | set | nn.Module):
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for parameter_name, parameter in value.named_parameters():
            yield f"{name}.{parameter_name}", parameter
        return
    members: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        yield from _tensors(member, f"{name}.{key}", visited)
