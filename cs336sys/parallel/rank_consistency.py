"""Compares modules and settings between ranks before they communicate: ranks that disagree hang or sum garbage."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import Broadcasts, gather_numbers, gather_objects, group_device


@contextlib.contextmanager
def same_on_every_rank(group: dist.ProcessGroup | None = None) -> Iterator[list[str]]:
    """After this context either all ranks have done the same thing in it, or every rank raises.

    Args:
        group: the ranks; None is all of them, here and below.

    Yields:
        an empty list, to which the body adds lines that must be the same on every rank.

    Raises:
        Exception: the body's, if all ranks raised the same.
        UsageError: on every rank, naming the first difference, if lines differ or only some ranks raised.
    """
    lines: list[str] = []
    try:
        yield lines
    except Exception as error:
        require_same_lines([f"{type(error).__name__}: {error}"], group)
        raise
    require_same_lines(lines, group)


def require_same_lines(lines: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
    """Require that some lines of text are the same on every rank.

    This takes one small all-gather of hashes; the lines themselves are exchanged only if those differ.

    Raises:
        UsageError: on every rank, naming the first difference.
    """
    digest = digest_of(lines)
    if (gather_numbers(digest, group) == digest).all():
        return
    first, *others = gather_objects(lines, group)
    for rank, lines_there in enumerate(others, start=1):
        for expected, line in itertools.zip_longest(first, lines_there, fillvalue="nothing"):
            if expected != line:
                raise UsageError(f"ranks differ in what they train: {expected} on rank 0, {line} on rank {rank}")


def digest_of(lines: Sequence[str]) -> torch.Tensor:
    """Return a digest of lines of text, (4,), int64, on the CPU."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


def on_first_rank(action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run ``action`` on rank 0 of the group while the others wait; if it fails, every rank raises its error."""
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            action()
        except (OSError, UsageError) as raised:
            error = raised
        except Exception as raised:
            # Errors of other types may not come back from pickle, and the other ranks would wait for ever.
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error = gather_objects(error, group)[0]
    if error is not None:
        raise error


def require_sendable(named_tensors: Iterable[tuple[str, torch.Tensor]], *, moves: bool = False) -> None:
    """Refuse parameters and buffers that no parallel class can make the same on all ranks.

    Args:
        moves: whether they get memory, or another device, before they are sent.

    Raises:
        UsageError: one is lazy, sparse, on the meta device, or on the CPU where NCCL sends it.
    """
    is_sent_by_gpu = not moves and group_device().type == "cuda"
    for name, tensor in named_tensors:
        if is_lazy(tensor):
            raise UsageError(f"{name} is lazy and has no shape yet: call the module once before wrapping it")
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} is sparse, which cannot be sent to other ranks: make it dense by to_dense()")
        if tensor.is_meta and not moves:
            raise UsageError(f"{name} is on the meta device and has no values: give it some, by to_empty() and a reset")
        if is_sent_by_gpu and tensor.device.type == "cpu":
            raise UsageError(f"{name} is on the CPU, and NCCL sends what is on a GPU: move the module to one first")


def describe_module(module: nn.Module, *, moves: bool = False) -> list[str]:
    """Return a line for each parameter and buffer: name, dtype, shape, strides, whether trained, what it is tied to.

    Arguments and errors are those of :func:`require_sendable`.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers())
    require_sendable(itertools.chain(parameters, buffers), moves=moves)
    ties = ties_of(parameters)
    lines = [
        f"parameter {name} {describe_parameter(parameter)}" + (f" tied to {ties[name]}" if name in ties else "")
        for name, parameter in parameters
    ]
    return lines + [f"buffer {name} {_describe_tensor(buffer)}" for name, buffer in buffers]


def ties_of(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return the further names of tied parameters, and for each the first name of the same parameter."""
    first_names: dict[int, str] = {}
    pairs = ((name, first_names.setdefault(id(parameter), name)) for name, parameter in named_parameters)
    return {name: first for name, first in pairs if name != first}


def describe_parameter(parameter: nn.Parameter) -> str:
    return f"{_describe_tensor(parameter)} {'trained' if parameter.requires_grad else 'frozen'}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} strides {tensor.stride()}"


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite each tensor with rank 0's. They must be laid out alike on every rank."""
    not_empty = [tensor for tensor in tensors if tensor.numel()]
    if not_empty:
        broadcasts = Broadcasts(not_empty, [0] * len(not_empty), "start values", group)
        broadcasts.start()
        broadcasts.wait()
