"""What samples can tell apart: medians with intervals, which assume no distribution of the noise if they can."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.results import Samples

# Above this part of its mean, a standard deviation says that something else was measured, too.
NOISY_PART = 0.2

# Two-sided; what an interval of 95 % leaves out.
_LEFT_OUT = 0.05
# For so few samples the range between least and greatest is too narrow an interval: their mean and so many standard
# errors, by Student's t.
_STUDENTS = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
# From here on the binomial distribution is as good as normal: ranks differ by less than one.
_MANY = 100


@dataclass(frozen=True)
class Interval:
    """An estimate and where the truth lies, in 95 of 100 cases.

    Attributes:
        neutral: the value that says "no difference", 0 or 1.
        is_range: it is shown as ``low to high``: the estimate says nothing.
        is_cost: it cannot be less than nothing: within the noise it is shown as ``< high``.
    """

    estimate: float
    low: float
    high: float
    neutral: float | None = None
    is_range: bool = False
    is_cost: bool = False

    @property
    def is_noise(self) -> bool:
        """No difference can be told."""
        return self.neutral is not None and self.low <= self.neutral <= self.high


def is_noisy(samples: Samples) -> bool:
    """Whether the samples vary by more than :data:`NOISY_PART` of their mean."""
    return len(samples.measured) > 1 and samples.std > NOISY_PART * abs(samples.mean)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The k-th least and the k-th greatest value, of which 95 of 100 pairs have the true median between them.

    (Order statistics: Conover, Practical Nonparametric Statistics, 3.2.) Five values or fewer are taken to be normally
    distributed; of one, nothing is known.
    """
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    if count in _STUDENTS:
        middle, reach = statistics.median(values), _STUDENTS[count] * statistics.stdev(values) / math.sqrt(count)
        return middle - reach, middle + reach
    rank = 1
    if count > _MANY:
        deviations = statistics.NormalDist().inv_cdf(1 - _LEFT_OUT / 2)
        rank = math.floor((count - deviations * math.sqrt(count)) / 2)
    else:
        # P(no more than k of n values lie below the median) = sum of C(n, i) / 2^n for i <= k
        below = 1 / 2**count
        while 2 * (below := below + math.comb(count, rank) / 2**count) <= _LEFT_OUT:
            rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def difference(a: Samples, b: Samples) -> Interval:
    """Median of ``a`` less median of ``b``, in their unit."""
    return _difference(a.measured, b.measured)


def ratio(a: Samples, b: Samples) -> Interval:
    """Median of ``a`` over median of ``b``; both are positive. Of the same samples it is 1, whatever their noise."""
    if a is b:
        return Interval(1.0, 1.0, 1.0)
    logarithms = _difference([math.log(value) for value in a.measured], [math.log(value) for value in b.measured])
    return Interval(a.median / b.median, math.exp(logarithms.low), math.exp(logarithms.high), neutral=1.0)


def ratio_of_pairs(a: Samples, b: Samples) -> Interval:
    """Median of the ratios of samples that were taken in turn; what one has more is left out."""
    ratios = [first / second for first, second in zip(a.measured, b.measured, strict=False)]
    return Interval(statistics.median(ratios), *median_interval(ratios), neutral=1.0)


def _difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    middle_a, middle_b = statistics.median(a), statistics.median(b)
    (low_a, high_a), (low_b, high_b) = median_interval(a), median_interval(b)
    estimate = middle_a - middle_b
    # Independent errors add in squares (Zou and Donner 2008, "MOVER"):
    low = estimate - math.hypot(middle_a - low_a, high_b - middle_b)
    high = estimate + math.hypot(high_a - middle_a, middle_b - low_b)
    return Interval(estimate, low, high, neutral=0.0)
