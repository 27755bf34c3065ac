"""Puts together what ranks hold: whole tensors, slices along a dimension, or pieces of a flattened tensor."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Names of modules that wrappers put into the names of parameters.
_WRAPPERS = {"module", "model", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def model_name(name: str, plain_names: Sequence[str]) -> str | None:
    """Return the name in the plain model of a parameter of the wrapped one; None if that is not clear."""
    if name in plain_names:
        return name
    cleaned = _without_wrappers(name)
    # If no name is the same, a part of the model was wrapped, or the model is a part of the wrapped module.
    candidates = [plain for plain in plain_names if _without_wrappers(plain) == cleaned] or [
        plain for plain in plain_names if plain.endswith(f".{cleaned}") or cleaned.endswith(f".{plain}")
    ]
    return candidates[0] if len(candidates) == 1 else None


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def assemble(
    rank_tensors: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], groups: Sequence[Sequence[int]]
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """Return, for each rank, whole tensors of which it has a part, and the names of those that do not fit together.

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
    """Join flat pieces, or slices along one dimension, in the order of ranks; None if they do not make ``shape``."""
    present = [part for part in parts if part is not None]
    # A rank without any rows may have an empty tensor of one dimension, whatever dimensions the whole has.
    dimensions = {part.dim() for part in present if part.numel() or part.dim() > 1}
    if dimensions <= {1} and len(shape) != 1:
        flat = torch.cat([part.flatten() for part in present])
        # Flattened parameters are padded at the end until ranks have equal pieces: by fewer elements than ranks.
        return flat[: shape.numel()].view(shape) if shape.numel() <= len(flat) < shape.numel() + len(parts) else None
    if any(part.dim() != len(shape) for part in present):
        return None
    for dimension in range(len(shape)):
        total = sum(part.shape[dimension] for part in present)
        # Slices along this dimension have the whole's sizes in all others.
        if all((*part.shape[:dimension], total, *part.shape[dimension + 1 :]) == shape for part in present):
            return torch.cat(present, dimension)
    return None
