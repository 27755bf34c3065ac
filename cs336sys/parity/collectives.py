"""The collectives that a rank launches, seen at torch's dispatcher: which, when, and from which line of the wrap."""

import contextlib
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cs336sys.allocations.recorder import DispatchMode
from cs336sys.allocations.without_values import python_frames
from cs336sys.training.user_models import innermost_line

# torch's functional collectives, which torch.compile knows.
FUNCTIONAL = "_c10d_functional"

# Ranks may launch parts of different sizes of these.
_UNEQUAL_PARTS = ("alltoall_", "alltoall_base_", "all_to_all_single", "gather_", "scatter_")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")

# The phase in which a rank's tensors are looked at, whose collectives are none of the wrap's.
OBSERVED = "observed"

# How long the late rank sleeps, and before how many collectives of a phase at most: it bounds the time of a case.
LATE_S = 0.1
_MOST_DELAYS = 8


@dataclass(frozen=True)
class CollectiveLaunch:
    """A collective that this rank launched."""

    name: str  # Of torch's operator: ``allreduce_``, ``_allgather_base_``, ``send``.
    elements: int  # Of its inputs, or of its outputs where these are more.
    dtype: str
    step: int  # From 0.
    phase: str  # ``wrap``, ``forward``, ``backward``, ``finish``, ``clip``, ``optimizer``.
    line: str = ""  # Of the user's code that led to it, ``mine.py, line 12``.
    incomplete: tuple[str, ...] = ()  # Parameters that shared memory with it while their gradients were not complete.
    ranks: tuple[int, ...] = ()  # Those of its process group, where they are known.

    @property
    def signature(self) -> tuple[str, int, str]:
        """Return what every rank of the group must launch alike: name, elements, dtype."""
        return self.name, 0 if self.name in _UNEQUAL_PARTS else self.elements, self.dtype

    @property
    def is_point_to_point(self) -> bool:
        return self.name.startswith(("send", "recv"))

    @property
    def description(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.name.strip('_').removesuffix('_base')} of {self.elements:,} {self.dtype}{where}"


def call_parameters(operator: Any) -> list[str]:
    """Return the names of an operator's arguments."""
    return [parameter.name for parameter in operator._schema.arguments]


def group_of_collective(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group of a collective's arguments, which is an object there or a name."""
    if "group_name" in arguments:
        return dist.distributed_c10d._resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


class CollectiveMode(DispatchMode):
    """A mode that calls :meth:`before` and :meth:`after` around collectives in torch's dispatcher, also of DDP."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise code that is compiled already would run uncompiled.
        return True

    def before(self, operator: Any, arguments: dict[str, Any]) -> None:
        """Take a collective's arguments by name."""

    def after(self, operator: Any, arguments: dict[str, Any] | None, result: Any) -> None:
        """Take the result of any operator; ``arguments`` is None if it is no collective."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator: :meth:`before` is called first if it is a collective, :meth:`after` in any case."""
        kwargs, arguments = kwargs or {}, None
        if any(issubclass(kind, Tensor) and hasattr(kind, "to_local") for kind in types):
            # An operator of DTensors launches collectives of plain tensors: those come here afterwards.
            return NotImplemented
        # Operators without a result only check something. Functional ones without a group wait for a collective.
        if operator.namespace in ("c10d", FUNCTIONAL) and operator._schema.returns:
            names = call_parameters(operator)
            if operator.namespace == "c10d" or "group_name" in names:
                arguments = dict(zip(names, args, strict=False)) | kwargs
                self.before(operator, arguments)
        result = operator(*args, **kwargs)
        self.after(operator, arguments, result)
        return result


def read_log(path: str) -> list[CollectiveLaunch]:
    """Return the launches in a rank's log, as far as it was written."""
    launches = []
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), open(path, "rb") as log:
        while True:
            launches.append(pickle.load(log))
    return launches


def first_disagreement(rank_launches: Sequence[Sequence[CollectiveLaunch]]) -> tuple[str, CollectiveLaunch] | None:
    """Compare the collectives of all ranks, group by group, in the order of their launches.

    Sends and receives are left out: one rank's send meets another rank's receive.

    Returns:
        a sentence on the first launches of a group that are not the same, and one of these; None if all are.
    """
    all_ranks = tuple(range(len(rank_launches)))
    launches_by_group: dict[tuple[int, ...], dict[int, list[CollectiveLaunch]]] = {}
    for rank, launches in enumerate(rank_launches):
        for launch in launches:
            if not launch.is_point_to_point:
                members = launch.ranks or all_ranks
                launches_by_group.setdefault(members, {member: [] for member in members})[rank].append(launch)
    moments = (
        dict(zip(group, launched, strict=True))  # By rank; None where one launched fewer.
        for group in launches_by_group.values()
        for launched in itertools.zip_longest(*group.values())
    )
    for launched in moments:
        if len({launch and launch.signature for launch in launched.values()}) > 1:
            break
    else:
        return None
    missing = ", ".join(str(rank) for rank, launch in launched.items() if launch is None)
    present = {rank: launch for rank, launch in launched.items() if launch}
    last = [*present.values()][-1]
    if missing:
        where = f"the {last.description} of {last.phase} in step {last.step + 1}"
        return f"rank {missing} does not launch {where} that the others wait in", last
    described = ", ".join(f"rank {rank} launches {launch.description}" for rank, launch in present.items())
    return f"the ranks' collectives differ: {described}", last


class CollectiveWatcher(CollectiveMode):
    """Records collectives, makes this rank late before them, and notes the lowest precision of matrix products.

    Args:
        files: of the user, whose lines are named, and those of files next to them.
        is_late: whether this rank sleeps before its collectives.

    Attributes:
        launches: in order.
        step, phase: what the program is at; set by it.
        dtypes: of matrix products (``compute``), and of floating point numbers that were sent (``send``), in steps:
            what a wrap does once, such as broadcasting weights, is not training.
        waiting: parameters whose gradients the present backward pass has yet to complete, by name.
        log: where launches are written before they begin: all that is left of a rank that dies.
    """

    log: BinaryIO | None = None

    def __init__(self, files: list[Path], is_late: bool) -> None:
        super().__init__()
        self.launches: list[CollectiveLaunch] = []
        self.step, self.phase = 0, "wrap"
        self.waiting: dict[str, Tensor] = {}
        self.dtypes: set[tuple[str, torch.dtype]] = set()
        self._files, self._is_late = files, is_late
        self._delays_at: Counter[tuple[int, str]] = Counter()

    def after(self, operator: Any, arguments: dict[str, Any] | None, result: Any) -> None:
        if self.phase != "wrap" and operator._schema.name in _PRODUCTS and isinstance(result, Tensor):
            self.dtypes.add(("compute", result.dtype))

    def before(self, operator: Any, arguments: dict[str, Any]) -> None:
        """Record the collective, after a pause where this rank is to be late, and the dtypes that it sends."""
        if self.phase == OBSERVED:
            return
        moment = self.step, self.phase
        if self._is_late and self._delays_at[moment] < _MOST_DELAYS:
            self._delays_at[moment] += 1
            time.sleep(LATE_S)
        # Inputs and outputs are arguments of their own, each a tensor or a list of some.
        tensor_lists = [
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in arguments.values()
        ]
        tensors = list(itertools.chain(*tensor_lists))
        name = operator.overloadpacket.__name__
        if name == "barrier" or not tensors:
            return  # Nothing is sent that ranks could send differently.
        if self.phase != "wrap":  # Broadcasting weights once is not training.
            self.dtypes |= {("send", tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
        ranks: tuple[int, ...] = ()
        # torch may not find the group by its name, or its ranks.
        with contextlib.suppress(RuntimeError, ValueError, LookupError):
            ranks = tuple(dist.get_process_group_ranks(group_of_collective(arguments)))
        elements = max(sum(tensor.numel() for tensor in part) for part in tensor_lists)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        line, incomplete = self._line(), self._incomplete(tensors)
        launch = CollectiveLaunch(name, elements, dtype, self.step, self.phase, line, incomplete, ranks)
        self.launches.append(launch)
        if self.log is not None:
            pickle.dump(launch, self.log)
            self.log.flush()

    def _line(self) -> str:
        """Return the innermost line of the user's files on the stack."""
        lines = [(Path(file), line) for file, line, _ in python_frames()] if self._files else []
        return innermost_line(lines[::-1], self._files)  # The outermost first, as a traceback lists them.

    def _incomplete(self, tensors: list[Tensor]) -> tuple[str, ...]:
        """Name the parameters with incomplete gradients that share memory with these tensors."""
        if self.phase != "backward" or not self.waiting:
            return ()
        # All empty tensors have the same address, and a DTensor has none itself.
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        gradients = {name: parameter.grad for name, parameter in self.waiting.items() if parameter.grad is not None}
        plain = {name: gradient for name, gradient in gradients.items() if not hasattr(gradient, "to_local")}
        return tuple(name for name, gradient in plain.items() if gradient.untyped_storage().data_ptr() in addresses)

    def expect(self, parameters: dict[str, torch.nn.Parameter]) -> list[Any]:
        """Watch the gradients of the next backward pass, and return the handles to remove after it."""
        self.waiting = dict(parameters)  # Frozen ones stay in it, which have no gradient to send too early.
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        return [parameter.register_hook(partial(self._complete, name)) for name, parameter in trained.items()]

    def _complete(self, name: str, gradient: Tensor) -> None:
        # Returns nothing: autograd would take what a hook returns as the gradient.
        self.waiting.pop(name, None)
