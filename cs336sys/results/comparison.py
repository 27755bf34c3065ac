"""Two sides compared: their cells of one configuration are paired, and raw samples tell whether one is faster."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from cs336sys.errors import UsageError
from cs336sys.results import model, statistics
from cs336sys.results.foreign import TIME_UNITS
from cs336sys.results.model import Cell, Results, Run, Samples, Status, configuration_key
from cs336sys.results.statistics import SIGNIFICANCE, Difference

# Settings that decide how a configuration is sampled, and where files of it are kept, but not the measured quantity.
SAMPLING_SETTINGS = ("steps", "seed", "warmup_ms", "repetition_ms", "keep", "snapshot", "trace", "timeout_s", "round")

HIGHER_IS_BETTER = frozenset({"tokens_per_s", "tflops", "gbps"})

Verdict = Literal["faster", "slower", "same", "undecided"]


@dataclass(frozen=True)
class Measured:
    """The samples of one quantity on one side: runs, and of each the rounds."""

    runs: tuple[tuple[Samples, ...], ...]

    @property
    def rounds(self) -> tuple[Samples, ...]:
        return tuple(samples for run in self.runs for samples in run)

    @property
    def unit(self) -> str:
        return self.rounds[0].unit

    @property
    def method(self) -> str:
        return " and ".join(dict.fromkeys(samples.method for samples in self.rounds))

    @property
    def values(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(samples.measured for samples in run) for run in self.runs)

    @property
    def all_values(self) -> tuple[float, ...]:
        """Return the samples of all rounds, in the order of measuring."""
        return tuple(value for samples in self.rounds for value in samples.measured)


@dataclass(frozen=True)
class Side:
    """One side's measurements of a configuration: its runs, and the rounds of each, in the order of measuring.

    ``left_out`` counts further cells, which other code measured than the last one, or other conditions.
    """

    runs: tuple[tuple[Cell, ...], ...]
    left_out: int = 0

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for run in self.runs for cell in run)

    @property
    def representative(self) -> Cell:
        """Return the cell whose status stands for all: the first that is not ok, else the last."""
        return next((cell for cell in self.cells if cell.status != "ok"), self.cells[-1])

    @property
    def status(self) -> Status:
        return self.representative.status

    def series(self) -> dict[str, Measured]:
        """Return the measured series that all cells have, by name and unit (``step_ms``)."""
        by_run = [[_named_samples(cell) for cell in run] for run in self.runs]
        names = [name for name in by_run[-1][-1] if all(name in samples for run in by_run for samples in run)]
        return {name: Measured(tuple(tuple(samples[name] for samples in run) for run in by_run)) for name in names}


def _named_samples(cell: Cell) -> dict[str, Samples]:
    """Return a cell's samples, where there are any, by name and unit (``step_ms``)."""
    return {
        name if name.endswith(f"_{samples.unit}") else f"{name}_{samples.unit}": samples
        for name, samples in cell.samples.items()
        if samples.measured
    }


@dataclass(frozen=True)
class Pair:
    """The same configuration on both sides."""

    a: Side
    b: Side

    @property
    def is_measured(self) -> bool:
        return self.a.status == self.b.status == "ok"

    @property
    def is_broken(self) -> bool:
        """Return whether A could be measured and B could not."""
        return self.a.status == "ok" != self.b.status


@dataclass(frozen=True)
class Matched:
    """The cells of two sides by configuration: the pairs in the order of A, and what the other side lacks."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Side, ...]
    only_b: tuple[Side, ...]


def match_cells(a: Results, b: Results) -> Matched:
    """Pair the cells of equal command and configuration; steps, seed and round may differ."""
    of_a, of_b = _sides(a), _sides(b)
    return Matched(
        pairs=tuple(Pair(side, of_b[key]) for key, side in of_a.items() if key in of_b),
        only_a=tuple(side for key, side in of_a.items() if key not in of_b),
        only_b=tuple(side for key, side in of_b.items() if key not in of_a),
    )


def nearest_difference(matched: Matched) -> dict[str, tuple[Any, Any]]:
    """Return the settings, with both values, that tell apart the two unmatched cells of one command that differ least.

    Empty where no command has cells on both sides. Only the first 100 configurations of each side are compared.
    """
    settings_a, settings_b = (
        [cell_settings(side.representative) for side in sides[:100]] for sides in (matched.only_a, matched.only_b)
    )
    differences = (
        {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)}
        for a in settings_a
        for b in settings_b
        if a["command"] == b["command"]
    )
    return min(differences, key=len, default={})


def cell_settings(cell: Cell) -> dict[str, Any]:
    """Return a cell's command and configuration, without :data:`SAMPLING_SETTINGS`."""
    configuration = {name: value for name, value in cell.configuration.items() if name not in SAMPLING_SETTINGS}
    return {"command": cell.command} | configuration


def _sides(results: Results) -> dict[tuple[str, str], Side]:
    """Group cells by command and configuration, each cell once though its file was given twice, or copied."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    seen: set[tuple[Hashable, ...]] = set()
    for cell in results.cells:
        configuration = configuration_key(cell.configuration)
        identity = (cell.run_id, cell.command, configuration, cell.status, *cell.samples.items())
        if identity not in seen:
            seen.add(identity)
            key = (cell.command, configuration_key(cell.configuration, SAMPLING_SETTINGS))
            cells.setdefault(key, []).append(cell)
    return {key: _side(alike, results.runs) for key, alike in cells.items()}


def _side(cells: Sequence[Cell], runs: dict[str, Run]) -> Side:
    """Sort a configuration's cells into runs and rounds; leave out runs of other code or conditions than the last."""
    last_id = cells[-1].run_id
    last = runs.get(last_id)
    comparable_ids = {last_id}
    for run_id in {cell.run_id for cell in cells}:
        run = runs.get(run_id)
        # Where the code is not recorded, it is taken to be the same.
        if not model.differing_conditions(run, last) and model.same_code(run, last) is not False:
            comparable_ids.add(run_id)
    comparable = [cell for cell in cells if cell.run_id in comparable_ids]
    last_index = {configuration_key(cell.configuration): index for index, cell in enumerate(comparable)}
    by_run: list[list[Cell]] = []
    # Of by_run, the runs whose rounds have numbers. The k-th cell of each number belongs to the k-th of these runs; its
    # id does not tell, because an interruption may have cut a run in two.
    runs_of_rounds: list[list[Cell]] = []
    cell_counts: Counter[int] = Counter()
    for index, cell in enumerate(comparable):
        if cell.status != "ok" and last_index[configuration_key(cell.configuration)] > index:
            continue  # It failed, and a resumed sweep measured it again.
        round_number = cell.configuration.get("round")
        if round_number is None:
            by_run.append([cell])
            continue
        if cell_counts[round_number] == len(runs_of_rounds):  # Each of these has one of this number already.
            runs_of_rounds.append([])
            by_run.append(runs_of_rounds[-1])
        runs_of_rounds[cell_counts[round_number]].append(cell)
        cell_counts[round_number] += 1
    return Side(tuple(map(tuple, by_run)), left_out=len(cells) - len(comparable))


def shared_series(pair: Pair, requested: Sequence[str] = ()) -> list[str]:
    """Name the series to compare, which both sides have: the ``requested`` ones, ``step_ms`` also as ``step``.

    Without any: ``step_ms``, or else every series that is a time.
    """
    of_a, of_b = pair.a.series(), pair.b.series()
    shared = [name for name in of_a if name in of_b]
    if requested:
        return [name for name in shared if _is_requested(name, of_a[name].unit, requested)]
    if "step_ms" in shared:
        return ["step_ms"]
    return [name for name in shared if of_a[name].unit in TIME_UNITS]


def _is_requested(name: str, unit: str, requested: Sequence[str]) -> bool:
    return name in requested or name.removesuffix(f"_{unit}") in requested


@dataclass(frozen=True)
class Comparison:
    """Samples B against samples A of one quantity.

    Attributes:
        difference: of their medians; None where samples are not finite.
        autocorrelation_a, autocorrelation_b: of samples that follow one another.
        verdict: ``same`` where the whole interval is within SAME_PERCENT of 1, ``undecided`` where the samples cannot
            tell. Of memory, ``slower`` says that B needs more.
        reason: why there is no interval, and how many samples would give one.
    """

    a: Measured
    b: Measured
    difference: Difference | None
    autocorrelation_a: float | None
    autocorrelation_b: float | None
    verdict: Verdict
    reason: str | None = None

    @property
    def stalls(self) -> float | None:
        """Return the ratio of means over that of medians: above 1 where B has more slow samples than A, or slower."""
        if self.difference is None or self.difference.ratio is None:
            return None
        mean_a, mean_b = fmean(self.a.all_values), fmean(self.b.all_values)
        return mean_b / mean_a / self.difference.ratio if mean_a > 0 and mean_b > 0 else None

    @property
    def verdict_text(self) -> str:
        """Return ``differs: slower``, ``same within 2.1 %`` or ``undecided``."""
        difference = self.difference
        if difference is None or self.verdict != "same":
            return f"differs: {self.verdict}" if self.verdict in ("faster", "slower") else self.verdict
        return statistics.same_within(difference.ratio_low or 1.0, difference.ratio_high or 1.0)  # 1 without ratios.

    @property
    def slower_percent(self) -> float:
        """Return by how much B is slower than A, negative where it is faster; infinite or zero without a ratio."""
        difference = self.difference
        if difference is None or difference.ratio is None:
            # As bad as can be: samples that are not finite, or worse than samples that are not above 0.
            return math.inf if difference is None or _is_worse(difference, self.a.unit) else 0.0
        return 100 * ((1 / difference.ratio if self._higher_is_better else difference.ratio) - 1)

    @property
    def slower_percent_at_most(self) -> float:
        """Return the upper end of the confidence interval of :attr:`slower_percent`; infinite where there is none."""
        difference = self.difference
        if difference is None or difference.ratio_low is None or difference.ratio_high is None:
            return 0.0 if self.verdict == "same" else math.inf  # "same" without a ratio: no significant difference.
        return 100 * ((1 / difference.ratio_low if self._higher_is_better else difference.ratio_high) - 1)

    @property
    def _higher_is_better(self) -> bool:
        return self.a.unit in HIGHER_IS_BETTER


def _is_worse(difference: Difference, unit: str) -> bool:
    a, b = difference.median_a, difference.median_b
    return b < a if unit in HIGHER_IS_BETTER else b > a


def _too_few(difference: Difference, counts: tuple[int, int], significance: float) -> str:
    """Explain why no difference could be significant; ``counts`` are the samples of A and B."""
    a, b = counts if difference.level == "samples" else difference.independent
    fewest, percent = statistics.fewest_samples(significance), 100 * significance
    return (
        f"{a} against {b} {difference.level} decide nothing at {percent:g} %: {fewest} against {fewest} are the fewest"
    )


Compared = dict[str, list[tuple[Pair, Comparison]]]  # By metric, in the order in which the metrics first appear.


def compare_samples(a: Measured, b: Measured, significance: float = SIGNIFICANCE) -> Comparison:
    """Compare two series of the same unit, by :func:`~cs336sys.results.statistics.compare_sides`."""
    counts = {name: sum(not math.isfinite(value) for value in side.all_values) for name, side in (("A", a), ("B", b))}
    not_finite = [f"{count} of {name}" for name, count in counts.items() if count]
    if not_finite:  # Then it has neither a difference nor autocorrelations.
        fault = f"samples are not finite: {' and '.join(not_finite)}"
        return Comparison(
            a, b, difference=None, autocorrelation_a=None, autocorrelation_b=None, verdict="undecided", reason=fault
        )
    difference = statistics.compare_sides(a.values, b.values, significance)
    if a.values == b.values:
        ratio = None if difference.ratio is None else 1.0  # The same file twice, however few or noisy its samples.
        difference = replace(difference, ratio_low=ratio, ratio_high=ratio, p_value=1.0, to_decide=None)
    verdict: Verdict = "undecided"
    reason = None
    low, high = difference.ratio_low, difference.ratio_high
    if difference.ratio is None and a.unit in TIME_UNITS | HIGHER_IS_BETTER:
        reason = f"medians of {difference.median_a:g} and {difference.median_b:g} {a.unit}: nothing takes no time"
    elif difference.is_significant:
        verdict = "slower" if _is_worse(difference, a.unit) else "faster"
    elif low is None and difference.to_decide is not None:  # Too few samples for an interval.
        reason = _too_few(difference, (len(a.all_values), len(b.all_values)), significance)
    # Without a ratio, as of memory of 0 GiB, a difference that is not significant is none.
    elif low is None or high is None or statistics.same_within_percent(low, high) <= statistics.SAME_PERCENT:
        verdict = "same"
    autocorrelations = statistics.autocorrelation(a.values), statistics.autocorrelation(b.values)
    return Comparison(a, b, difference, *autocorrelations, verdict, reason)


def compare_pairs(pairs: Iterable[Pair], requested: Sequence[str] = (), significance: float = SIGNIFICANCE) -> Compared:
    """Compare measured pairs in their :func:`shared_series`; raise a UsageError if no pair has a (requested) series."""
    compared: Compared = {}
    measured = [pair for pair in pairs if pair.is_measured]
    for pair in measured:
        of_a, of_b = pair.a.series(), pair.b.series()
        for metric in shared_series(pair, requested):
            comparison = compare_samples(of_a[metric], of_b[metric], significance)
            compared.setdefault(metric, []).append((pair, comparison))
    units = {metric: comparison.a.unit for metric, ((_, comparison), *_) in compared.items()}
    missing = [
        name for name in requested if not any(_is_requested(metric, unit, [name]) for metric, unit in units.items())
    ]
    if measured and (missing or not compared):
        shared = dict.fromkeys(name for pair in measured for name in pair.a.series() if name in pair.b.series())
        choices = f"choose --metric from {', '.join(shared)}" if shared else "the files share no measured series"
        raise UsageError(f"no cell has samples of {', '.join(missing) or 'a time'} in both files: {choices}")
    return compared


def machine_differences(pairs: Iterable[Pair], a: Results, b: Results) -> dict[str, tuple[Any, Any]]:
    """List differences between the two sides' machines, versions and settings, by field: the first pair's values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for pair in pairs:
        runs = a.runs.get(pair.a.representative.run_id), b.runs.get(pair.b.representative.run_id)
        differences = model.differing_conditions(*runs) | differences
    return differences
