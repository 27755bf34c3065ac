"""One notion of noise for tables, write-ups and ``compare``: Wilcoxon's tests. Plain data, no torch.

Two series differ where the ranks of their samples say so: the rank-sum test, exact for few samples, with the interval
of the shift that belongs to it (Hodges and Lehmann 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical
Methods, 4.1 to 4.3). Samples that resemble those before them count for fewer. docs/decisions/statistics.md says why.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean
from typing import Literal

from cs336sys.results.model import Samples

# Above this part of its mean, a standard deviation says that something else was measured, too.
NOISY_PART = 0.2

# What tables and write-ups allow: one in twenty equal pairs is called different.
SIGNIFICANCE = 0.05

# Equal numbers may differ by so much after arithmetic, as a part of them.
ROUNDING = 1e-12

# Fewer samples do not show how much each resembles the one before; that much is the most that is believed.
_LEAST_FOR_DRIFT = 8
_MOST_DRIFT = 0.95

# With more independent samples a normal distribution replaces the exact one.
_EXACT = 20

# Evenly spaced quantiles that stand for a longer series.
_QUANTILES = 200

# What is drawn independently: whole runs, rounds of one run, or nothing larger than samples that follow one another.
Level = Literal["runs", "rounds", "samples"]

# One side: its runs, of each its rounds, of each the samples in the order in which they were taken.
SideSamples = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Interval:
    """An estimate and where the truth lies, in 95 of 100 cases.

    Attributes:
        low, high: infinitely far apart (a ratio: 0 and infinity) where there are too few samples to say anything.
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

    @property
    def is_undecided(self) -> bool:
        """So few samples could show no difference, however large."""
        return not math.isfinite(self.high)


@dataclass(frozen=True)
class Difference:
    """Difference of B from A.

    Attributes:
        level: what was counted as one independent sample; of a run or a round its median.
        median_a, median_b: of these.
        ratio: of the medians, B / A; None unless all samples are positive.
        ratio_low, ratio_high: its confidence interval. It holds 1 where ``p_value`` is not significant, and not else.
        p_value: of the hypothesis that both sides are drawn from the same distribution, two-sided. None, as the
            interval is, where there are too few samples for any to be significant.
        independent: how many independent samples each side is worth.
        is_significant: the interval does not hold 1 (without a ratio: 0 is no difference that there may be).
    """

    level: Level
    median_a: float
    median_b: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    p_value: float | None
    independent: tuple[int, int]
    is_significant: bool = False


def is_noisy(samples: Samples) -> bool:
    """Return whether the samples vary by more than :data:`NOISY_PART` of their mean."""
    return len(samples.measured) > 1 and samples.std > NOISY_PART * abs(samples.mean)


def fewest_samples(significance: float = SIGNIFICANCE) -> int:
    """Return how many samples a side are the fewest that can differ significantly: 4 at 5 %."""
    count = 1
    while 2 / math.comb(2 * count, count) > significance * (1 + ROUNDING):
        count += 1
    return count


def difference(a: Samples, b: Samples) -> Interval:
    """Return the median of ``a`` less that of ``b``, in their unit."""
    low, high, _ = _rank_sum(b.measured, a.measured, _worth([[b.measured]], [[a.measured]]))
    return _interval(a.median - b.median, low, high, 0.0)


def ratio(a: Samples, b: Samples) -> Interval:
    """Return the median of ``a`` over that of ``b``; both are positive. Of the same object it is 1, without noise."""
    if a is b:
        return Interval(1.0, 1.0, 1.0)
    low, high, _ = _rank_sum(_logarithms(b), _logarithms(a), _worth([[b.measured]], [[a.measured]]))
    return _interval(a.median / b.median, math.exp(low), math.exp(high), 1.0)


def ratio_of_pairs(a: Samples, b: Samples) -> Interval:
    """Return the median ratio of samples that were taken in turn, by the signed-rank test; what one has more is left
    out.
    """
    pairs = [first - second for first, second in zip(_logarithms(a), _logarithms(b), strict=False)]
    low, high, _ = _signed_rank(pairs, _worth([[pairs]]))
    return _interval(math.exp(statistics.median(pairs)), math.exp(low), math.exp(high), 1.0)


def compare_sides(a: SideSamples, b: SideSamples, *, confidence_percent: float = 95.0) -> Difference:
    """Compare two sides, whose samples are finite.

    Where a side has several runs, a run is one independent sample; else, where one has several rounds, a round is.
    """
    level: Level = "samples"
    if max(len(a), len(b)) > 1:
        level = "runs"
    elif max(len(a[0]), len(b[0])) > 1:
        level = "rounds"
    of_a, of_b = _units(a, level), _units(b, level)
    worth = _worth(a, b) if level == "samples" else 1.0
    independent = _independent(len(of_a), worth), _independent(len(of_b), worth)
    significance = (100 - confidence_percent) / 100
    is_positive = min(of_a) > 0 and min(of_b) > 0
    before, after = (list(map(math.log, side)) if is_positive else side for side in (of_a, of_b))
    low, high, p_value = _rank_sum(before, after, worth, significance)
    median_a, median_b = statistics.median(of_a), statistics.median(of_b)
    median_ratio = median_b / median_a if is_positive else None
    if not math.isfinite(high):
        return Difference(level, median_a, median_b, median_ratio, None, None, None, independent)
    shift = median_b - median_a if median_ratio is None else math.log(median_ratio)
    low, high = min(low, shift), max(high, shift)
    if p_value <= significance * (1 + ROUNDING) and low <= 0 <= high:
        # Ranks that contradict the medians show a difference, but not this one.
        p_value = 1.0
    ends = [None if median_ratio is None else math.exp(end) for end in (low, high)]
    return Difference(
        level, median_a, median_b, median_ratio, ends[0], ends[1], p_value, independent, not low <= 0 <= high
    )


def autocorrelation(side: SideSamples) -> float | None:
    """Correlate the ranks of samples with the one before in the same round, -1 to 1; None for fewer than 8 a round.

    The estimate from a short series is too low by about ``(1 + 4 rho) / n`` (Marriott and Pope 1954), which is added.
    """
    rounds = [samples for run in side for samples in run]
    length = min(map(len, rounds))
    if length < _LEAST_FOR_DRIFT:
        return None
    centred = [[rank - (len(samples) - 1) / 2 for rank in _average_ranks(samples)] for samples in rounds]
    squares = sum(rank * rank for ranks in centred for rank in ranks)
    if squares == 0:
        return None
    products = sum(before * after for ranks in centred for before, after in pairwise(ranks))
    return max(-1.0, min(1.0, (products / squares + 1 / length) / (1 - 4 / length)))


def _interval(estimate: float, low: float, high: float, neutral: float) -> Interval:
    # The pairs that limit the shift need not lie around the shift of the medians.
    return Interval(estimate, min(low, estimate), max(high, estimate), neutral)


def _logarithms(samples: Samples) -> list[float]:
    return list(map(math.log, samples.measured))


def _units(side: SideSamples, level: Level) -> list[float]:
    if level == "samples":
        return list(side[0][0])
    if level == "rounds":
        return list(map(statistics.median, side[0]))
    return [statistics.median([value for samples in run for value in samples]) for run in side]


def _average_ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value among all, from 0; equal ones share theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def _worth(*sides: SideSamples) -> float:
    """Return the part of the samples that counts, ``(1 - rho) / (1 + rho)`` of an autoregressive series.

    One rho for both sides, the mean of their estimates: of each alone it is too uncertain.
    """
    lags = [lag for side in sides if (lag := autocorrelation(side)) is not None]
    lag = min(max(fmean(lags), 0.0), _MOST_DRIFT) if lags else 0.0
    return (1 - lag) / (1 + lag)


def _independent(count: int, worth: float) -> int:
    return max(1, round(worth * count))


def _thinned(values: Sequence[float]) -> Sequence[float]:
    if len(values) <= _QUANTILES:
        return values
    ordered = sorted(values)
    return [ordered[(2 * place + 1) * len(values) // (2 * _QUANTILES)] for place in range(_QUANTILES)]


def _rank_sum(
    a: Sequence[float], b: Sequence[float], worth: float, significance: float = SIGNIFICANCE
) -> tuple[float, float, float]:
    """Return the limits of the shift from ``a`` to ``b``, and p of no shift: of all pairs' distances."""
    # Of 40,000 pairs. Not with this module, which is imported where nothing is compared, too.
    import numpy as np

    counts = sorted((_independent(len(a), worth), _independent(len(b), worth)))
    before, after = np.asarray(_thinned(a))[:, None], np.asarray(_thinned(b))
    distances = after - before
    distances[abs(distances) <= ROUNDING * np.maximum(abs(before), abs(after))] = 0.0
    return _interval_limits(np.sort(distances, axis=None).tolist(), _rank_sum_null(*counts), significance)


def _signed_rank(values: Sequence[float], worth: float) -> tuple[float, float, float]:
    """Return the limits of the centre of ``values`` and p of 0: of the means of all pairs, each with itself, too."""
    count = _independent(len(values), worth)
    values = _thinned(values)
    means = sorted((first + second) / 2 for place, first in enumerate(values) for second in values[place:])
    return _interval_limits(means, _signed_rank_null(count), SIGNIFICANCE)


@dataclass(frozen=True)
class _Null:
    """Null distribution of a statistic that counts distances below 0.

    Attributes:
        most: the largest that it can be.
        at_most: the probability of at most 0, 1, ...; empty where a normal distribution is good enough.
    """

    most: int
    variance: float
    at_most: Sequence[float] = ()

    @property
    def _normal(self) -> NormalDist:
        return NormalDist(self.most / 2, math.sqrt(self.variance))

    def probability(self, statistic: int) -> float:
        return self.at_most[statistic] if self.at_most else self._normal.cdf(statistic + 0.5)

    def rejected(self, probability: float) -> int:
        """Return how many of 0, 1, ... have at most this probability altogether."""
        if self.at_most:
            return bisect_right(self.at_most, probability * (1 + ROUNDING))
        return max(0, math.floor(self._normal.inv_cdf(probability) + 0.5))


def _interval_limits(ordered: Sequence[float], null: _Null, significance: float) -> tuple[float, float, float]:
    """Return the values in which a two-sided test ends, and its p of 0; ``ordered`` are the distances it counts."""
    weight = len(ordered) / null.most
    fewer = min(bisect_right(ordered, 0.0), len(ordered) - bisect_left(ordered, 0.0))
    p_value = min(1.0, 2 * null.probability(min(math.floor(fewer / weight + ROUNDING), null.most)))
    rejected = null.rejected(significance / 2)
    if not rejected:
        return -math.inf, math.inf, p_value
    place = math.ceil(rejected * weight - ROUNDING * len(ordered)) - 1
    return ordered[place], ordered[-1 - place], p_value


@cache
def _rank_sum_null(fewer: int, more: int) -> _Null:
    """Return the null distribution for ``fewer`` samples of one side and ``more`` of the other."""
    most = fewer * more
    variance = most * (fewer + more + 1) / 12
    if fewer > _EXACT or most > _EXACT**3:
        return _Null(most, variance)
    # The Gaussian binomial coefficient: the product of (1 - x^(more + i)) / (1 - x^i) for i = 1, ..., fewer.
    ways = [1] + [0] * most
    for factor in range(1, fewer + 1):
        for power in range(most, more + factor - 1, -1):
            ways[power] -= ways[power - more - factor]
        for power in range(factor, most + 1):
            ways[power] += ways[power - factor]
    return _Null(most, variance, _cumulated(ways))


@cache
def _signed_rank_null(count: int) -> _Null:
    """Return the null distribution for so many pairs."""
    most = count * (count + 1) // 2
    variance = most * (2 * count + 1) / 12
    if count > 2 * _EXACT:
        return _Null(most, variance)
    # Each rank is on one side or the other: the product of (1 + x^i) for i = 1, ..., count.
    ways = [1] + [0] * most
    for rank in range(1, count + 1):
        for power in range(most, rank - 1, -1):
            ways[power] += ways[power - rank]
    return _Null(most, variance, _cumulated(ways))


def _cumulated(ways: Sequence[int]) -> list[float]:
    total = sum(ways)
    return [so_far / total for so_far in accumulate(ways)]
