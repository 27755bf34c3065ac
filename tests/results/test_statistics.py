"""The one notion of noise: the verdict, p and interval of two series, against scipy's own tests and by enumeration."""

import math
import random
import statistics
from itertools import combinations

import pytest
import scipy

from cs336sys.results.model import Samples
from cs336sys.results.statistics import (
    autocorrelation,
    compare_sides,
    difference,
    fewest_samples,
    ratio,
    ratio_of_pairs,
)

TIMES_A = (10.0, 10.4, 9.9, 10.1, 10.3, 9.8, 10.2)
TIMES_B = (10.6, 10.25, 10.35, 10.8, 10.45)

# Steps of xl on two ranks, as saved: one of naive's stalled.
NAIVE, OVERLAP = (422.0, 422.4, 422.0, 473.4, 422.8), (399.7, 398.5, 399.3, 399.0, 399.5)


def ms(*values):
    return Samples("ms", "cpu clock", values)


def series(*samples):
    """One run of one round."""
    return ((samples,),)


def drawn(count, seed, shift=0.0):
    source = random.Random(seed)
    return tuple(math.exp(source.gauss(shift, 0.3)) for _ in range(count))


def test_one_stall_does_not_hide_a_difference_that_the_samples_show():
    """It was "no different within the noise (0.993x to 1.13x)", by medians and Student's t."""
    found = ratio(ms(*NAIVE), ms(*OVERLAP))
    assert not found.is_noise
    assert (found.estimate, found.low) == (pytest.approx(422.4 / 399.3), pytest.approx(422.0 / 399.5))
    compared = compare_sides(series(*NAIVE), series(*OVERLAP))
    assert (compared.is_significant, compared.p_value) == (True, pytest.approx(2 / math.comb(10, 5)))
    # A stall on the faster side says nothing either way; it must not turn the verdict round.
    stalled = (*OVERLAP[:4], 480.0)
    assert not compare_sides(series(*NAIVE), series(*stalled)).is_significant
    assert ratio(ms(*NAIVE), ms(*stalled)).is_noise


@pytest.mark.parametrize(("of_a", "of_b"), [(4, 4), (5, 5), (7, 3), (6, 12), (15, 30), (20, 60), (30, 40)])
def test_p_is_that_of_scipys_rank_sum_test(of_a, of_b):
    for seed in range(20):
        a, b = drawn(of_a, seed), drawn(of_b, seed + 100, shift=0.2)
        # Their drift is another test's: samples in no order have none but what chance makes.
        found = compare_sides([[[value] for value in a]], [[[value] for value in b]])
        method = "exact" if min(of_a, of_b) <= 20 else "asymptotic"
        assert found.p_value == pytest.approx(scipy.stats.mannwhitneyu(a, b, method=method).pvalue, rel=1e-9)


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


@pytest.mark.parametrize("level", ["samples", "rounds", "runs"])
def test_interval_holds_1_where_p_is_not_significant_and_not_else(level):
    for seed in range(60):
        a, b = drawn(7, seed), drawn(6, seed + 1000, shift=0.3)
        sides = {
            "samples": (series(*a), series(*b)),
            "rounds": ([[[value] for value in a]], [[[value] for value in b]]),
            "runs": ([[[value]] for value in a], [[[value]] for value in b]),
        }
        one, other = sides[level]
        found = compare_sides(one, other)
        assert found.level == level
        assert found.is_significant == (not found.ratio_low <= 1 <= found.ratio_high)
        # Samples in a random order may look as if they drifted, too much for the test.
        assert found.p_value is None or found.is_significant == (found.p_value <= 0.05)
        assert found.ratio_low <= found.ratio <= found.ratio_high
        back = compare_sides(other, one)
        assert back.ratio_low == pytest.approx(1 / found.ratio_high)
        assert back.p_value == (found.p_value and pytest.approx(found.p_value))


def test_too_few_samples_decide_nothing_however_far_apart():
    assert [fewest_samples(level) for level in (0.1, 0.05, 0.01, 0.001)] == [3, 4, 5, 7]
    for of_a, of_b, decided in ((1, 1, False), (3, 3, False), (3, 4, False), (3, 5, True), (4, 4, True), (2, 8, True)):
        slow, fast = range(10, 10 + of_a), [1 + 5 * place % of_b for place in range(of_b)]
        found = compare_sides(series(*slow), series(*fast))
        assert (found.p_value is not None, found.ratio_low is not None) == (decided, decided), (of_a, of_b)
        assert (ratio(ms(*slow), ms(*fast)).is_undecided, ratio(ms(*slow), ms(*fast)).is_noise) == 2 * (not decided,)
        assert difference(ms(*slow), ms(*fast)).is_undecided != decided
    assert compare_sides(series(10, 11, 12), series(1, 2, 3), confidence_percent=90).is_significant


def test_ranks_that_contradict_the_medians_decide_nothing():
    """B is lower in most pairs, yet its median is higher."""
    a, b = (10.0,) * 6 + (20.0,) * 5, (9.0,) * 5 + (12.0,) * 6
    found = compare_sides([[[value] for value in a * 4]], [[[value] for value in b * 4]])
    assert scipy.stats.mannwhitneyu(a * 4, b * 4).pvalue < 0.05
    assert (found.ratio, found.is_significant, found.p_value) == (1.2, False, 1.0)


@pytest.mark.parametrize("count", [4, 6, 10, 40])
def test_the_interval_holds_the_true_ratio_in_95_of_100_cases(count):
    """Of a distribution as skewed as times are; 500 cases are known to 2 %."""
    source = random.Random(count)
    held = 0
    for _ in range(500):
        a, b = ([source.lognormvariate(centre, 0.5) for _ in range(count)] for centre in (0.3, 0.0))
        found = ratio(ms(*a), ms(*b))
        held += found.low <= math.exp(0.3) <= found.high
    assert held / 500 >= 0.93


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


def test_drifting_samples_that_do_not_overlap_differ_by_at_least_their_nearest_pair():
    """A forward pass on an H200, replayed and launched: it was "within the noise", as the launched one drifted."""
    replayed = tuple(1.84 + 0.001 * place for place in range(11))
    launched = (7.26, 7.28, 7.27, 7.17, 7.06, 7.6, 7.41, 7.92, 7.93, 8.03, 8.08, 8.0)
    found = ratio(ms(*launched), ms(*replayed))
    assert (found.is_bound, found.low, found.high) == (True, *map(pytest.approx, (7.06 / 1.85, 8.08 / 1.84)))
    compared = compare_sides(series(*replayed), series(*launched))
    assert (compared.is_significant, compared.p_value) == (True, None)
    assert (compared.ratio_low, compared.ratio_high) == pytest.approx((found.low, found.high))


def test_undecided_says_how_many_samples_would_decide():
    noisy = [100 + 8 * math.sin(7 * place) for place in range(10)]
    undecided = ratio(ms(*noisy), ms(*noisy[::-1]))
    assert (undecided.is_undecided, undecided.is_noise) == (True, True)
    assert 10 < undecided.to_decide < 200
    times = undecided.to_decide // 10 + 1
    more = ratio(ms(*noisy * times), ms(*noisy[::-1] * times))
    assert (more.is_undecided, more.to_decide) == (False, None)


def test_pairs_see_a_difference_that_drifts_hide():
    """Steps taken in turn on a machine that gets slower all the time: each is 5 % faster than the one next to it."""
    slow = ms(*(10.0 + 2 * step for step in range(10)))
    fast = ms(*((10.0 + 2 * step) / 1.05 for step in range(10)))
    assert ratio(slow, fast).is_noise
    assert ratio_of_pairs(slow, fast).estimate == pytest.approx(1.05)
    assert not ratio_of_pairs(slow, fast).is_noise
    assert ratio_of_pairs(ms(*slow.measured[:5]), fast).is_undecided, "2 / 2^5 is more than 5 %"


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
