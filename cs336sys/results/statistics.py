"""Noise in differences: of two series of runs, and of medians in a table. Plain data, no torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean, variance
from typing import Literal

from cs336sys.results.model import Samples

# Student's t with any number of degrees of freedom: its tail and quantiles. Standard library only.


# A continued fraction adds about as many digits with every term, here and in _quantile's steps.
_PRECISION = 1e-15
_TERMS = 10_000
_STEPS = 200

# From here on the difference of two logarithms of Gamma has lost digits that its series has.
_LARGE = 50.0


def upper_tail(degrees: float, t: float) -> float:
    """The probability of more than ``t``, which is not negative.

    ``I_x(degrees / 2, 1 / 2) / 2`` with ``x = degrees / (degrees + t^2)``: the regularized incomplete beta function
    (Abramowitz and Stegun 26.5.27, 26.7.1).
    """
    if t == 0:
        return 0.5
    a, square = degrees / 2, t * t
    front = math.exp(
        -a * math.log1p(square / degrees) + 0.5 * (math.log(square) - math.log(degrees + square)) - _log_beta(a)
    )
    x = degrees / (degrees + square)
    if x < (a + 1) / (a + 2.5):
        return front * _continued_fraction(a, 0.5, x) / a / 2
    return (1 - front * _continued_fraction(0.5, a, square / (degrees + square)) / 0.5) / 2


def quantile(degrees: float, probability: float) -> float:
    """Return the quantile of a probability from a half to less than 1: Newton's steps, kept between."""
    wanted = 1 - probability
    if wanted >= 0.5:
        return 0.0
    low, high = 0.0, max(1.0, NormalDist().inv_cdf(probability))
    while upper_tail(degrees, high) > wanted:
        low, high = high, 2 * high
    t = high
    for _ in range(_STEPS):
        excess = upper_tail(degrees, t) - wanted
        low, high = (t, high) if excess > 0 else (low, t)
        step = t + excess / _density(degrees, t)
        if not low < step < high:
            step = (low + high) / 2
        if abs(step - t) <= _PRECISION * t:
            break
        t = step
    return t


def _density(degrees: float, t: float) -> float:
    a = degrees / 2
    return math.exp(-(a + 0.5) * math.log1p(t * t / degrees) - 0.5 * math.log(degrees) - _log_beta(a))


def _log_beta(a: float) -> float:
    """Return ``log B(a, 1 / 2)``."""
    if a < _LARGE:
        return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    # lgamma(a + 1/2) - lgamma(a), from Stirling's series.
    difference = 0.5 * math.log(a) - 1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5) + 17 / (14336 * a**7)
    return math.lgamma(0.5) - difference


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the incomplete beta function's continued fraction (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value


# By how much do the means of two series differ, and is that more than noise: one statistic for both.


# Of 5 samples in a row one number says how slowly they drift; fewer say nothing of their noise.
FEW_SAMPLES = 5

# What the mean of equal numbers may be off by: without noise, as of memory, every larger difference is significant.
ROUNDING = 1e-12

# What is drawn independently: whole runs, rounds of one run, or nothing larger than samples that follow one another.
Level = Literal["runs", "rounds", "samples"]

# One side: its runs, of each its rounds, of each the samples in the order in which they were taken.
Side = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Difference:
    """The difference of B's mean from A's.

    Attributes:
        level: of what the differences were taken as noise.
        ratio: of the means, B / A; None unless both are positive.
        ratio_low, ratio_high: its confidence interval. It holds 1 where ``p_value`` is not significant, and not else.
        p_value: of the hypothesis that the means are equal, two-sided. None, as the interval is, with fewer than
            :data:`FEW_SAMPLES` samples on a side and nothing but samples to tell the noise by.
    """

    level: Level
    mean_a: float
    mean_b: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    p_value: float | None


def mean_difference(a: Side, b: Side, *, confidence_percent: float = 95.0) -> Difference:
    """Compare two sides, whose samples are finite.

    Where a side has several runs, the noise is what their means differ by; else, where one has several rounds, what
    theirs do (:func:`_of_units`); else how slowly the samples of a series drift (:func:`_of_samples`). The noise of a
    single run or round is supposed to be that of the other side, in percent. The logarithm of the ratio of the means
    over its standard error is compared with Student's t, with the degrees of freedom of Welch (1947).
    """
    level = _level(a, b)
    of_a, of_b = _estimate(a, level), _estimate(b, level)
    ratio = of_b.mean / of_a.mean if of_a.mean > 0 and of_b.mean > 0 else None
    if level == "samples" and min(of_a.count, of_b.count) < FEW_SAMPLES:
        return Difference(level, of_a.mean, of_b.mean, ratio, None, None, None)
    if ratio is None:
        distance = of_b.mean - of_a.mean
        error, degrees = _error(of_a, of_b)
    else:
        distance = math.log(ratio)
        error, degrees = _error(of_a.of_logarithm(), of_b.of_logarithm())
    if error > ROUNDING:
        p_value = 2 * upper_tail(degrees, abs(distance) / error)
    else:
        p_value = 0.0 if abs(distance) > ROUNDING else 1.0
    if ratio is None:
        return Difference(level, of_a.mean, of_b.mean, None, None, None, p_value)
    reach = math.exp(quantile(degrees, 0.5 + confidence_percent / 200) * error)
    return Difference(level, of_a.mean, of_b.mean, ratio, ratio / reach, ratio * reach, p_value)


def autocorrelation(side: Side) -> float | None:
    """Correlate samples with the one before in the same round, -1 to 1; None with fewer than 8 samples a round.

    The estimate from a short series is too low by about ``(1 + 4 rho) / n`` (Marriott and Pope 1954), which is added.
    """
    rounds = [samples for run in side for samples in run]
    length = min(map(len, rounds))
    if length < 8:
        return None
    means = map(fmean, rounds)
    centred = [[value - mean for value in samples] for samples, mean in zip(rounds, means, strict=True)]
    squares = sum(value * value for values in centred for value in values)
    if squares == 0:
        return None
    products = sum(before * after for values in centred for before, after in pairwise(values))
    return max(-1.0, min(1.0, (products / squares + 1 / length) / (1 - 4 / length)))


@dataclass(frozen=True)
class _Estimate:
    """The mean of ``count`` runs, rounds or samples, the variance of that mean, and its degrees of freedom."""

    mean: float
    count: int
    variance: float
    degrees: int

    def of_logarithm(self) -> "_Estimate":
        return replace(self, variance=self.variance / self.mean**2)


def _level(a: Side, b: Side) -> Level:
    if max(len(a), len(b)) > 1:
        return "runs"
    return "rounds" if max(len(a[0]), len(b[0])) > 1 else "samples"


def _estimate(side: Side, level: Level) -> _Estimate:
    if level == "samples":
        return _of_samples(side[0][0])
    units = [[value for samples in run for value in samples] for run in side] if level == "runs" else side[0]
    return _of_units([fmean(unit) for unit in units])


def _of_units(means: Sequence[float]) -> _Estimate:
    """Estimate noise from runs or rounds, which are independent: the variance of their mean is ``s^2 / n``."""
    count = len(means)
    return _Estimate(fmean(means), count, variance(means) / count if count > 1 else math.nan, count - 1)


def _of_samples(samples: Sequence[float]) -> _Estimate:
    """Estimate noise from consecutive samples, which may resemble those before them: how slowly they drift.

    The variance of their mean is their spectral density at frequency 0, over ``n``. The mean square of the slowest
    cosines of the series estimates it, with as many degrees of freedom as there are cosines, exactly if the samples are
    normal and independent: the equal-weighted cosine estimator, with ``0.4 n^(2/3)`` of them (Lazarus, Lewis, Stock and
    Watson 2018, "HAR Inference: Recommendations for Practice"). It was chosen by simulation. Two sides of 10, 20, 50
    samples with 2 % noise and an autocorrelation of 0.6 are called different in 8, 8, 7 % of comparisons, and in 3, 4,
    5 % where it is 0. Means of blocks do so in 9, 9, 7 %, samples taken for independent in 33 %. An estimated
    autocorrelation does so in 4 %, and finds a difference of 5 % from 10 samples in 27 % instead of 73 %. Trimmed means
    would not mind spikes, but say nothing of what makes one step in ten slow, which training pays for.
    """
    import numpy

    count, mean = len(samples), fmean(samples)
    degrees = max(1, round(0.4 * count ** (2 / 3)))
    # The sums of value * cos(pi * waves * (index + 1/2) / count) for waves = 0, 1, ... are a cosine transform, which is
    # the Fourier transform of the even places and then the odd ones backwards (Makhoul 1980). Summed one by one, those
    # of 200,000 samples took 20 s.
    values = numpy.asarray(samples, dtype=float) - mean
    transformed = numpy.fft.fft(numpy.concatenate((values[::2], values[1::2][::-1])))[1 : degrees + 1]
    turned = transformed * numpy.exp(-0.5j * math.pi / count * numpy.arange(1, len(transformed) + 1))
    drift = float((turned.real**2).sum())
    return _Estimate(mean, count, 2 / count * drift / degrees / count, degrees)


def _error(a: _Estimate, b: _Estimate) -> tuple[float, float]:
    """The standard error of a difference, and its degrees of freedom."""
    if a.degrees == 0:
        return math.sqrt(b.variance * b.count * (1 + 1 / b.count)), b.degrees
    if b.degrees == 0:
        return _error(b, a)
    total = a.variance + b.variance
    if total == 0:
        return 0.0, 1
    return math.sqrt(total), total**2 / (a.variance**2 / a.degrees + b.variance**2 / b.degrees)


# What samples can tell apart: medians with intervals, which assume no distribution of the noise if they can.


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
    """Return whether the samples vary by more than :data:`NOISY_PART` of their mean."""
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
