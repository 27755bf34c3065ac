"""Which modules of a model are its blocks: those that come one after another, many of one class."""

import fnmatch

from torch import nn

from cs336sys.errors import UserCodeError


def find_blocks(model: nn.Module, patterns: str | None) -> dict[str, nn.Module]:
    """The blocks by their names, in the order of the model's modules.

    They are the modules of one class in lists (``nn.ModuleList``, ``nn.Sequential``) that are in no other list of
    blocks; of several classes, of the one that has most. There may be none.

    Args:
        patterns: of names, separated by commas, a star for what stands between two dots: ``encoder.layers.*``.

    Raises:
        UserCodeError: no module has such a name.
    """
    if patterns is not None:
        named = dict(model.named_modules())
        found = {
            name: module for name, module in named.items() if any(_matches(name, one) for one in patterns.split(","))
        }
        if not found:
            lists = {name.rpartition(".")[0] for name in named if name.rpartition(".")[2].isdigit()}
            listed = ", ".join(f"'{name}.*'" for name in sorted(lists)) or "none"
            raise UserCodeError(f"--blocks '{patterns}': no module has such a name; its lists are {listed}")
        return found
    by_class: dict[type[nn.Module], dict[str, nn.Module]] = {}
    _collect(model, "", by_class)
    return max(by_class.values(), key=len, default={})


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.strip().split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _collect(module: nn.Module, name: str, by_class: dict[type[nn.Module], dict[str, nn.Module]]) -> None:
    children = {f"{name}.{own}" if name else own: child for own, child in module.named_children()}
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = {type(child) for child in children.values()}
    if is_list and len(classes) == 1:
        (kind,) = classes
        # Layers of torch's own in a row are what blocks are made of.
        if any(True for child in children.values() for _ in child.children()) and not issubclass(
            kind, nn.ModuleList | nn.Sequential | nn.ModuleDict
        ):
            by_class.setdefault(kind, {}).update(children)
            return
    for own, child in children.items():
        _collect(child, own, by_class)
