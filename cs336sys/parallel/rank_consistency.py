"""Compares modules and settings between ranks before they communicate: ranks that disagree hang or sum garbage."""

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import SENDABLE, Broadcasts, all_gather_single, gather_objects, group_device

# Tensors that are copied into a buffer before they are sent: one launch takes the CPU as long as many such copies.
_PACKED_ELEMENTS = 2**16


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
    digest_here = digest_of(lines).to(group_device())
    gathered = digest_here.new_empty(dist.get_world_size(group) * len(digest_here))
    all_gather_single(gathered, digest_here, group=group)
    if (gathered.view(-1, len(digest_here)) == digest_here).all():
        return
    first, *others = gather_objects(lines, group)
    for rank, lines in enumerate(others, start=1):
        for expected, line in itertools.zip_longest(first, lines, fillvalue="nothing"):
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
            # Others may not come back from pickle, and the other ranks would wait for ever.
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error = gather_objects(error, group)[0]
    if error is not None:
        raise error


def require_sendable(named: Iterable[tuple[str, torch.Tensor]], *, moves: bool = False) -> None:
    """Refuse parameters and buffers that no parallel class can make the same on all ranks.

    Args:
        moves: whether they get memory, or another device, before they are sent.

    Raises:
        UsageError: one is lazy, sparse, on the meta device, or on the CPU where NCCL sends it.
    """
    is_sent_by_gpu = not moves and group_device().type == "cuda"
    for name, tensor in named:
        if is_lazy(tensor):
            raise UsageError(f"{name} is lazy and has no shape yet: call the module once before wrapping it")
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} is sparse, which cannot be sent to other ranks: make it dense by to_dense()")
        if tensor.is_meta and not moves:
            raise UsageError(f"{name} is on the meta device and has no values: give it some, by to_empty() and a reset")
        if is_sent_by_gpu and tensor.device.type == "cpu":
            raise UsageError(f"{name} is on the CPU, and NCCL sends what is on a GPU: move the module to one first")


def describe_module(module: nn.Module, *, moves: bool = False) -> list[str]:
    """A line for each parameter and buffer: name, dtype, shape, strides, whether trained, and what it is tied to.

    Arguments and errors are those of :func:`require_sendable`.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers())
    require_sendable(itertools.chain(parameters, buffers), moves=moves)
    first_name: dict[int, str] = {}
    lines = []
    for name, parameter in parameters:
        first = first_name.setdefault(id(parameter), name)
        tie = f" tied to {first}" if first != name else ""
        lines.append(f"parameter {name} {describe_parameter(parameter)}{tie}")
    return lines + [f"buffer {name} {_describe_tensor(buffer)}" for name, buffer in buffers]


def describe_parameter(parameter: nn.Parameter) -> str:
    return f"{_describe_tensor(parameter)} {'trained' if parameter.requires_grad else 'frozen'}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    return _describe_layout(tensor.dtype, tensor.shape, tensor.stride())


# Models have thousands of tensors of few shapes.
@functools.lru_cache(1024)
def _describe_layout(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} strides {strides}"


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite each tensor with rank 0's. They must be laid out alike on every rank."""
    packed, unpacked = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:
        is_packed = tensor.dtype in SENDABLE and tensor.numel() <= _PACKED_ELEMENTS and tensor.is_contiguous()
        (packed if is_packed else unpacked).append(tensor)
    if packed:
        try:
            dist._broadcast_coalesced(group or dist.group.WORLD, packed, 8 * _PACKED_ELEMENTS, 0)  # type: ignore[arg-type]
        except RuntimeError as error:
            error.add_note("in the broadcast of start values")
            raise
    if unpacked:
        broadcasts = Broadcasts(unpacked, [0] * len(unpacked), "start values", group)
        broadcasts.start()
        broadcasts.wait()
