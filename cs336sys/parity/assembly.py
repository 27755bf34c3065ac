"""Puts together what ranks hold: whole tensors, slices along a dimension, or pieces of a flattened tensor."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Prefixes that wrappers put before the names of parameters.
_OF_WRAPPERS = {"module", "model", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def model_name(name: str, plain_names: Sequence[str]) -> str | None:
    """The name in the plain model of a parameter of the wrapped one; None if it is none of its."""
    if name in plain_names:
        return name
    cleaned = _without_wrappers(name)
    candidates = [plain for plain in plain_names if _without_wrappers(plain) == cleaned] or [
        plain for plain in plain_names if plain.endswith(f".{cleaned}") or cleaned.endswith(f".{plain}")
    ]
    return candidates[0] if len(candidates) == 1 else None


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def assemble(
    rank_tensors: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], groups: Sequence[Sequence[int]]
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """Whole tensors on every rank that has a part of them, and the names of those that do not fit together.

    Args:
        rank_tensors: slices or whole tensors of each rank, by name.
        shapes: of whole tensors.
        groups: ranks that may hold slices of one tensor, the smallest groups first.
    """
    whole: list[dict[str, Tensor]] = [{} for _ in rank_tensors]
    unknown = set()
    for name, shape in shapes.items():
        for rank, tensors in enumerate(rank_tensors):
            if name not in tensors:
                continue
            joined = tensors[name] if tensors[name].shape == shape else None
            for group in groups:
                if rank in group and joined is None:
                    joined = _join_slices([rank_tensors[other].get(name) for other in group], shape)
            if joined is None:
                unknown.add(name)
            else:
                whole[rank][name] = joined
    return whole, unknown


def _join_slices(parts: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    dimensions = {part.dim() for part in present if part.numel() or part.dim() > 1}
    if dimensions <= {1} and len(shape) != 1:
        flat = torch.cat([part.flatten() for part in present])
        # Flattened parameters are padded at the end.
        return flat[: shape.numel()].view(shape) if shape.numel() <= len(flat) < shape.numel() + len(parts) else None
    if any(part.dim() != len(shape) for part in present):
        return None
    for dimension in range(len(shape)):
        sizes = [size for number, size in enumerate(shape) if number != dimension]
        fits = all([size for n, size in enumerate(part.shape) if n != dimension] == sizes for part in present)
        if fits and sum(part.shape[dimension] for part in present) == shape[dimension]:
            return torch.cat(list(present), dimension)
    return None
