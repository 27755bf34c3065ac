"""Check that two ways of training the same model end at the same weights, or at weights or gradients in proportion."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336sys.parity.rounding import REPEATED, Rounding

STEPS = 5

# AdamW divides a gradient by its own size, which hides a sum where a mean should be, and turns the rounding error of a
# gradient that should be 0 into a full step. With this eps its steps are proportional to the gradients: the whole
# optimizer is in use, and weights differ by as much as gradients do.
OPTIMIZER_SETTINGS = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}


@dataclass(frozen=True)
class WeightDifference:
    """Distance of weights from those expected after some steps, or of gradients before the first."""

    largest: float  # The largest absolute difference of all values.
    # Of all parameters, the largest ratio of the difference's norm to the norm of how far it was moved, or of its
    # gradient; those aside whose difference the rounding of one process explains.
    relative: float
    parameter: str  # Which one that is.
    num_layers: int  # Of the model that was compared; fewer than the workload's where that does not fit into memory.
    allowed: float = 0.0  # How large ``relative`` may be, of this parameter.
    of_gradients: bool = False
    notes: tuple[str, ...] = ()  # Sentences on what was compared otherwise than usually.
    reason: str = ""  # Why nothing could be compared.


@dataclass(frozen=True)
class Distance:
    """Distance of one parameter, or its gradient, from the expected one."""

    largest: float  # The largest absolute difference of its elements; NaN where one is no number.
    off: float  # Norm of the difference.
    moved: float  # Norm of how far it should be moved, or of its gradient.

    @property
    def relative(self) -> float:
        # A parameter that no step moves must not be moved by the other way either.
        return relative_difference(self.off, self.moved)


def relative_difference(off: float, size: float) -> float:
    """Return the ratio of two norms: 0 of no difference, else infinite for a size of 0, and infinite for NaN."""
    if off == 0:
        return 0.0
    relative = off / size if size else math.inf
    return math.inf if math.isnan(relative) else relative


def norm(values: Tensor) -> float:
    """Return the Euclidean norm, in float64: the squares of a gradient of 1e-25 are zero in float32."""
    values = values if values.is_floating_point() else values.double()
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


class TensorComparison:
    """Tensors compared with those of a reference; the ones too far off wait in host memory for another reference.

    Args:
        start, expected, trained: by name, each on the device of ``trained``; what one of them lacks is 0 there.
        allowed: the largest relative distance that rounding explains.

    Attributes:
        distances: of all, by name.
        far: of those farther off than ``allowed``: trained and expected.
    """

    def __init__(
        self, start: Mapping[str, Tensor], expected: Mapping[str, Tensor], trained: Mapping[str, Tensor], allowed: float
    ):
        names = list({**expected, **trained})
        pairs, measured = {}, []
        with torch.no_grad():
            for name in names:
                values = trained[name] if name in trained else torch.zeros_like(expected[name])
                zero = values.new_zeros(())
                pairs[name] = values, expected.get(name, zero)
                target = pairs[name][1].to(values.device)
                off, moved = values - target, target - start.get(name, zero).to(values.device)
                # As in norm(), but without waiting for the device.
                norms = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in (off, moved))
                largest = off.abs().max().double() if off.numel() else off.new_zeros((), dtype=torch.float64)
                measured.append(torch.stack([largest, *norms]))
        # One transfer for all.
        rows = torch.stack([row.to(measured[0].device) for row in measured]).tolist() if measured else []
        self.distances = {name: Distance(*row) for name, row in zip(names, rows, strict=True)}
        self.far = {
            name: tuple(tensor.detach().to("cpu", copy=True) for tensor in pairs[name])
            for name, distance in self.distances.items()
            if not distance.relative <= allowed
        }
        self._rounding = Rounding(allowed, REPEATED)

    def explained(self, others_of: Callable[[str], Iterable[Tensor]]) -> list[str]:
        """List the names of those far off by no more than the reference is from itself, rounded elsewhere.

        A gradient that is zero but for rounding, as a key's bias has, differs each time, and Adam makes a step of it.
        ``others_of`` gives the same weight or gradient of the reference, in other orders or with the loss scaled.
        """
        explained = []
        for name, (trained, expected) in self.far.items():
            distance, repeated = self.distances[name], 0.0
            nearest = distance.off  # Of the reference in any order.
            for other in others_of(name) if math.isfinite(distance.off) else ():
                repeated = max(repeated, norm(other - expected))
                nearest = min(nearest, norm(other - trained))
            if math.isfinite(nearest) and nearest <= self._rounding.allowed(distance.moved, repeated):
                explained.append(name)
        return explained

    def farthest(self, num_layers: int, explained: Collection[str] = ()) -> WeightDifference:
        """Return the difference of the parameter that is farthest off, those ``explained`` aside."""
        remaining = {name: distance for name, distance in self.distances.items() if name not in explained}
        if not remaining:
            return WeightDifference(largest=0.0, relative=0.0, parameter="", num_layers=num_layers)
        worst = max(remaining, key=lambda name: remaining[name].relative)
        # A weight that is NaN is farther off than any other.
        largest = max((distance.largest for distance in remaining.values()), key=lambda off: (math.isnan(off), off))
        return WeightDifference(largest, remaining[worst].relative, worst, num_layers)


def rounding_note(names: Sequence[str], count: int, allowed: float) -> str:
    """Say which of ``count`` parameters are left out as :meth:`TensorComparison.explained`."""
    named = ", ".join(names[:3]) + (", ..." if names[3:] else "")
    return (
        f"{len(names)} of {count} parameters ({named}) are off by more than {100 * allowed:g} %, as those of one "
        "process are that rounds elsewhere"
    )


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
