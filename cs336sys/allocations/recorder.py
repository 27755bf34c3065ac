"""Record a step: what was allocated in which phase, by which module, operation and line, and what autograd saved."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.allocations.history import AllocationHistory
from cs336sys.allocations.timeline import (
    RECOMPUTATION,
    AllocationTimeline,
    Gradient,
    Origin,
    Region,
    Span,
    build_timeline,
)
from cs336sys.allocations.without_values import code_line, python_frames
from cs336sys.machine.late_imports import importing_no_compiler


class ModuleStack:
    """A context in which :attr:`current` is the name of the innermost module that runs, empty outside of all.

    Frames would tell it, but reading their variables keeps these alive. A module not in ``names`` counts as its caller.
    """

    def __init__(self, names: Mapping[nn.Module, str]):
        self._names = names
        self.running: list[str] = []
        self._hooks = contextlib.ExitStack()

    @property
    def current(self) -> str:
        return self.running[-1] if self.running else ""

    def __enter__(self) -> Self:
        self._hooks.callback(register_module_forward_pre_hook(self._start).remove)
        # always_call: an exception ends a recomputation as soon as it has all that it needs.
        self._hooks.callback(register_module_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def _start(self, module: nn.Module, inputs: object) -> None:
        self.running.append(self._names.get(module, self.current))

    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        self.running.pop()


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that does not import torch's compiler, as torch does for every mode."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            importing_no_compiler(cls.__torch_dispatch__)


class StepRecorder:
    """Records a step while it is entered, whose phases call :meth:`region`; then :meth:`timeline` returns it.

    Args:
        history: the source of the allocator's events.
        names: the modules of the model by name; gradients of their parameters are recognised.
        follow_operations: ask every operation for its origin. Autograd then adds gradients out of place, so there are
            some temporaries more. torch.compile would fall back to eager execution, so compiled code must be recorded
            without: then only phases, gradients and, on CUDA, the allocator's own stacks are known.
    """

    def __init__(self, history: AllocationHistory, names: Mapping[nn.Module, str], *, follow_operations: bool):
        self._history = history
        self._parameters = {
            f"{name}.{parameter_name}".removeprefix("."): parameter
            for module, name in names.items()
            for parameter_name, parameter in module.named_parameters(recurse=False)
        }
        self._modules = ModuleStack(names)
        self._operations = _OperationObserver(history, self._modules) if follow_operations else None
        # Name, start and end; mark, address and name of the parameter. Marks become positions once the history is left.
        self._regions: list[tuple[str, int, int]] = []
        self._gradients: list[tuple[int, int, str]] = []
        self._open_recomputations = 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
                    stack.callback(hook.remove)
            stack.enter_context(self._history)
            if self._operations is not None:
                stack.enter_context(self._modules)
                stack.enter_context(self._operations)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Note this block as a phase, or as a recomputation; of nested recomputations the outermost counts."""
        is_inner = name == RECOMPUTATION and self._open_recomputations > 0
        self._open_recomputations += name == RECOMPUTATION
        start = self._history.mark()
        try:
            yield
        finally:
            self._open_recomputations -= name == RECOMPUTATION
            if not is_inner:
                self._regions.append((name, start, self._history.mark()))

    def timeline(
        self, *, live_tensors: Mapping[str, list[Tensor]], held_size: int | None, optimizer_state: list[Tensor]
    ) -> AllocationTimeline:
        """Return the recorded timeline.

        Args:
            live_tensors: tensors from before the step, by category.
            held_size: bytes of all memory from before the step; None if unknown.
            optimizer_state: tensors of the optimizer after the step.
        """
        history, position = self._history, self._history.position
        return build_timeline(
            history.events,
            regions=[Region(name, position(start), position(end)) for name, start, end in self._regions],
            spans=[] if self._operations is None else self._operations.spans(),
            live_blocks={
                history.address(tensor): (tensor.untyped_storage().nbytes(), category)
                for category, tensors in live_tensors.items()
                for tensor in tensors
            },
            held_size=held_size,
            gradients=[Gradient(position(mark), address, name) for mark, address, name in self._gradients],
            optimizer_state=[history.address(tensor) for tensor in optimizer_state],
            lost_events=history.lost_events,
        )

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # An optimizer that updates in the backward pass may have dropped it.
            self._gradients.append((self._history.mark(), self._history.address(parameter.grad), name))


class _OperationObserver(DispatchMode):
    """Notes the origin of each operation: module, operation and line of code.

    An operation of the backward pass belongs to the operation of the forward pass that made its node of the graph: both
    carry the same sequence number. (On CUDA the backward pass runs on a thread without Python frames.)

    It keeps no frames and no tensors, which would keep memory alive.
    """

    def __init__(self, history: AllocationHistory, modules: ModuleStack):
        super().__init__()
        self._history = history
        self._modules = modules
        self._by_sequence: dict[int, Origin] = {}  # By the sequence number of a node of the forward pass's graph.
        self._spans: list[tuple[int, int, Origin]] = []  # Marks at the start and end of an operation.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "profiler":  # Named ranges of a profile, such as the marks of CpuHistory.
            return func(*args, **(kwargs or {}))
        origin = self._origin(func)
        start = self._history.mark()
        result = func(*args, **(kwargs or {}))
        self._spans.append((start, self._history.mark(), origin))
        return result

    def spans(self) -> list[Span]:
        position = self._history.position
        return [Span(position(start), position(end), origin) for start, end, origin in self._spans]

    def _origin(self, func: torch._ops.OpOverload) -> Origin:
        """Return the origin of an operation, in the backward pass that of its node; note it for nodes that it makes."""
        node = torch._C._current_autograd_node()
        # A module that runs while a node does is a checkpoint's recomputation, and tells where it is by itself.
        if node is not None and not self._modules.running:
            forward = self._by_sequence.get(node._sequence_nr(), Origin())
            return Origin(forward.module, node.name().rpartition("::")[2], forward.code)
        origin = Origin(self._modules.current, func.overloadpacket.__name__, code_line(python_frames()))
        if node is None:
            # The operation's node has taken the last number. Without a node, that is an older one's: keep its origin.
            self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, origin)
        return origin


# Nodes of the graph whose result is a view of their input, which an earlier node has computed.
_VIEWS = {"Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "Transpose", "Unbind"}
_VIEWS |= {"UnsafeView", "Unsqueeze", "View"}


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd holds until the backward pass."""

    shape: tuple[int, ...]  # This and the dtype are those of the first tensor in it that was saved.
    dtype: str
    size: int  # Of the whole storage, in bytes.
    operation: str  # Which computed the tensor, ``Exp``; ``input`` for a leaf; empty for a mask and in compiled code.
    module: str  # This and the code say where it was saved first.
    code: str


def saved_tensors(
    run: Callable[[], object], excluded: Iterable[Tensor], names: Mapping[nn.Module, str] | None = None
) -> list[SavedTensor]:
    """Call ``run`` and list what it saves for its backward pass, the largest first.

    Every storage counts once, however many operations save it or a view of it.

    Args:
        excluded: tensors that exist anyway, such as parameters: neither their storages nor views of them count.
        names: modules by name; None for compiled code, which cannot be asked for its modules.
    """
    modules = None if names is None else ModuleStack(names)
    seen_addresses = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    saved = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen_addresses:
            seen_addresses.add(storage.data_ptr())
            dtype, module = str(tensor.dtype).removeprefix("torch."), modules.current if modules else ""
            operation, code = _operation_name(tensor), code_line(python_frames())
            saved.append(SavedTensor(tuple(tensor.shape), dtype, storage.nbytes(), operation, module, code))
        # A tensor that its own node saves would hold that node, and neither would ever be freed.
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, modules or contextlib.nullcontext():
        result = run()  # Held until the end, or storages would be freed and their addresses used again.
    del result
    return sorted(saved, key=lambda tensor: -tensor.size)


def _operation_name(tensor: Tensor) -> str:
    """Return the operation that computed a tensor, through views; ``input`` for a leaf, "" without a gradient."""
    node = tensor.grad_fn
    if node is None:
        return "input" if tensor.requires_grad else ""
    while (name := node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")) in _VIEWS:
        node, _ = node.next_functions[0]  # That of the tensor it views.
        assert node is not None  # A view has a gradient because what it views has one.
    return "input" if name == "AccumulateGrad" else name
