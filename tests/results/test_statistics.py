"""The one notion of noise: the verdict, p and interval of two series, against scipy's own tests and by enumeration."""

import math
import random
import statistics
from itertools import combinations

import pytest
import scipy

from cs336sys.results.model import Samples
from cs336sys.results.statistics import autocorrelation, compare_sides, ratio_of_pairs

TIMES_A = (10.0, 10.4, 9.9, 10.1, 10.3, 9.8, 10.2)
TIMES_B = (10.6, 10.25, 10.35, 10.8, 10.45)


def ms(*values):
    return Samples("ms", "cpu clock", values)


def series(*samples):
    """One run of one round."""
    return ((samples,),)


def drawn(count, seed, shift=0.0):
    source = random.Random(seed)
    return tuple(math.exp(source.gauss(shift, 0.3)) for _ in range(count))


@pytest.mark.parametrize(("of_a", "of_b"), [(4, 4), (5, 5), (7, 3), (6, 12), (15, 30), (20, 60), (30, 40)])
def test_p_is_that_of_scipys_rank_sum_test(of_a, of_b):
    for seed in range(20):
        a, b = drawn(of_a, seed), drawn(of_b, seed + 100, shift=0.2)
        # Their drift is another test's: samples in no order have none but what chance makes.
        found = compare_sides([[[value] for value in a]], [[[value] for value in b]])
        method = "exact" if min(of_a, of_b) <= 20 else "asymptotic"
        assert found.p_value == pytest.approx(scipy.stats.mannwhitneyu(a, b, method=method).pvalue, rel=1e-9)
        assert found.is_significant == (found.p_value <= 0.05) == (not found.ratio_low <= 1 <= found.ratio_high)


def test_the_interval_is_by_enumeration_the_shifts_that_the_test_does_not_reject():
    a, b = [math.log(value) for value in TIMES_A], [math.log(value) for value in TIMES_B]
    found = compare_sides(series(*TIMES_A), series(*TIMES_B))

    def rejects(shift):
        moved = [value - shift for value in b]
        below = sum(x < y for x in a for y in moved)
        extreme = min(below, len(a) * len(b) - below)
        ranks = range(len(a) + len(b))
        ways = [sum(chosen) - sum(range(len(b))) for chosen in combinations(ranks, len(b))]
        return 2 * sum(way <= extreme for way in ways) / len(ways) <= 0.05

    for end, outwards in ((found.ratio_low, -1), (found.ratio_high, 1)):
        assert rejects(math.log(end) + outwards * 1e-9)
        assert not rejects(math.log(end) - outwards * 1e-9)
    assert compare_sides(series(10, 11, 12), series(1, 2, 3), significance=0.1).is_significant, "p is 2 / 20"


def test_drift_counts_and_noise_from_sample_to_sample_does_not():
    """The same numbers in another order: as they alternate all count, as they rise they are worth few."""
    up_and_down = [10.0 + 0.01 * number + 0.5 * (-1) ** number for number in range(20)]
    faster = [0.95 * value for value in up_and_down]
    alternating = compare_sides(series(*up_and_down), series(*faster))
    rising = compare_sides(series(*sorted(up_and_down)), series(*sorted(faster)))
    assert alternating.ratio == pytest.approx(rising.ratio)
    assert (alternating.independent, alternating.is_significant) == ((20, 20), True)
    assert (rising.independent[0] < 4, rising.p_value, rising.is_significant) == (True, None, False)
    assert (rising.ratio_low, rising.ratio_high) == pytest.approx(
        (min(faster) / max(up_and_down), max(faster) / min(up_and_down))
    )


@pytest.mark.parametrize("count", [6, 15, 40, 90])
def test_p_of_pairs_is_that_of_scipys_signed_rank_test(count):
    for seed in range(20):
        source = random.Random(seed)
        ratios = [math.exp(source.gauss(0.0, 0.1)) for _ in range(count)]
        found = ratio_of_pairs(ms(*ratios), ms(*[1.0] * count))
        if autocorrelation(series(*ratios)) is not None and autocorrelation(series(*ratios)) > 0:
            continue
        logarithms = [math.log(one) for one in ratios]
        method = "exact" if count <= 40 else "asymptotic"
        significant = scipy.stats.wilcoxon(logarithms, method=method, correction=True).pvalue <= 0.05
        agrees = statistics.median(logarithms) * sum(logarithms) > 0
        assert found.is_noise == (not significant or not agrees)


def test_autocorrelation_is_that_of_the_series():
    """Of 1000 short series in which a sample is 0.6 of the one before: ranks resemble each other by hardly less."""
    # Of normal samples: Pearson 1907.
    of_ranks = 6 / math.pi * math.asin(0.6 / 2)
    draw = random.Random(0)
    estimates = []
    for _ in range(1000):
        samples = [draw.gauss(0, 1)]
        while len(samples) < 30:
            samples.append(0.6 * samples[-1] + 0.8 * draw.gauss(0, 1))
        estimates.append(autocorrelation(series(*samples)))
    # Corrected to first order of 1 / 30 alone.
    assert sum(estimates) / len(estimates) == pytest.approx(of_ranks, abs=0.045)
    stalled = [*[1, 2] * 5, 1000, *[2, 1] * 5]
    assert autocorrelation(series(*stalled)) < -0.5, "a stall is one rank among others"
    # Rounds are centred each on its own: what differs between them is no drift within.
    values = (*TIMES_A, *TIMES_B)
    level = [[base + value for value in values] for base in (0, 100)]
    assert autocorrelation((level,)) == pytest.approx(autocorrelation(series(*values)))


def test_a_long_series_is_what_its_quantiles_say():
    a, b = drawn(20_000, 1), drawn(30_000, 2, shift=0.006)
    shuffled = [[[value] for value in side] for side in (a, b)]
    found = compare_sides([shuffled[0]], [shuffled[1]])
    # Two hundred quantiles a side tell where the medians are to a hundredth of their noise.
    assert found.p_value == pytest.approx(scipy.stats.mannwhitneyu(a, b).pvalue, rel=0.3)
    assert found.ratio_low < math.exp(0.006) < found.ratio_high
    assert found.ratio_high / found.ratio_low == pytest.approx(
        math.exp(2 * 1.96 * 0.3 * math.sqrt(1 / 2e4 + 1 / 3e4)), rel=5e-3
    )
