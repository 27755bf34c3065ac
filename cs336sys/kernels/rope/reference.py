"""The ground truth of the rotations."""

import torch


def reference_rope(x: torch.Tensor, positions: torch.Tensor | None = None, *, theta: float = 10_000.0) -> torch.Tensor:
    """:func:`~cs336sys.kernels.rope.rope` in PyTorch, with angles in float64: the ground truth of the tests."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    frequencies = theta ** -(torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float64) / x.shape[-1])
    angles = positions[..., None].double() * frequencies
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    x1, x2 = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).to(x.dtype)
