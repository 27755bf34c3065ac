"""Limits of what rounding may do to weights, gradients and losses, in each precision and on ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cs336sys.settings.training import Workload


@dataclass(frozen=True)
class Rounding:
    """The difference from exact arithmetic that rounding explains in a tensor."""

    relative: float  # Of its norm; of a weight, of the norm of how far steps move it.
    repeated: float  # Times how far one process is from itself where it rounds elsewhere.

    def allowed(self, size: float, repeated: float, power: int = 1) -> float:
        """Return the norm of a difference that rounding explains.

        Args:
            size: the norm of what is expected.
            repeated: the norm of the largest difference of one process from itself.
            power: 2 of squares, such as second moments, whose relative error is twice that of what is squared.
        """
        return power * self.relative * size + self.repeated * repeated


# How far a parameter may be from where it should be, relative to how far it should be moved (both Euclidean norms).
# bf16 rounds by up to 2^-8, fp16 and TF32 by 2^-11. Measured at size tiny: up to 9e-6 in fp32 (mostly because the
# weights themselves are rounded), 1e-3 in fp16 and 8e-3 in bf16. Wrong strategies were off by 0.2 to 3: one parameter
# left out, a sum instead of a mean, the gradients of the step before.
TOLERANCES = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}

# A parameter may be this many times as far from what one process trains as that is from itself, rounded elsewhere.
REPEATED = 4.0


def tolerance(workload: Workload, gradient_dtype: str = "fp32") -> float:
    """Return the largest relative difference of weights that rounding explains, for the precision of the workload.

    ``gradient_dtype`` is what ranks send gradients in.
    """
    precision = "tf32" if workload.tf32 and workload.precision == "fp32" else workload.precision
    dtypes = precision, "bf16" if workload.moment_bytes == 4 else "fp32", gradient_dtype  # 4: both in bf16.
    return max(TOLERANCES[dtype] for dtype in dtypes)


# In equal dtypes ranks may be this many times as far off as one process is from itself: of a few orders of summation
# the farthest is taken, and others may be some times farther. Below so many units in the last place none is told apart.
_REPEATED_IN_EQUAL_DTYPES = 16.0
_UNITS = 32.0

# One step's loss and gradients in a precision compared with fp32 arithmetic. On two H200, two blocks of the 8B model
# were off by less than 1e-6 and by 0.017; of a tiny model on the CPU by 5e-4 and 0.026.
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3}
GRADIENT_TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}

# Losses of one batch as a whole and as the mean of its shares differ by rounding alone, relatively, by the loss's
# dtype; what is computed in half precision before it differs by more. Farther apart, they are different sums.
MEAN_LOSS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# What rounding can do to all gradients together, relatively (bf16 weights: 1 to 4 % seen). More is another computation.
LARGEST_ROUNDING = 0.2

# Learning rates of comparisons: the first with which losses do not run away, which would repeat nothing.
LEARNING_RATES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


def stay_near(losses: Sequence[float]) -> bool:
    """Return whether losses are finite and do not run away from the first: grow by one and a half times its size."""
    return all(math.isfinite(loss) and loss <= losses[0] + 1.5 * abs(losses[0]) for loss in losses)


def rounding_in(dtype: torch.dtype, lower_dtype: torch.dtype | None) -> Rounding:
    """Return the rule for ranks and one process that compute in ``dtype``; ranks use ``lower_dtype`` in part."""
    if lower_dtype is not None:
        # One process was also run in it: how far that took it is the rule, and one unit is enough besides.
        return Rounding(torch.finfo(lower_dtype).eps, REPEATED)
    return Rounding(_UNITS * torch.finfo(dtype).eps, _REPEATED_IN_EQUAL_DTYPES)
