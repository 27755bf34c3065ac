"""Compares a module between ranks before they communicate: without it, ranks that disagree hang or add up garbage."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import all_gather_single, gather_objects, group_device


def require_same_module(module: nn.Module, settings: str) -> None:
    """Compare names, shapes, strides, dtypes and ``requires_grad`` of all parameters and buffers between ranks.

    Args:
        settings: what else must be the same on every rank.

    Raises:
        UsageError: on every rank, naming the first difference.
    """
    require_same_lines([settings, *describe_module(module)])


@contextlib.contextmanager
def same_on_every_rank() -> Iterator[list[str]]:
    """What each rank does for itself in this context, all have done the same, or every rank raises.

    Yields:
        a list, empty at first: the context adds the lines that must be the same on every rank.

    Raises:
        Exception: the context's, if all ranks raised the same.
        UsageError: on every rank, naming the first difference, if lines differ or only some ranks raised.
    """
    lines: list[str] = []
    try:
        yield lines
    except Exception as error:
        require_same_lines([f"{type(error).__name__}: {error}"])
        raise
    require_same_lines(lines)


def require_same_lines(lines: Sequence[str]) -> None:
    """Compare some lines of text between ranks.

    One small all-gather of hashes; only if they differ are the lines themselves exchanged.

    Raises:
        UsageError: on every rank, naming the first difference.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(group_device())
    gathered = own.new_empty(dist.get_world_size() * len(digest))
    all_gather_single(gathered, own)
    if (gathered.view(-1, len(digest)) == own).all():
        return
    first, *others = gather_objects(lines)
    for rank, lines in enumerate(others, start=1):
        for expected, found in itertools.zip_longest(first, lines, fillvalue="nothing"):
            if expected != found:
                raise UsageError(f"ranks differ in what they train: {expected} on rank 0, {found} on rank {rank}")


def describe_module(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer: name, dtype, shape, strides, whether it is trained, what it is tied to."""
    first_name: dict[nn.Parameter, str] = {}
    lines = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(parameter, name)
        tie = f" tied to {first}" if first != name else ""
        lines.append(f"parameter {name} {describe_parameter(parameter)}{tie}")
    return lines + [f"buffer {name} {describe_tensor(buffer)}" for name, buffer in module.named_buffers()]


def describe_parameter(parameter: nn.Parameter) -> str:
    return f"{describe_tensor(parameter)} {'trained' if parameter.requires_grad else 'frozen'}"


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype, shape and strides in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} strides {tensor.stride()}"
