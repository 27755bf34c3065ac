"""The collectives of a training step: recorded, launched again without the step around them, or finished at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_flatten, tree_unflatten

from cs336sys.measure.allocations.recorder import DispatchMode

# torch's functional collectives, which torch.compile knows.
_FUNCTIONAL = "_c10d_functional"

# How long Gloo's thread may hold tensors after their collective. Without this pause that thread freed tensors in 2 of
# 90 steps of fsdp by six ranks on two cores; with it in none, and in none of 960 steps of all strategies.
_RELEASE_S = 0.001


@dataclass(frozen=True)
class _Layout:
    """The layout in memory of a recorded call's tensor, without the memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def allocate(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()


@dataclass(frozen=True)
class Communication:
    """One collective that this rank launched; several tensors launched as one group count as one.

    Attributes:
        name: of torch's operator: ``allreduce_``, ``_allgather_base_``, ...; functional ones are ``all_reduce``, ...
        bytes: of the whole array as nccl-tests counts: of an all-gather its output, of a reduce-scatter its input.
        dtype: of what is sent.
        ranks: how many take part.
    """

    name: str
    bytes: int
    dtype: str
    ranks: int
    _operator: Callable[..., Any]
    _arguments: dict[str, Any]

    @property
    def is_flags(self) -> bool:
        """Return whether ranks tell each other facts (see ``parallel.collectives.AnyRank``) or digests, and no
        numbers.
        """
        # Fully sharded models gather weights as bytes.
        are_facts = self.dtype in ("uint8", "bool") and self.name.startswith("allreduce")
        return are_facts or (self.dtype == "int64" and "allgather" in self.name)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that a rank sends on average in a ring: an all-reduce sends everything twice.

        Of an all-to-all whose parts differ in size, what this rank sends to others.
        """
        sizes = self._arguments.get("input_split_sizes")
        if sizes:
            own = sizes[_group(self._arguments).rank()]
            return self._arguments["input"].bytes * (sum(sizes) - own) / sum(sizes)
        times = 2 if self.name.startswith(("allreduce", "all_reduce")) else 1
        return times * (self.ranks - 1) / self.ranks * self.bytes

    def launcher(self, tensors: dict[Any, Tensor] | None = None) -> Callable[[], Any]:
        """A function that launches the same collective on zeros, without waiting, and returns what can be waited for.

        Args:
            tensors: those of other launchers, used again where they fit; new ones are added. None shares none.
        """
        tensors = {} if tensors is None else tensors
        leaves, structure = tree_flatten(self._arguments)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, _Layout):
                if (position, leaf) not in tensors:
                    tensors[position, leaf] = leaf.allocate()
                leaves[position] = tensors[position, leaf]
        arguments = tree_unflatten(leaves, structure)
        if "async_op" in _parameters(self._operator):
            # Where the step waited at once, as fully_shard does, NCCL would return a null pointer, and waiting for that
            # crashes.
            arguments["async_op"] = True
        return lambda: _work(self._operator(**arguments))


class _Watcher(DispatchMode):
    """Sees every collective that goes through torch's dispatcher, those of the C++ reducer of torch's DDP too.

    Args:
        launched: is called with the operator, its arguments by name and what it returned.
    """

    def __init__(self, launched: Callable[[Any, dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._launched = launched

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise code that is compiled already would run uncompiled.
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and hasattr(kind, "to_local") for kind in types):
            # DTensors launch theirs below: let them, and see what they launch.
            return NotImplemented
        result = operator(*args, **kwargs)
        # Operators without a result only check something, functional ones without a group wait for others.
        if operator.namespace in ("c10d", _FUNCTIONAL) and result is not None:
            arguments = dict(zip(_parameters(operator), args, strict=False)) | kwargs
            if operator.namespace == "c10d" or "group_name" in arguments:
                self._launched(operator, arguments, result)
        return result


@contextmanager
def recorded_communication() -> Iterator[list[Communication]]:
    """Within this ``with``, the list grows by every collective that this process launches, in order."""
    communications: list[Communication] = []

    def record(operator: Any, arguments: dict[str, Any], result: Any) -> None:
        communications.append(_without_memory(operator, arguments))

    with _Watcher(record):
        yield communications


def communication_at_once() -> AbstractContextManager:
    """Within this ``with``, every collective is done when its launch returns; all ranks enter it together.

    For Gloo under torch.profiler with ``profile_memory``, which sees only what the launching thread allocates and
    frees: Gloo's threads hold tensors a moment longer than the step, and what they free would seem to be held for ever.
    Worse, the thread of a collective that ends after the profiler writes that end into memory that was the profiler's.
    """

    def finish(operator: Any, arguments: dict[str, Any], result: Any) -> None:
        _work(result).wait()
        time.sleep(_RELEASE_S)

    return _Watcher(finish)


def run_alone(launchers: Sequence[Callable[[], Any]]) -> None:
    """Launch all one after another, then wait for all: on a GPU, let the current stream wait."""
    for work in [launch() for launch in launchers]:
        work.wait()


def _parameters(operator: Any) -> list[str]:
    return [parameter.name for parameter in operator._schema.arguments]


@dataclass(frozen=True)
class _Arriving:
    """The result of a functional collective."""

    tensors: Any

    def wait(self) -> None:
        for tensor in tree_flatten(self.tensors)[0]:
            torch.ops._c10d_functional.wait_tensor(tensor)


def _work(result: Any) -> Any:
    """Return what can be waited for; some operators return their tensors before it."""
    if isinstance(result, Tensor) or (isinstance(result, list) and all(isinstance(one, Tensor) for one in result)):
        return _Arriving(result)
    return result[-1] if isinstance(result, tuple) else result


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    """The ranks that a call is among."""
    if "group_name" in arguments:
        return _resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _without_memory(operator: Any, arguments: dict[str, Any]) -> Communication:
    bytes_of_arguments, dtypes = [], []
    for argument in arguments.values():
        tensors = [leaf for leaf in tree_flatten(argument)[0] if isinstance(leaf, Tensor)]
        bytes_of_arguments.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        dtypes += [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    leaves, structure = tree_flatten(arguments)
    arguments = tree_unflatten([_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    name = operator.name().partition("::")[2].partition(".")[0]
    ranks, most = _group(arguments).size(), max(bytes_of_arguments)
    if operator.namespace == _FUNCTIONAL and name.startswith("all_gather"):
        # It returns what the others are given.
        most *= ranks
    return Communication(name, most, next(iter(dtypes), "none"), ranks, operator, arguments)


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
