"""Did it get faster: matches the cells of two results files and compares their raw samples."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.results import Cell, Results, Run, Samples, configuration_key

# Settings that decide how a configuration is sampled, and where files of it are kept, not what is measured.
SAMPLING_SETTINGS = ("steps", "seed", "warmup_ms", "repetition_ms", "keep")

# Of a run's environment, what is meant to change between two files; the fields gpu0_... are momentary readings.
_EXPECTED_DIFFERENCES = frozenset({"cs336sys", "git_commit", "git_dirty", "seed"})

TIME_UNITS = frozenset({"s", "ms", "us", "ns"})
HIGHER_IS_BETTER = frozenset({"tokens_per_s", "tflops", "gbps"})

# With 5 against 5 the smallest p of the Mann-Whitney test is 0.008, with 3 against 3 it is 0.1.
FEW_SAMPLES = 5

Verdict = Literal["faster", "slower", "~"]


@dataclass(frozen=True)
class Pair:
    """The same configuration in both files."""

    a: Cell
    b: Cell

    @property
    def is_measured(self) -> bool:
        return self.a.status == self.b.status == "ok"

    @property
    def is_broken(self) -> bool:
        """Whether A could be measured and B could not."""
        return self.a.status == "ok" != self.b.status


@dataclass(frozen=True)
class Matched:
    """The cells of two files by configuration.

    Attributes:
        pairs: in the order of A; of several runs of one configuration in a file, the last.
        only_a, only_b: configurations that the other file lacks.
        repeated_a, repeated_b: runs left out because a later one of the same configuration follows.
    """

    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int
    repeated_a: int
    repeated_b: int


def match_cells(a: Results, b: Results) -> Matched:
    """Pair the cells of equal command and configuration; steps and seed may differ."""
    latest_a, latest_b = _latest(a.cells), _latest(b.cells)
    pairs = tuple(Pair(cell, latest_b[key]) for key, cell in latest_a.items() if key in latest_b)
    return Matched(
        pairs=pairs,
        only_a=len(latest_a) - len(pairs),
        only_b=len(latest_b) - len(pairs),
        repeated_a=len(a.cells) - len(latest_a),
        repeated_b=len(b.cells) - len(latest_b),
    )


def _latest(cells: Iterable[Cell]) -> dict[tuple[str, str], Cell]:
    return {(cell.command, configuration_key(cell.configuration, SAMPLING_SETTINGS)): cell for cell in cells}


def series(cell: Cell) -> dict[str, Samples]:
    """A cell's measured series by name and unit: ``step_ms``."""
    return {
        name if name.endswith(f"_{samples.unit}") else f"{name}_{samples.unit}": samples
        for name, samples in cell.samples.items()
        if samples.measured
    }


def shared_metrics(pair: Pair, asked: Sequence[str] = ()) -> list[str]:
    """The series to compare, which both cells must have: the ``asked`` ones, ``step`` meaning ``step_ms`` as well.

    Unless asked: ``step_ms``, or else every series that is a time.
    """
    of_a, of_b = series(pair.a), series(pair.b)
    shared = [name for name in of_a if name in of_b]
    if asked:
        return [name for name in shared if _is_asked(name, of_a[name].unit, asked)]
    if "step_ms" in shared:
        return ["step_ms"]
    return [name for name in shared if of_a[name].unit in TIME_UNITS]


def _is_asked(metric: str, unit: str, asked: Sequence[str]) -> bool:
    return metric in asked or metric.removesuffix(f"_{unit}") in asked


@dataclass(frozen=True)
class Comparison:
    """Samples B against samples A of one quantity.

    Attributes:
        ratio: median of B over median of A; None unless all samples are positive.
        ratio_low, ratio_high: its bootstrap confidence interval; None with a single sample on either side.
        p_value: of the two-sided Mann-Whitney U test.
        verdict: ``~`` where the difference is not significant. Of memory, ``slower`` says that B needs more.
        slower_percent: by how much B is slower than A, negative where it is faster; infinite or zero without a ratio.
    """

    a: Samples
    b: Samples
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    p_value: float
    verdict: Verdict
    slower_percent: float


# By metric, in the order in which the metrics first appear.
Compared = dict[str, list[tuple[Pair, Comparison]]]


def compare_samples(a: Samples, b: Samples, *, confidence_percent: float = 95.0) -> Comparison:
    """Compare two series of the same unit.

    The interval is the percentile bootstrap (Efron and Tibshirani 1993, chapter 13) of the ratio of medians, from 9999
    resamplings of both sides with a fixed seed. A difference is significant where the p of the Mann-Whitney U test,
    which supposes no distribution, is under :func:`significance_level`.

    Raises:
        CapabilityError: scipy is not installed.
    """
    stats = _scipy_stats()
    ratio = ratio_low = ratio_high = None
    if min(a.measured + b.measured) > 0:
        ratio = b.median / a.median
        if min(len(a.measured), len(b.measured)) > 1:
            ratio_low, ratio_high = _bootstrap_interval(stats, a, b, confidence_percent)
    p_value = float(stats.mannwhitneyu(a.measured, b.measured).pvalue)
    # With ties scipy approximates by a normal distribution, which can fall below what so few samples allow.
    p_value = max(p_value, smallest_p(len(a.measured), len(b.measured)))
    b_is_worse = (b.median < a.median) if a.unit in HIGHER_IS_BETTER else (b.median > a.median)
    verdict: Verdict = "~"
    if p_value < significance_level(confidence_percent) and a.median != b.median:
        verdict = "slower" if b_is_worse else "faster"
    if ratio is None:
        slower_percent = math.inf if b_is_worse else 0.0
    else:
        slower_percent = 100 * ((1 / ratio if a.unit in HIGHER_IS_BETTER else ratio) - 1)
    return Comparison(a, b, ratio, ratio_low, ratio_high, p_value, verdict, slower_percent)


def compare_pairs(pairs: Iterable[Pair], asked: Sequence[str] = (), *, confidence_percent: float = 95.0) -> Compared:
    """Compare every measured pair in its :func:`shared_metrics`.

    Raises:
        UsageError: there are measured pairs, but none of them has a series to compare or one that was asked for.
        CapabilityError: scipy is not installed.
    """
    compared: Compared = {}
    measured = [pair for pair in pairs if pair.is_measured]
    for pair in measured:
        of_a, of_b = series(pair.a), series(pair.b)
        for metric in shared_metrics(pair, asked):
            comparison = compare_samples(of_a[metric], of_b[metric], confidence_percent=confidence_percent)
            compared.setdefault(metric, []).append((pair, comparison))
    units = {metric: rows[0][1].a.unit for metric, rows in compared.items()}
    missing = [name for name in asked if not any(_is_asked(metric, unit, [name]) for metric, unit in units.items())]
    if measured and (missing or not compared):
        known = dict.fromkeys(name for pair in measured for name in series(pair.a) if name in series(pair.b))
        choices = f"choose --metric from {', '.join(known)}" if known else "the files share no measured series"
        raise UsageError(f"no cell has samples of {', '.join(missing) or 'a time'} in both files: {choices}")
    return compared


def _bootstrap_interval(stats: Any, a: Samples, b: Samples, confidence_percent: float) -> tuple[float, float]:
    import numpy

    def ratio_of_medians(resampled_a, resampled_b, axis=-1):
        return numpy.median(resampled_b, axis=axis) / numpy.median(resampled_a, axis=axis)

    with warnings.catch_warnings():
        # scipy warns where all resamplings agree: the interval is then that one value, which is right.
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = stats.bootstrap(
            (a.measured, b.measured),
            ratio_of_medians,
            vectorized=True,
            method="percentile",
            confidence_level=confidence_percent / 100,
            random_state=0,
        ).confidence_interval
    return float(interval.low), float(interval.high)


def significance_level(confidence_percent: float) -> float:
    """The p from which on a difference is not significant: 0.05 for 95 %."""
    return (100 - confidence_percent) / 100


def smallest_p(count_a: int, count_b: int) -> float:
    """The p of two samples that do not overlap at all: two of all the ways to choose which ranks are A's."""
    return min(1.0, 2 / math.comb(count_a + count_b, count_a))


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise CapabilityError('the statistics need scipy: pip install "cs336sys[compare]"') from error
    return stats


def machine_differences(pairs: Iterable[Pair], a: Results, b: Results) -> dict[str, tuple[Any, Any]]:
    """What differs between the machines, versions and settings of the two sides, by field: the first pair's values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for pair in pairs:
        of_a, of_b = _conditions(a.runs.get(pair.a.run_id)), _conditions(b.runs.get(pair.b.run_id))
        for field in of_a | of_b:
            if of_a.get(field) != of_b.get(field):
                differences.setdefault(field, (of_a.get(field), of_b.get(field)))
    return differences


def _conditions(run: Run | None) -> dict[str, Any]:
    """What two runs must share for their ratio to speak of the code alone."""
    if run is None:
        return {"machine": "not recorded"}
    settings = {
        field: value
        for field, value in run.environment.items()
        if field not in _EXPECTED_DIFFERENCES and not field.startswith("gpu")
    }
    return run.machine | settings
