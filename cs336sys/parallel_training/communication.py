"""What a training step communicates: recorded by call, and run again without the step around it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Memory:
    """A tensor of a recorded call, without its memory."""

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
        name: of torch's operator: ``allreduce_``, ``_allgather_base_``, ...
        bytes: of the whole array as nccl-tests counts: of an all-gather its output, of a reduce-scatter its input.
        dtype: of what is sent.
    """

    name: str
    bytes: int
    dtype: str
    _operator: Callable[..., Any]
    _arguments: tuple[Any, ...]
    _settings: dict[str, Any]

    @property
    def is_flags(self) -> bool:
        """Whether ranks tell each other a few facts (see ``parallel.collectives.AnyRank``) and no numbers."""
        # Fully sharded models gather weights as bytes.
        return self.dtype in ("uint8", "bool") and self.name.startswith("allreduce")

    def sent_bytes(self, world_size: int) -> float:
        """What a rank sends, on average, where ranks form a ring: an all-reduce sends everything twice."""
        times = 2 if self.name.startswith("allreduce") else 1
        return times * (world_size - 1) / world_size * self.bytes

    def launcher(self, memory: dict[Any, Tensor] | None = None) -> Callable[[], Any]:
        """Launches the same collective on zeros; returns what can be waited for.

        Args:
            memory: tensors of other launchers, used again where they fit; it grows by new ones. None shares none.
        """
        memory = {} if memory is None else memory
        leaves, structure = tree_flatten((self._arguments, self._settings))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _Memory):
                if (place, leaf) not in memory:
                    memory[place, leaf] = leaf.allocate()
                leaves[place] = memory[place, leaf]
        arguments, settings = tree_unflatten(leaves, structure)

        def launch() -> Any:
            result = self._operator(*arguments, **settings)
            return result[-1] if isinstance(result, tuple) else result

        return launch


class _Recorder(TorchDispatchMode):
    """Sees every collective that goes through torch's dispatcher, those of the C++ reducer of torch's DDP too."""

    def __init__(self) -> None:
        super().__init__()
        self.communications: list[Communication] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else code compiled before would run uncompiled.
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if operator.namespace == "c10d":
            self.communications.append(_without_memory(operator, args, kwargs))
        return operator(*args, **kwargs)


@contextmanager
def recorded_communication() -> Iterator[list[Communication]]:
    """Within this ``with``, the list grows by every collective that this process launches, in order."""
    with _Recorder() as recorder:
        yield recorder.communications


def run_alone(launchers: Sequence[Callable[[], Any]]) -> None:
    """Launch all one after another, then wait for all: on a GPU, let the current stream wait."""
    for work in [launch() for launch in launchers]:
        work.wait()


def _without_memory(operator: Any, args: tuple, kwargs: dict) -> Communication:
    bytes_of_arguments, dtypes = [], []
    for argument in (*args, *kwargs.values()):
        tensors = [leaf for leaf in tree_flatten(argument)[0] if isinstance(leaf, Tensor)]
        bytes_of_arguments.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        dtypes += [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    leaves, structure = tree_flatten((args, kwargs))
    leaves = [_memory(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    arguments, settings = tree_unflatten(leaves, structure)
    name = operator.name().removeprefix("c10d::").partition(".")[0]
    return Communication(name, max(bytes_of_arguments), next(iter(dtypes), "none"), operator, arguments, settings)


def _memory(tensor: Tensor) -> _Memory:
    return _Memory(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
