"""The ratio of means with its interval and p, against scipy's own tests where these say the same."""

import math
import random

import pytest
from scipy import fft, stats

from cs336sys.results.statistics import autocorrelation, mean_difference, quantile, upper_tail

TIMES_A = (10.0, 10.4, 9.9, 10.1, 10.3, 9.8, 10.2, 10.0, 10.5, 9.7)
TIMES_B = (10.6, 10.9, 10.3, 10.8, 10.4, 11.0, 10.7, 10.5, 10.9, 10.6, 10.2, 10.8)


def series(*samples):
    """One run of one round."""
    return ((samples,),)


def test_of_runs_it_is_welchs_test_of_their_means():
    a = (((1.0, 3.0), (5.0, 3.0)), ((4.0,),), ((-6.0, -8.0),))
    b = (((10.0, 12.0),), ((14.0, 18.0),))
    difference = mean_difference(a, b)
    assert (difference.level, difference.ratio) == ("runs", None)
    # A's first run has four samples in two rounds.
    expected = stats.ttest_ind([3, 4, -7], [11, 16], equal_var=False)
    assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-12)


def test_of_rounds_in_one_run_it_is_welchs_test_of_their_means():
    a, b = (((1.0, 3.0), (3.0,), (-6.0, -8.0)),), (((10.0,), (14.0, 18.0)),)
    difference = mean_difference(a, b)
    assert difference.level == "rounds"
    assert difference.p_value == pytest.approx(stats.ttest_ind([2, 3, -7], [10, 16], equal_var=False).pvalue, rel=1e-12)


def test_of_one_series_the_noise_is_its_slowest_cosines():
    difference = mean_difference(series(*TIMES_A), series(*TIMES_B))
    variances, means = [], []
    for samples in (TIMES_A, TIMES_B):
        degrees = 2  # 0.4 * 10^(2/3) = 1.86, 0.4 * 12^(2/3) = 2.10
        slow = fft.dct(samples, norm="ortho")[1 : degrees + 1]
        means.append(sum(samples) / len(samples))
        variances.append(sum(slow**2) / degrees / len(samples) / means[-1] ** 2)
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 2)
    distance, error = math.log(means[1] / means[0]), math.sqrt(sum(variances))
    assert difference.level == "samples"
    assert difference.ratio == pytest.approx(means[1] / means[0])
    assert difference.p_value == pytest.approx(2 * stats.t.sf(distance / error, degrees), rel=1e-9)
    reach = stats.t.ppf(0.975, degrees) * error
    assert difference.ratio_low == pytest.approx(math.exp(distance - reach))
    assert difference.ratio_high == pytest.approx(math.exp(distance + reach))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (series(*TIMES_A), series(*TIMES_B)),
        (((TIMES_A, TIMES_B),), ((TIMES_B, TIMES_B),)),
        (((TIMES_A,), (TIMES_B,)), ((TIMES_B,),)),
    ],
    ids=["samples", "rounds", "runs"],
)
def test_interval_ends_at_1_where_p_is_the_level(a, b):
    p_value = mean_difference(a, b).p_value
    at_level = mean_difference(a, b, confidence_percent=100 * (1 - p_value))
    assert min(abs(at_level.ratio_low - 1), abs(at_level.ratio_high - 1)) < 1e-9
    back = mean_difference(b, a)
    assert (back.p_value, back.ratio) == pytest.approx((p_value, 1 / at_level.ratio))


def test_of_a_side_with_one_run_the_noise_is_that_of_the_other():
    runs = (((9.8,),), ((10.0,),), ((10.2,),))
    difference = mean_difference(runs, series(11.0, 12.0))
    # Student's test of one against three with the variance of the three, in percent of their means.
    error = 0.2 / 10 * math.sqrt(1 + 1 / 3)
    assert difference.p_value == pytest.approx(2 * stats.t.sf(math.log(1.15) / error, 2))
    assert mean_difference(series(11.0, 12.0), runs).p_value == pytest.approx(difference.p_value)


def test_drift_counts_and_noise_from_sample_to_sample_does_not():
    """The same numbers in another order: as they alternate the means are well known, as they rise they are not."""
    up_and_down = [10.0 + 0.5 * (-1) ** number for number in range(20)]
    steady = mean_difference(series(*up_and_down), series(*(value + 0.5 for value in up_and_down)))
    rising = mean_difference(series(*sorted(up_and_down)), series(*sorted(value + 0.5 for value in up_and_down)))
    assert steady.ratio == rising.ratio
    assert steady.p_value < 1e-4
    assert rising.p_value > 0.2


def test_four_samples_of_one_run_decide_nothing():
    difference = mean_difference(series(1, 2, 3, 4), series(10, 11, 12, 13, 14))
    assert (difference.ratio, difference.p_value, difference.ratio_low) == (4.8, None, None)
    assert mean_difference(series(1), series(2)).p_value is None
    assert mean_difference((((1,),), ((1.1,),)), (((2,),), ((2.2,),))).p_value is not None, "two runs a side"


def test_without_noise_any_difference_is_significant_and_a_rounding_is_none():
    same = mean_difference(series(*[0.1] * 7), series(*[0.1] * 11))
    assert (same.p_value, same.ratio_low, same.ratio_high) == (1.0, pytest.approx(1), pytest.approx(1))
    more = mean_difference(series(*[0.1] * 7), series(*[0.1001] * 7))
    assert (more.p_value, more.ratio_low) == (0.0, pytest.approx(1.001))


def test_what_is_not_positive_has_no_ratio():
    difference = mean_difference(series(0, 0, -1, 0, 0, 0), series(1, 2, 1, 2, 1, 2))
    assert (difference.ratio, difference.ratio_low) == (None, None)
    assert 0 < difference.p_value < 0.05


def test_autocorrelation_is_that_of_the_series():
    """Of 4000 short series in which a sample is 0.6 of the one before: the mean of the estimates has no bias left."""
    draw = random.Random(0)
    estimates = []
    for _ in range(4000):
        samples = [draw.gauss(0, 1)]
        while len(samples) < 30:
            samples.append(0.6 * samples[-1] + 0.8 * draw.gauss(0, 1))
        estimates.append(autocorrelation(series(*samples)))
    assert sum(estimates) / len(estimates) == pytest.approx(0.6, abs=0.03)
    assert autocorrelation(series(*[1, 2] * 10)) == -1.0
    assert autocorrelation(series(*[1] * 10)) is None
    assert autocorrelation(series(*range(7))) is None
    # Rounds are centred each on its own: what differs between them is no drift within.
    level = [[base + value for value in TIMES_A] for base in (0, 100)]
    assert autocorrelation((level,)) == pytest.approx(autocorrelation(series(*TIMES_A)))


def test_a_long_series_is_what_its_cosines_say():
    """An odd number of samples, too, whose transform is another."""
    draw = random.Random(0)
    for count in (9, 4_001, 20_000):
        samples = [10 + draw.gauss(0, 1) for _ in range(count)]
        degrees = round(0.4 * count ** (2 / 3))
        slow = fft.dct(samples, norm="ortho")[1 : degrees + 1]
        found = mean_difference(series(*samples), ((tuple(samples),),))
        variance = 2 * sum(slow**2) / degrees / count / found.mean_a**2
        expected = math.exp(stats.t.ppf(0.975, 2 * degrees) * math.sqrt(variance))
        assert found.ratio_high == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 4.7, 30, 99.9, 100.1, 1367.8, 1e5])
def test_students_t_is_scipys(degrees):
    for t in (1e-3, 0.1, 1, 2, 5, 30, 1e4, 1e12):
        assert upper_tail(degrees, t) == pytest.approx(float(stats.t.sf(t, degrees)), rel=1e-7 if t < 0.01 else 1e-11)
    for probability in (0.5, 0.55, 0.75, 0.975, 0.995, 0.99999):
        expected = float(stats.t.ppf(probability, degrees))
        assert quantile(degrees, probability) == pytest.approx(expected, rel=1e-11, abs=1e-15)


def test_students_t_of_one_and_two_degrees_is_exact():
    for t in (1e-9, 0.3, 1.0, 7.0, 1e5):
        assert upper_tail(1, t) == pytest.approx(math.atan2(1, t) / math.pi, rel=1e-14)
        assert upper_tail(2, t) == pytest.approx(1 / (t * t + 2) / (1 + t / math.sqrt(t * t + 2)), rel=1e-14)
    assert quantile(1, 0.75) == pytest.approx(1.0, rel=1e-14)
