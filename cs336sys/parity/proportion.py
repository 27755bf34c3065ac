"""Tests of proportion between tensors, and of equal coefficients."""

import torch
from torch import Tensor

from cs336sys.parity.weights import norm

EXPLAINED = 1e-3  # Parts explain a gradient whose rest is smaller than this, relatively.
RELATIVE_TOLERANCE = 2e-2  # So near, coefficients are equal.


def scale_factor(actual: Tensor, expected: Tensor, tolerance: float = EXPLAINED) -> float | None:
    """Return the factor from ``expected``; None if they are not in proportion but for a relative ``tolerance``."""
    size = norm(expected)
    if not size or actual.shape != expected.shape or not torch.isfinite(actual).all():
        return None
    # The factor of least squares. A tensor of zeros has none.
    ratio = float((actual.double() * expected.double()).sum()) / size**2
    return ratio if norm(actual.double() - ratio * expected.double()) <= tolerance * size and ratio else None


def is_near(value: float, other: float) -> bool:
    """Return whether a coefficient is equal to another but for :data:`RELATIVE_TOLERANCE`."""
    return abs(value - other) <= RELATIVE_TOLERANCE * abs(other)
