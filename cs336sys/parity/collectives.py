"""The collectives that a rank launches, seen at torch's dispatcher: which, when, and from which line of the wrap."""

import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cs336sys.measure.allocations.recorder import DispatchMode

_NAMESPACES = ("c10d", "_c10d_functional")

_NO_LAUNCH = ("wait_tensor", "_wrap_tensor_autograd")
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


def _group_ranks(args: tuple) -> tuple[int, ...]:
    """The ranks of the process group among a collective's arguments, where it is by name or as an object."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    for arg in reversed(args):
        with contextlib.suppress(RuntimeError, ValueError, LookupError):
            if isinstance(arg, str):
                group = resolve(arg)
            elif isinstance(arg, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(arg)
            else:
                continue
            return tuple(dist.get_process_group_ranks(group))
    return ()


@dataclass(frozen=True)
class Disagreement:
    """The first collective that the ranks of a group do not launch alike.

    Attributes:
        meaning: what the ranks launch, in a sentence.
        launch: of a rank that launches one.
    """

    meaning: str
    launch: CollectiveLaunch


def first_disagreement(rank_launches: Sequence[Sequence[CollectiveLaunch]]) -> Disagreement | None:
    """Compare the collectives of all ranks, group by group, in the order of their launches.

    Sends and receives are left out: two ranks that launch other ones may meet.
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


def _disagreement(launched: dict[int, CollectiveLaunch | None]) -> Disagreement:
    present = {rank: launch for rank, launch in launched.items() if launch is not None}
    missing = ", ".join(str(rank) for rank, launch in launched.items() if launch is None)
    last = list(present.values())[-1]
    if missing:
        meaning = (
            f"rank {missing} does not launch the {last.description} of {last.phase} in step {last.step + 1} that the "
            "others wait in"
        )
    else:
        meaning = "the ranks' collectives differ: " + ", ".join(
            f"rank {rank} launches {launch.description}" for rank, launch in present.items()
        )
    return Disagreement(meaning, last)


class CollectiveWatcher(DispatchMode):
    """Records collectives, makes this rank late before them, and notes the lowest precision of matrix products.

    Args:
        folder: of the user's file, whose lines are named; None names none.
        is_late: whether this rank sleeps before its collectives.

    Attributes:
        launches: in order.
        step, phase: what the program is at; set by it.
        dtypes: of matrix products (``compute``), and of floating point numbers that were sent (``send``).
        waiting: gradients that the present backward pass has yet to complete, by the address of their memory.
    """

    def __init__(self, folder: Path | None, is_late: bool) -> None:
        super().__init__()
        self.launches: list[CollectiveLaunch] = []
        self.step, self.phase = 0, "wrap"
        self.waiting: dict[str, Tensor] = {}
        self.dtypes: set[tuple[str, torch.dtype]] = set()
        self._folder = None if folder is None else str(folder)
        self._is_late = is_late
        self._delays: dict[tuple[int, str], int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, Tensor) and hasattr(kind, "to_local") for kind in types):
            # DTensors launch theirs below.
            return NotImplemented
        name = str(operator)
        if (
            self.phase != OBSERVED
            and operator.namespace in _NAMESPACES
            and not any(operation in name for operation in _NO_LAUNCH)
        ):
            self._see(operator, args)
        result = operator(*args, **(kwargs or {}))
        if self.phase != "wrap" and operator._schema.name in _PRODUCTS and isinstance(result, Tensor):
            self.dtypes.add(("compute", result.dtype))
        return result

    def _see(self, operator: Any, args: tuple) -> None:
        moment = self.step, self.phase
        if self._is_late and self._delays.get(moment, 0) < _MOST_DELAYS:
            self._delays[moment] = self._delays.get(moment, 0) + 1
            time.sleep(LATE_S)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        name = operator.name().partition("::")[2].partition(".")[0]
        if name == "barrier" or not tensors:
            return
        if self.phase != "wrap":
            self.dtypes |= {("send", tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        elements = max(sum(leaf.numel() for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args)
        incomplete, ranks = self._incomplete(tensors), _group_ranks(args)
        self.launches.append(CollectiveLaunch(name, elements, dtype, *moment, self._line(), incomplete, ranks))

    def _line(self) -> str:
        if self._folder is None:
            return ""
        frame: Any = sys._getframe(3)
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._folder):
                return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _incomplete(self, tensors: list[Tensor]) -> tuple[str, ...]:
        if self.phase != "backward" or not self.waiting:
            return ()
        sent = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        return tuple(
            name
            for name, parameter in self.waiting.items()
            if parameter.grad is not None
            and not hasattr(parameter.grad, "to_local")
            and parameter.grad.untyped_storage().data_ptr() in sent
        )

    def expect(self, named: dict[str, torch.nn.Parameter]) -> list[Any]:
        """Watch the gradients of the next backward pass; handles to remove."""
        self.waiting = dict(named)

        def complete(name: str) -> Any:
            def done(gradient: Tensor) -> None:
                # What a hook returns would be the gradient.
                self.waiting.pop(name, None)

            return done

        return [parameter.register_hook(complete(name)) for name, parameter in named.items() if parameter.requires_grad]
