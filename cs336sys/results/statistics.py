"""One notion of noise for tables, write-ups and ``compare``: Wilcoxon's tests. Plain data, no torch.

Two series differ where the ranks of their samples say so: the rank-sum test, exact for few samples, with the interval
of the shift that belongs to it (Hodges and Lehmann 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical
Methods, 4.1 to 4.3). Samples that resemble those before them count for fewer. docs/decisions/statistics.md says why.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean
from typing import Literal

from cs336sys.results.model import Samples

NOISY_PART = 0.2  # A standard deviation above this part of the mean says that something else was measured, too.

SIGNIFICANCE = 0.05  # What tables and write-ups allow: one in twenty equal pairs is called different.

# Two sides are called the same where their ratio differs from 1 by no more than this, at either end of its interval.
SAME_PERCENT = 5.0

ROUNDING = 1e-12  # Equal numbers may differ by so much after arithmetic, as a part of them.

# Samples of a round that are the fewest for an autocorrelation: four differ only where they do not overlap at all.
_FEWEST_FOR_DRIFT = 5
_LARGEST_DRIFT = 0.95  # The largest autocorrelation that is believed.

_FEWEST_PAIRS = 6  # Fewer pairs cannot differ significantly at 5 %.

_MOST_EXACT = 20  # With more independent samples a normal distribution replaces the exact one.

_QUANTILES = 200  # A longer series is represented by so many evenly spaced quantiles.

# What is drawn independently: whole runs, rounds of one run, or nothing larger than samples that follow one another.
Level = Literal["runs", "rounds", "samples"]

# The ends of an interval, and p of no difference, which is None where samples drift too much for a test.
_Limits = tuple[float, float, float | None]

# One side: its runs, of each its rounds, of each the samples in the order in which they were taken.
SideSamples = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Interval:
    """An estimate and where the truth lies, in 95 of 100 cases.

    Both ends are infinitely far apart (a ratio's: 0 and infinity) where there are too few samples to say anything.
    """

    estimate: float
    low: float
    high: float
    neutral: float | None = None  # The value that says "no difference", 0 or 1; a ratio's is 1.
    is_range: bool = False  # It is shown as "low to high": the estimate says nothing.
    is_cost: bool = False  # It cannot be less than nothing: within the noise it is shown as "< high".
    is_bound: bool = False  # Samples drift too much for a test: no difference of two of them is beyond both ends.
    to_decide: int | None = None  # About how many samples a side would decide a ratio that is undecided.

    @property
    def is_noise(self) -> bool:
        """Return whether the interval contains "no difference"."""
        return self.neutral is not None and self.low <= self.neutral <= self.high

    @property
    def is_ratio(self) -> bool:
        return self.neutral == 1

    @property
    def is_undecided(self) -> bool:
        """Return whether samples show neither a difference nor that a ratio is within :data:`SAME_PERCENT` of 1."""
        is_wide = self.is_ratio and self.is_noise and same_within_percent(self.low, self.high) > SAME_PERCENT
        return is_wide or not math.isfinite(self.high)


@dataclass(frozen=True)
class Difference:
    """Difference of B from A.

    Attributes:
        level: what was counted as one independent sample; of a run or a round its median.
        median_a, median_b: medians of the independent samples.
        ratio: of the medians, B / A; None unless all samples are positive.
        independent: how many independent samples each side is worth.
        ratio_low, ratio_high: the ratio's confidence interval. It contains 1 exactly where ``p_value`` is not
            significant. None where there are too few samples for any to be significant.
        p_value: of the hypothesis that both sides are drawn from the same distribution, two-sided. None where the
            interval is, or where samples drift too much: the interval then has the ratios of all pairs of samples.
        is_significant: the interval does not contain 1, or without a ratio that of the shift does not contain 0.
        to_decide: about how many samples, rounds or runs a side would decide, where these do not.
    """

    level: Level
    median_a: float
    median_b: float
    ratio: float | None
    independent: tuple[int, int]
    ratio_low: float | None = None
    ratio_high: float | None = None
    p_value: float | None = None
    is_significant: bool = False
    to_decide: int | None = None


def is_noisy(samples: Samples) -> bool:
    """Return whether the samples vary by more than :data:`NOISY_PART` of their mean."""
    return len(samples.measured) > 1 and samples.std > NOISY_PART * abs(samples.mean)


def fewest_samples(significance: float = SIGNIFICANCE) -> int:
    """Return how many samples a side are the fewest that can differ significantly: 4 at 5 %."""
    count = 1
    # Of all ways to divide the ranks between two sides, two are the most extreme.
    while 2 / math.comb(2 * count, count) > significance * (1 + ROUNDING):
        count += 1
    return count


def same_within_percent(low: float, high: float) -> float:
    """Return by how much a ratio between ``low`` and ``high`` may differ from 1, in percent of the smaller side."""
    return 100 * (max(high, 1 / low if low else math.inf) - 1)


def same_within(low: float, high: float) -> str:
    """Name a ratio between ``low`` and ``high`` that contains 1: ``same within 2.1 %``."""
    return f"same within {same_within_percent(low, high):.2g} %"


def difference(a: Samples, b: Samples) -> Interval:
    """Return the median of ``a`` minus that of ``b``, in their unit."""
    # Each side is one round of one run.
    low, high, _ = _rank_sum(b.measured, a.measured, _worth([[b.measured]], [[a.measured]]))
    estimate = a.median - b.median
    # The pairs that limit the shift need not lie around the shift of the medians.
    return Interval(estimate, min(low, estimate), max(high, estimate), neutral=0.0)


def ratio(a: Samples, b: Samples) -> Interval:
    """Return the median of ``a`` over that of ``b``; both are positive. Of the same object it is 1, without noise."""
    if a is b:
        return Interval(1.0, 1.0, 1.0)
    worth = _worth([[b.measured]], [[a.measured]])
    limits = _rank_sum(_logarithms(b.measured), _logarithms(a.measured), worth)  # From b to a: of log(a / b).
    count = min(len(a.measured), len(b.measured))
    return _ratio_interval(a.median / b.median, limits, count, fewest_samples())


def ratio_of_pairs(a: Samples, b: Samples) -> Interval:
    """Return the median ratio a / b of samples taken in turn, by the signed-rank test; the longer series is cut."""
    logarithms_a, logarithms_b = _logarithms(a.measured), _logarithms(b.measured)
    differences = [of_a - of_b for of_a, of_b in zip(logarithms_a, logarithms_b, strict=False)]
    # For as many independent samples as these are worth with their drift (:func:`_worth`), and as if there were none.
    nulls = [_signed_rank_null(_independent(len(differences), worth)) for worth in (_worth([[differences]]), 1.0)]
    values = _thinned(differences)
    # Of all pairs of values, each also with itself: the test counts how many of these means are below 0.
    means = sorted((value + other) / 2 for index, value in enumerate(values) for other in values[index:])
    limits = _interval_limits(means, nulls, SIGNIFICANCE)
    return _ratio_interval(math.exp(statistics.median(differences)), limits, len(differences), _FEWEST_PAIRS)


def compare_sides(a: SideSamples, b: SideSamples, significance: float = SIGNIFICANCE) -> Difference:
    """Compare two sides, whose samples are finite.

    Where a side has several runs, a run is one independent sample; else, where one has several rounds, a round is.
    """
    level: Level = "samples"
    if max(len(a), len(b)) > 1:
        level = "runs"
    elif max(len(a[0]), len(b[0])) > 1:  # The rounds of each side's only run.
        level = "rounds"
    of_a, of_b = _level_values(a, level), _level_values(b, level)
    worth = _worth(a, b) if level == "samples" else 1.0  # Samples may drift; rounds and runs are independent.
    is_positive = min(of_a) > 0 and min(of_b) > 0
    median_a, median_b = statistics.median(of_a), statistics.median(of_b)
    median_ratio = median_b / median_a if is_positive else None
    independent = _independent(len(of_a), worth), _independent(len(of_b), worth)
    difference = Difference(level, median_a, median_b, median_ratio, independent)
    before, after = (_logarithms(side) if is_positive else side for side in (of_a, of_b))
    limits = _rank_sum(before, after, worth, significance)
    low, high, p_value = limits
    fewest = fewest_samples(significance)
    if not math.isfinite(high):  # No ranks of so few samples are significant.
        return replace(difference, to_decide=fewest)
    shift = median_b - median_a if median_ratio is None else math.log(median_ratio)
    # As in the interval that is shown, which contains the shift of the medians, too.
    is_significant = not min(low, shift) <= 0 <= max(high, shift)
    if p_value is not None and p_value <= significance * (1 + ROUNDING) and not is_significant:
        p_value = 1.0  # Ranks that contradict the medians show a difference, but not this one.
    difference = replace(difference, p_value=p_value, is_significant=is_significant)
    if median_ratio is None:
        return difference
    interval = _ratio_interval(median_ratio, limits, min(len(of_a), len(of_b)), fewest)
    return replace(difference, ratio_low=interval.low, ratio_high=interval.high, to_decide=interval.to_decide)


def autocorrelation(side: SideSamples) -> float | None:
    """Correlate the ranks of samples that follow one another in a round, -1 to 1; None for fewer than 5 a round.

    The estimate from a short series of n is too low by about ``(1 + 4 rho) / n`` (Marriott and Pope 1954), so that rho
    is ``(estimate + 1 / n) / (1 - 4 / n)``. ``1 + 4 / n`` replaces that quotient, which doubles the noise at n = 8.
    """
    rounds = [samples for run in side for samples in run]
    length = min(map(len, rounds))
    if length < _FEWEST_FOR_DRIFT:
        return None
    centred = [[rank - (len(samples) - 1) / 2 for rank in _average_ranks(samples)] for samples in rounds]
    squares = sum(rank * rank for ranks in centred for rank in ranks)
    if squares == 0:
        return None
    products = sum(before * after for ranks in centred for before, after in pairwise(ranks))
    return max(-1.0, min(1.0, (products / squares + 1 / length) * (1 + 4 / length)))


def _ratio_interval(estimate: float, limits: _Limits, count: int, fewest: int) -> Interval:
    """Return the interval of a ratio, and where it is undecided, how many samples a side would decide it.

    Args:
        limits: of the ratio's logarithm.
        count, fewest: how many samples there are a side, and how many any difference needs.
    """
    shift = math.log(estimate)
    low, high, p_value = limits
    low, high = min(low, shift), max(high, shift)  # The ratio of medians may lie outside of the ranks' interval.
    ends = min(math.exp(low), estimate), max(math.exp(high), estimate)  # exp(log(estimate)) may be off by rounding.
    if not math.isfinite(high):  # There are fewer samples than any difference needs.
        return Interval(estimate, *ends, neutral=1.0, to_decide=fewest)
    interval = Interval(estimate, *ends, neutral=1.0, is_bound=p_value is None)  # Drift leaves bounds, but no p.
    if not interval.is_undecided:
        return interval
    # Narrow enough, the interval leaves out 1 or lies within SAME_PERCENT of it; it narrows with the root of the count.
    same = math.log1p(SAME_PERCENT / 100)
    needed_width = 2 * max(abs(shift), same - abs(shift))
    return replace(interval, to_decide=max(count + 1, math.ceil(count * ((high - low) / needed_width) ** 2)))


def _logarithms(values: Sequence[float]) -> list[float]:
    return list(map(math.log, values))


def _level_values(side: SideSamples, level: Level) -> list[float]:
    if level == "samples":
        return list(side[0][0])  # There is one run, of one round.
    if level == "rounds":
        return list(map(statistics.median, side[0]))
    return [statistics.median([value for samples in run for value in samples]) for run in side]


def _average_ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value among all, from 0; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def _worth(*sides: SideSamples) -> float:
    """Return how many independent samples one is worth, ``(1 - rho) / (1 + rho)`` in an autoregressive series.

    One rho for both sides, the mean of their estimates: of each alone it is too uncertain.
    """
    estimates = [rho for rho in map(autocorrelation, sides) if rho is not None]
    rho = min(max(fmean(estimates), 0.0), _LARGEST_DRIFT) if estimates else 0.0
    return (1 - rho) / (1 + rho)


def _independent(count: int, worth: float) -> int:
    return max(1, round(worth * count))


def _thinned(values: Sequence[float]) -> Sequence[float]:
    """Return the values, or :data:`_QUANTILES` of them that are evenly spaced in their order."""
    if len(values) <= _QUANTILES:
        return values
    ordered = sorted(values)
    return [ordered[(2 * index + 1) * len(values) // (2 * _QUANTILES)] for index in range(_QUANTILES)]


def _rank_sum(a: Sequence[float], b: Sequence[float], worth: float, significance: float = SIGNIFICANCE) -> _Limits:
    """Return the limits of the shift from ``a`` to ``b``, by distances of all pairs; ``worth``: of :func:`_worth`."""
    import numpy as np  # Imported late: many who import this module compare nothing.

    before, after = np.asarray(_thinned(a))[:, None], np.asarray(_thinned(b))  # Quantiles, for there are many pairs.
    distances = after - before
    distances[abs(distances) <= ROUNDING * np.maximum(abs(before), abs(after))] = 0.0  # Equal but for rounding.
    nulls = []
    for worth_of_sample in (worth, 1.0):  # With drift, and as if there were none.
        smaller_count, larger_count = sorted(_independent(len(side), worth_of_sample) for side in (a, b))
        nulls.append(_rank_sum_null(smaller_count, larger_count))
    return _interval_limits(np.sort(distances, axis=None).tolist(), nulls, significance)


@dataclass(frozen=True)
class _Null:
    """Null distribution of a statistic that counts distances below 0, ``most`` of them at most.

    ``at_most`` has the probability of at most 0, 1, ...; it is empty where a normal distribution is good enough.
    """

    most: int
    variance: float
    at_most: Sequence[float] = ()

    @property
    def _normal(self) -> NormalDist:
        return NormalDist(self.most / 2, math.sqrt(self.variance))

    def probability(self, statistic: int) -> float:
        """Return the probability of at most this value; 0.5 corrects the normal distribution for whole numbers."""
        return self.at_most[statistic] if self.at_most else self._normal.cdf(statistic + 0.5)

    def rejected(self, probability: float) -> int:
        """Return how many of the values 0, 1, ... have at most this probability altogether."""
        if self.at_most:
            return bisect_right(self.at_most, probability * (1 + ROUNDING))
        return max(0, math.floor(self._normal.inv_cdf(probability) + 0.5))


def _interval_limits(ordered: Sequence[float], nulls: Sequence[_Null], significance: float) -> _Limits:
    """Return the interval of a shift, and p of no shift, from the distances that a test counts, in rising order.

    Args:
        nulls: the distribution for as many samples as these are worth, and the one for as many as they are.
    """
    null, null_without_drift = nulls
    # Where samples are worth less than one, the test counts fewer distances, each of which stands for several of these.
    weight = len(ordered) / null.most
    num_rejected = null.rejected(significance / 2)
    if num_rejected:  # In floor and ceil, ROUNDING keeps products that should be whole from the next number.
        # Distances on the side that has fewer; zeros count for both.
        fewer = min(bisect_right(ordered, 0.0), len(ordered) - bisect_left(ordered, 0.0))
        p_value = min(1.0, 2 * null.probability(min(math.floor(fewer / weight + ROUNDING), null.most)))
        # The limit is where the statistic leaves its most extreme values (Hodges and Lehmann 1963).
        index = math.ceil(num_rejected * weight - ROUNDING * len(ordered)) - 1
        return ordered[index], ordered[-1 - index], p_value
    if null_without_drift.rejected(significance / 2):
        # However much samples drift, no pair is further apart than the first and the last of these distances. Where
        # the sides do not overlap, they differ by at least as much as the nearest pair.
        return ordered[0], ordered[-1], None
    return -math.inf, math.inf, None


@cache
def _rank_sum_null(smaller_count: int, larger_count: int) -> _Null:
    most = smaller_count * larger_count
    variance = most * (smaller_count + larger_count + 1) / 12
    if smaller_count > _MOST_EXACT or most > _MOST_EXACT**3:
        return _Null(most, variance)  # Normal: counting all orders would take long, and differ little.
    # The Gaussian binomial coefficient.
    return _exact_null(most, variance, [(larger_count + i, i) for i in range(1, smaller_count + 1)])


@cache
def _signed_rank_null(count: int) -> _Null:
    most = count * (count + 1) // 2
    variance = most * (2 * count + 1) / 12
    if count > 2 * _MOST_EXACT:
        return _Null(most, variance)  # Normal.
    # Each rank is on one side or the other: the factors are 1 + x^rank.
    return _exact_null(most, variance, [(2 * rank, rank) for rank in range(1, count + 1)])


def _exact_null(most: int, variance: float, factors: Sequence[tuple[int, int]]) -> _Null:
    """Return the distribution whose generating function has the factors ``(1 - x^a) / (1 - x^b)``, as pairs (a, b)."""
    ways = [1] + [0] * most  # In how many ways the statistic is 0, 1, ...
    for a, b in factors:
        for power in range(most, a - 1, -1):  # Multiply by 1 - x^a.
            ways[power] -= ways[power - a]
        for power in range(b, most + 1):  # Divide by 1 - x^b.
            ways[power] += ways[power - b]
    total = sum(ways)
    return _Null(most, variance, [so_far / total for so_far in accumulate(ways)])
