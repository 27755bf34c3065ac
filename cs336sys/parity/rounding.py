"""How much rounding may do to weights and gradients, in each precision."""

from dataclasses import dataclass

from cs336sys.workload import Workload


@dataclass(frozen=True)
class Rounding:
    """How far rounding may take a tensor.

    Attributes:
        relative: of its norm; of a weight, of the norm of how far steps move it.
        repeated: times how far one process is from itself where it rounds elsewhere.
    """

    relative: float
    repeated: float

    def allowed(self, size: float, repeated: float, power: int = 1) -> float:
        """The norm of a difference that rounding explains.

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


def tolerance(workload: Workload) -> float:
    """The largest relative difference of weights that rounding explains, for the precision of the workload."""
    precision = "tf32" if workload.tf32 and workload.precision == "fp32" else workload.precision
    return max(TOLERANCES[precision], TOLERANCES["bf16" if workload.state_dtype == "bf16" else "fp32"])


def rounding_within(relative: float) -> Rounding:
    """Return the rule for training in a precision, whose :func:`tolerance` this is."""
    return Rounding(relative, REPEATED)
