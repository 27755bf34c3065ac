"""The ground truth of rms_norm."""

import torch


def reference_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch, for any dtypes, half precision in float32: the ground truth of the tests."""
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    y = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(total.dtype)
    return y if residual is None else (y, total)
