"""The collectives that a rank launches, seen at torch's dispatcher: which, when, and from which line of the wrap."""

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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

# How long the late rank sleeps, and before how many collectives of a phase.
LATE_S = 0.1
_MOST_DELAYS = 8


@dataclass(frozen=True)
class CollectiveLaunch:
    """A collective that this rank launched.

    Attributes:
        name: of torch's operator: ``allreduce_``, ``_allgather_base_``, ``send``.
        elements: of its tensors.
        step, phase: when: ``wrap``, ``forward``, ``backward``, ``finish``, ``clip``, ``optimizer``.
        line: of the user's code that led to it, ``mine.py, line 12``; empty where none did.
        incomplete: parameters that shared memory with its tensors, and whose gradients were not complete.
        ranks: those of its process group; empty where that is unknown.
    """

    name: str
    elements: int
    dtype: str
    step: int
    phase: str
    line: str = ""
    incomplete: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

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


def operator_name(operator: Any) -> str:
    """Return an operator's name without namespace and overload: ``allreduce_``."""
    return operator.name().partition("::")[2].partition(".")[0]


def group_of_collective(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group of a collective's arguments, which is an object there or a name."""
    if "group_name" in arguments:
        return dist.distributed_c10d._resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


class CollectiveMode(DispatchMode):
    """Calls :meth:`before` and :meth:`after` around every collective that goes through torch's dispatcher, those of the
    C++ reducer of torch's DDP too.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise code that is compiled already would run uncompiled.
        return True

    def before(self, operator: Any, arguments: dict[str, Any]) -> None:
        """Take a collective's arguments by name."""

    def after(self, operator: Any, arguments: dict[str, Any] | None, result: Any) -> None:
        """Take the result of any operator; ``arguments`` is None if it is no collective."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, arguments = kwargs or {}, None
        if any(issubclass(kind, Tensor) and hasattr(kind, "to_local") for kind in types):
            # DTensors launch theirs below: let them, and see what they launch.
            return NotImplemented
        # Operators without a result only check something, functional ones without a group wait for others.
        if operator.namespace in ("c10d", FUNCTIONAL) and operator._schema.returns:
            names = call_parameters(operator)
            if operator.namespace == "c10d" or "group_name" in names:
                arguments = dict(zip(names, args, strict=False)) | kwargs
                self.before(operator, arguments)
        result = operator(*args, **kwargs)
        self.after(operator, arguments, result)
        return result


def first_disagreement(rank_launches: Sequence[Sequence[CollectiveLaunch]]) -> tuple[str, CollectiveLaunch] | None:
    """Compare the collectives of all ranks, group by group, in the order of their launches.

    Sends and receives are left out: two ranks that launch other ones may meet.

    Returns:
        what the ranks of a group launch first that is not the same, in a sentence, and the launch of a rank there.
    """
    everyone = tuple(range(len(rank_launches)))
    by_group: dict[tuple[int, ...], dict[int, list[CollectiveLaunch]]] = {}
    for rank, launches in enumerate(rank_launches):
        for launch in launches:
            if not launch.is_point_to_point:
                ranks = launch.ranks or everyone
                by_group.setdefault(ranks, {member: [] for member in ranks})[rank].append(launch)
    for members in by_group.values():
        for launched in itertools.zip_longest(*members.values()):
            if len({launch and launch.signature for launch in launched}) > 1:
                return _disagreement(dict(zip(members, launched, strict=True)))
    return None


def _disagreement(launched: dict[int, CollectiveLaunch | None]) -> tuple[str, CollectiveLaunch]:
    missing = ", ".join(str(rank) for rank, launch in launched.items() if launch is None)
    launches = [f"rank {rank} launches {launch.description}" for rank, launch in launched.items() if launch]
    last = [launch for launch in launched.values() if launch][-1]
    meaning = f"the ranks' collectives differ: {', '.join(launches)}"
    if missing:
        where = f"the {last.description} of {last.phase} in step {last.step + 1}"
        meaning = f"rank {missing} does not launch {where} that the others wait in"
    return meaning, last


class CollectiveWatcher(CollectiveMode):
    """Records collectives, makes this rank late before them, and notes the lowest precision of matrix products.

    Args:
        files: of the user, whose lines are named, and those of files next to them.
        is_late: whether this rank sleeps before its collectives.

    Attributes:
        launches: in order.
        step, phase: what the program is at; set by it.
        dtypes: of matrix products (``compute``), and of floating point numbers that were sent (``send``).
        waiting: gradients that the present backward pass has yet to complete, by the address of their memory.
    """

    def __init__(self, files: list[Path], is_late: bool) -> None:
        super().__init__()
        self.launches: list[CollectiveLaunch] = []
        self.step, self.phase = 0, "wrap"
        self.waiting: dict[str, Tensor] = {}
        self.dtypes: set[tuple[str, torch.dtype]] = set()
        self._files, self._is_late = files, is_late
        self._delays: dict[tuple[int, str], int] = {}

    def after(self, operator: Any, arguments: dict[str, Any] | None, result: Any) -> None:
        if self.phase != "wrap" and operator._schema.name in _PRODUCTS and isinstance(result, Tensor):
            self.dtypes.add(("compute", result.dtype))

    def before(self, operator: Any, arguments: dict[str, Any]) -> None:
        if self.phase == OBSERVED:
            return
        moment = self.step, self.phase
        if self._is_late and self._delays.get(moment, 0) < _MOST_DELAYS:
            self._delays[moment] = self._delays.get(moment, 0) + 1
            time.sleep(LATE_S)
        parts = [[leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)] for part in arguments.values()]
        tensors = list(itertools.chain(*parts))
        name = operator_name(operator)
        if name == "barrier" or not tensors:
            return
        if self.phase != "wrap":
            self.dtypes |= {("send", tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        elements = max(sum(tensor.numel() for tensor in part) for part in parts)
        ranks: tuple[int, ...] = ()
        with contextlib.suppress(RuntimeError, ValueError, LookupError):
            ranks = tuple(dist.get_process_group_ranks(group_of_collective(arguments)))
        line, incomplete = self._line(), self._incomplete(tensors)
        self.launches.append(CollectiveLaunch(name, elements, dtype, *moment, line, incomplete, ranks))

    def _line(self) -> str:
        lines = [(Path(file), line) for file, line, _ in python_frames()] if self._files else []
        return innermost_line(lines[::-1], self._files)

    def _incomplete(self, tensors: list[Tensor]) -> tuple[str, ...]:
        if self.phase != "backward" or not self.waiting:
            return ()
        sent = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        gradients = {name: parameter.grad for name, parameter in self.waiting.items() if parameter.grad is not None}
        plain = {name: gradient for name, gradient in gradients.items() if not hasattr(gradient, "to_local")}
        return tuple(name for name, gradient in plain.items() if gradient.untyped_storage().data_ptr() in sent)

    def expect(self, named: dict[str, torch.nn.Parameter]) -> list[Any]:
        """Watch the gradients of the next backward pass; handles to remove."""
        self.waiting = dict(named)
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        return [parameter.register_hook(partial(self._complete, name)) for name, parameter in trained.items()]

    def _complete(self, name: str, gradient: Tensor) -> None:
        # What a hook returns would be the gradient.
        self.waiting.pop(name, None)
