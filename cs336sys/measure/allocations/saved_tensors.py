"""Find what autograd saves for the backward pass of a piece of code, by saved-tensor hooks."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336sys.measure.allocations.history import code_line, python_frames
from cs336sys.measure.allocations.recorder import ModuleStack

# Nodes of the graph whose result is a view of their input: who made the tensor stands before them.
_VIEWS = {"Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "Transpose", "Unbind"}
_VIEWS |= {"UnsafeView", "Unsqueeze", "View"}


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd holds until the backward pass.

    Attributes:
        shape, dtype: of the tensor that was saved first of it.
        size: of the whole storage, in bytes.
        operation: what computed the tensor, ``Exp``; ``input`` for a leaf; empty where no gradient flows (a mask) and
            in compiled code.
        module, code: where it was saved first.
    """

    shape: tuple[int, ...]
    dtype: str
    size: int
    operation: str
    module: str
    code: str


def saved_tensors(
    run: Callable[[], object], own: Iterable[Tensor], names: Mapping[nn.Module, str] | None = None
) -> list[SavedTensor]:
    """Call ``run`` and list what it saves for its backward pass, the largest first.

    Every storage counts once, however many operations save it or a view of it.

    Args:
        own: tensors that would be there anyway, such as parameters; their storages do not count, nor do views of them.
        names: modules by name; None for compiled code, which cannot be asked for its modules.
    """
    modules = None if names is None else ModuleStack(names)
    seen = {_address(tensor) for tensor in own}
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in seen:
            seen.add(_address(tensor))
            saved.append(
                SavedTensor(
                    tuple(tensor.shape),
                    str(tensor.dtype).removeprefix("torch."),
                    tensor.untyped_storage().nbytes(),
                    _operation(tensor),
                    modules.current if modules else "",
                    code_line(python_frames()),
                )
            )
        # A tensor that its own node saves would hold that node, and neither would ever be freed.
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, modules or contextlib.nullcontext():
        # Held until the end, or storages would be freed and their addresses used again.
        result = run()
    del result
    return sorted(saved, key=lambda tensor: -tensor.size)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _operation(tensor: Tensor) -> str:
    node = tensor.grad_fn
    if node is None:
        return "input" if tensor.requires_grad else ""
    while (name := node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")) in _VIEWS:
        node = node.next_functions[0][0]
        # A view has a gradient because what it views has one.
        assert node is not None
    return "input" if name == "AccumulateGrad" else name
