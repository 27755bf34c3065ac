"""How often ``compare`` is wrong: verdicts on samples of which the truth is known.

    python -m pytest -n0 -s -m nightly tests/results/test_verdicts_simulated.py --seed 0

prints the tables of docs/compare.md.
"""

import functools
from collections import Counter

import numpy
import pytest
import scipy

from cs336sys.results.comparison import Measured, compare_samples
from cs336sys.results.model import Samples

# Of a step from one to the next, as a share of it.
NOISE = 0.02

STEPS = (10, 20, 50)


@pytest.fixture(scope="module")
def count(tier):
    return tier.choose(100, 1_000)


@pytest.fixture
def draw(tier):
    return numpy.random.default_rng(tier.seed)


def independent(draw, shape):
    return 1 + NOISE * draw.standard_normal(shape)


def drifting(draw, shape, autocorrelation):
    """Normal, each sample ``autocorrelation`` of the one before."""
    steps = draw.standard_normal(shape)
    for index in range(1, shape[1]):
        steps[:, index] = autocorrelation * steps[:, index - 1] + (1 - autocorrelation**2) ** 0.5 * steps[:, index]
    return 1 + NOISE * steps


def with_spikes(draw, shape):
    """One step in twenty takes half as long again."""
    return independent(draw, shape) * numpy.where(draw.random(shape) < 0.05, 1.5, 1)


def bimodal(draw, shape, fast=1.0, slow=1.1, share_slow=0.5):
    return numpy.where(draw.random(shape) < share_slow, slow, fast) * (1 + 0.005 * draw.standard_normal(shape))


NOISES = {
    "independent": independent,
    "lag 1 of 0.3": functools.partial(drifting, autocorrelation=0.3),
    "lag 1 of 0.6": functools.partial(drifting, autocorrelation=0.6),
    "lag 1 of 0.8": functools.partial(drifting, autocorrelation=0.8),
    "spikes": with_spikes,
    "two speeds": bimodal,
}

# The most false positives that are allowed: the level, and what an autocorrelation that is estimated costs.
MOST_FALSE_POSITIVES = dict.fromkeys(NOISES, 0.06) | {"lag 1 of 0.6": 0.10, "lag 1 of 0.8": 0.15}


def at_most(limit, count):
    """Four times the standard error of so many comparisons above the limit: another seed every night exceeds none."""
    return limit + 4 * (limit * (1 - limit) / count) ** 0.5


def measured(runs):
    """A row for each run, of one round."""
    return Measured(tuple((Samples("ms", "cpu clock", tuple(run)),) for run in runs.tolist()))


def verdicts(sides_a, sides_b):
    """The share of each verdict; none may contradict its own ratio or interval."""
    found = Counter()
    for a, b in zip(sides_a, sides_b, strict=True):
        comparison = compare_samples(measured(a), measured(b))
        difference = comparison.difference
        if difference.ratio_low is not None:
            assert difference.ratio_low <= difference.ratio <= difference.ratio_high
            assert (comparison.verdict == "slower") == (difference.ratio_low > 1)
            assert (comparison.verdict == "faster") == (difference.ratio_high < 1)
        found[comparison.verdict] += 1
    return Counter({verdict: number / len(sides_a) for verdict, number in found.items()})


def wrong(found):
    """The share of equal sides that are called different."""
    return found["faster"] + found["slower"]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("noise", NOISES)
def test_one_run_a_side(noise, steps, draw, count):
    a, b = (NOISES[noise](draw, (count, steps))[:, None] for _ in range(2))
    false_positives = wrong(verdicts(a, b))
    power = verdicts(a, 1.05 * b)["slower"]
    print(f"\n| {noise} | {steps} | {false_positives:.3f} | {power:.2f} |", end="")
    assert false_positives <= at_most(MOST_FALSE_POSITIVES[noise], count)
    if noise == "independent":
        assert power >= 0.8


# False positives of samples of which each is 0.6 or 0.8 of the one before, by their number: few do not show a drift.
FEW_DRIFTING = {4: (0.23, 0.42), 6: (0.17, 0.34), 8: (0.14, 0.25), 10: (0.11, 0.18), 20: (0.08, 0.11)}


def test_power_never_falls_as_samples_rise(draw, count):
    """The table of docs/decisions/statistics.md: of 4 to 40 samples, independent and drifting."""
    powers = []
    for steps in (4, 5, 6, 7, 8, 10, 12, 16, 20, 30, 40):
        row = []
        for lag in (0.0, 0.3, 0.6, 0.8):
            a, b = (drifting(draw, (count, steps), lag)[:, None] for _ in range(2))
            row.append((wrong(verdicts(a, b)), verdicts(a, 1.05 * b)["slower"]))
        print(f"\n| {steps} |", *(f"{wrongly:.3f} / {power:.2f} |" for wrongly, power in row), end="")
        assert row[0][0] <= at_most(0.05, count)
        for (wrongly, _), limit in zip(row[2:], FEW_DRIFTING.get(steps, ()), strict=False):
            assert wrongly <= at_most(limit, count)
        powers.append(row[0][1])
    # Two shares of so many comparisons differ by chance by four times this.
    chance = (0.5 / count) ** 0.5
    assert all(later > max(powers[:place]) - 4 * chance for place, later in enumerate(powers) if place)
    assert powers[0] >= 0.5
    assert min(powers[6:]) >= 0.9


def test_faster_side_has_the_lower_median(draw, count):
    """B's faster mode is the rarer one: ranks say faster, its median is larger, and it is called neither."""
    a = bimodal(draw, (count, 50), fast=10, slow=20, share_slow=0.45)
    b = bimodal(draw, (count, 50), fast=9, slow=12, share_slow=0.55)
    b_is_slower = numpy.median(b, axis=1) > numpy.median(a, axis=1)
    contradicted = (scipy.stats.mannwhitneyu(a, b, axis=1).pvalue < 0.05) & b_is_slower
    assert contradicted.mean() > 0.3
    assert wrong(verdicts(a[contradicted][:, None], b[contradicted][:, None])) <= 0.02


def runs_that_differ(draw, count, runs, spread, steps=10):
    """Sides of several runs, whose means differ by ``spread``."""
    levels = 1 + spread * draw.standard_normal((count, runs, 1))
    return levels * independent(draw, (count, runs, steps))


@pytest.mark.parametrize(("runs_a", "runs_b"), [(3, 3), (4, 4), (5, 5), (2, 8), (3, 10)])
def test_several_runs_a_side(runs_a, runs_b, draw, count):
    a, b = (runs_that_differ(draw, count, runs, spread=0.01) for runs in (runs_a, runs_b))
    false_positives, power = wrong(verdicts(a, b)), verdicts(a, 1.05 * b)["slower"]
    print(f"\n| {runs_a} against {runs_b} runs that differ by 1 % | 10 | {false_positives:.3f} | {power:.2f} |", end="")
    assert false_positives <= at_most(0.05, count)
    assert power >= 0.8 if runs_b > 3 else power == false_positives == 0


def test_one_run_a_side_says_nothing_of_the_next(draw, count):
    """What the note of every table with one run a side warns of."""
    a, b = (runs_that_differ(draw, count, 1, spread=0.01, steps=50) for _ in range(2))
    false_positives = wrong(verdicts(a, b))
    print(f"\n| 1 run, and runs differ by 1 % | 50 | {false_positives:.3f} | |", end="")
    assert false_positives > 0.3


@pytest.mark.parametrize("spread", [0.005, 0.01, 0.02])
def test_fewest_runs_that_show_a_difference(spread, draw, count):
    """The fewest runs a side of 10 steps each that find a difference four times out of five."""
    needed = {}
    for difference in (0.05, 0.02, 0.01):
        fewest = needed[0.02] if difference == 0.01 else 2
        for runs in (2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 70, 100):
            if runs < fewest:
                continue
            a, b = (runs_that_differ(draw, min(count // 3, 2000), runs, spread) for _ in range(2))
            if verdicts(a, (1 + difference) * b)["slower"] >= 0.8:
                break
        needed[difference] = runs
    print(f"\n| {100 * spread:g} % |", *(f"{needed[difference]} |" for difference in (0.01, 0.02, 0.05)), end="")
    if spread == 0.01:
        assert needed[0.05] <= 5
