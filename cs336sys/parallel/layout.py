"""Compares a module between ranks before they communicate: without it, ranks that disagree hang or add up garbage."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import all_gather_single, gather_objects, group_device


def require_same_layout(module: nn.Module, settings: str) -> None:
    """Compare names, shapes, strides, dtypes and ``requires_grad`` of all parameters and buffers between ranks.

    One small all-gather of hashes; only if they differ are the layouts themselves exchanged.

    Args:
        settings: what else must be the same on every rank.

    Raises:
        UsageError: on every rank, naming the first difference.
    """
    lines = [settings, *_layout(module)]
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


def _layout(module: nn.Module) -> list[str]:
    first_name: dict[nn.Parameter, str] = {}
    lines = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state = "trained" if parameter.requires_grad else "frozen"
        first = first_name.setdefault(parameter, name)
        tie = f" tied to {first}" if first != name else ""
        lines.append(f"parameter {name} {_tensor_layout(parameter)} {state}{tie}")
    return lines + [f"buffer {name} {_tensor_layout(buffer)}" for name, buffer in module.named_buffers()]


def _tensor_layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} strides {tensor.stride()}"
