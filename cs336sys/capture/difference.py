"""Compare two captures: align kernels, and give each change in ms of a step, and whether it is noise."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, median
from typing import Any, Literal

import numpy as np

from cs336sys.capture.analysis import IDLE_PARTS, Analysis, KernelGroup
from cs336sys.capture.taxonomy import short_name
from cs336sys.results.model import Samples
from cs336sys.results.statistics import SAME_PERCENT, compare_sides, difference

Verdict = Literal["slower", "faster", "new", "gone", "same", "undecided"]

_LEAST_SHARE = 1e-5  # Changes by a smaller share of a step do not matter.
# Of one row's rank test. A capture has hundreds, so that this alone names a kernel in many pairs of equal captures.
_CONFIDENCE_PERCENT = 99.0
# That any row of equal captures differs. Ranks of 6 steps are never so rare: the size of a change has to be.
_CHANCE_OF_ANY = 1e-4
# Quartiles of the distances of two normal samples, in standard deviations of one.
_QUARTILES_APART = 2 * NormalDist().inv_cdf(0.75) * math.sqrt(2)


@dataclass(frozen=True)
class SideTime:
    """Time of a kernel, or of a part of a step (launching, the data loader, ...), in one capture."""

    groups: Sequence[KernelGroup]  # Its groups of kernels, for a part one of no kind; empty where the capture lacks it.
    step_ms: Sequence[float]  # In each step, the time that is its alone.
    counts: Sequence[float]  # How often it runs in each step.

    @property
    def ms(self) -> float:
        return sum(self.step_ms) / len(self.step_ms)

    @property
    def count(self) -> float:
        return sum(self.counts) / len(self.counts)

    @property
    def us(self) -> float | None:
        """Return the mean duration of a run; None where it never runs."""
        runs = sum(self.counts)
        return 1e3 * sum(sum(group.ms) for group in self.groups) / runs if runs else None


@dataclass(frozen=True)
class TimeChange:
    """One kernel, or one part of a step, in both captures."""

    before: SideTime
    after: SideTime
    verdict: Verdict = "undecided"
    low_ms: float = -math.inf  # To high_ms, the true difference in 95 of 100 cases; infinite with too few steps to say.
    high_ms: float = math.inf

    @property
    def example(self) -> KernelGroup:
        return (self.before.groups or self.after.groups)[0]

    @property
    def label(self) -> str:
        """Return the kernel's name, or the part's; both names of a kernel that another has replaced."""
        before, after = (list(dict.fromkeys(group.name for group in side.groups)) for side in (self.before, self.after))
        if before and after and set(before) != set(after):
            return " -> ".join(" + ".join(map(short_name, names)) for names in (before, after))
        return self.example.name

    @property
    def typical_ms(self) -> float:
        return median([*self.before.step_ms, *self.after.step_ms])

    @cached_property
    def shift_and_spread_ms(self) -> tuple[float, float]:
        """Return by how much steps after are longer than before, and the standard deviation of steps of one side.

        Both come from quartiles of the differences of pairs of steps, which single outliers do not move.
        """
        # 250,000 pairs at most.
        before, after = (side.step_ms[:: 1 + len(side.step_ms) // 500] for side in (self.before, self.after))
        low, middle, high = np.quantile(np.subtract.outer(after, before), (0.25, 0.5, 0.75)).tolist()
        return middle, (high - low) / _QUARTILES_APART

    @property
    def is_kernel(self) -> bool:
        return bool(self.example.kind)

    @property
    def delta_ms(self) -> float:
        return self.after.ms - self.before.ms

    @property
    def is_significant(self) -> bool:
        return self.verdict not in ("same", "undecided")


@dataclass(frozen=True)
class CaptureDifference:
    """Changes from one capture to another, which add up to the difference of both times.

    These are of the mean step, or where two profilers made the captures, of the kernels in it.
    """

    before_ms: float
    after_ms: float
    of_kernels: bool  # Only kernels were compared.
    changes: tuple[TimeChange, ...]  # The largest first.

    @property
    def delta_ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def explained_ms(self) -> float:
        """Return the sum of the changes that are no noise."""
        return sum(change.delta_ms for change in self.changes if change.is_significant)


# Groups of kernels before and after that are one thing, as a key says that is equal for them.
_Pair = tuple[list[KernelGroup], list[KernelGroup]]
_Key = Callable[[KernelGroup], tuple[Any, ...]]


def compare_captures(before: Analysis, after: Analysis) -> CaptureDifference:
    """Compare two captures step by step.

    Kernels are paired by ``_KEYS``; the unpaired are new or gone. A change is more than noise if the rank test of
    :mod:`cs336sys.results.statistics` says so, and if it is so large that in equal captures hardly any row reaches it.
    """
    of_kernels = before.profiler != after.profiler  # Not of idle parts: profilers delay launches differently.
    pairs = _pair_by_keys(before.kernels, after.kernels, _KEYS_BY_NAME if of_kernels else _KEYS)
    if not of_kernels:
        # Waiting for ranks is part of the collectives' time.
        parts = [part for part in IDLE_PARTS if part in before.parts or part in after.parts]
        pairs += [([_as_group(before, part)], [_as_group(after, part)]) for part in parts]
    before_steps, after_steps = len(before.step_ms), len(after.step_ms)
    changes = [TimeChange(_side_time(old, before_steps), _side_time(new, after_steps)) for old, new in pairs]
    kernels = [change for change in changes if change.is_kernel and change.typical_ms]
    # The standard deviation, [1], of a typical kernel's time in a step, as a part of that time.
    noise_share = median([change.shift_and_spread_ms[1] / change.typical_ms for change in kernels] or [0.0])
    # Each row has an equal part of the chance (Bonferroni), half of it at either end.
    least_errors = NormalDist().inv_cdf(1 - _CHANCE_OF_ANY / max(1, len(changes)) / 2)
    before_ms, after_ms = sum(before.step_ms) / before_steps, sum(after.step_ms) / after_steps
    changes = [_judged(change, before_ms, noise_share, least_errors) for change in changes]
    changes.sort(key=lambda change: -abs(change.delta_ms))
    if of_kernels:  # Sums of the rows, which lack the steps' idle time.
        before_ms, after_ms = sum(change.before.ms for change in changes), sum(change.after.ms for change in changes)
    return CaptureDifference(before_ms, after_ms, of_kernels, tuple(changes))


# Kernels with equal first keys are the same, of the others those with equal second keys, and so on.
_KEYS: tuple[_Key, ...] = (
    lambda group: (group.module, group.operator, group.shape, group.name),
    # One without an operator equals no other.
    lambda group: (group.module, group.operator, group.shape) if group.operator else (id(group),),
    lambda group: (group.name,),
)
_KEYS_BY_NAME: tuple[_Key, ...] = (lambda group: (short_name(group.name),),)


def _pair_by_keys(before: Iterable[KernelGroup], after: Iterable[KernelGroup], keys: Sequence[_Key]) -> list[_Pair]:
    """Pair by the first key, what is left by the next, and so on; what no key pairs stands alone."""
    unpaired = [list(before), list(after)]
    pairs: list[_Pair] = []
    for key in keys:
        pair_of_key: dict[tuple[Any, ...], _Pair] = defaultdict(lambda: ([], []))
        for side, groups in enumerate(unpaired):
            for group in groups:
                pair_of_key[key(group)][side].append(group)
        pairs += [pair for pair in pair_of_key.values() if all(pair)]
        one_sided = [pair for pair in pair_of_key.values() if not all(pair)]
        unpaired = [[group for pair in one_sided for group in pair[side]] for side in (0, 1)]
    return [*pairs, *(([group], []) for group in unpaired[0]), *(([], [group]) for group in unpaired[1])]


def _as_group(analysis: Analysis, part: str) -> KernelGroup:
    """Return a part of the steps as a kernel of no kind that never ran, so that parts are compared as kernels are."""
    zeros = (0,) * len(analysis.step_ms)
    own_ms = analysis.parts.get(part, zeros)
    return KernelGroup(part, kind="", module="", operator="", shape="", count=zeros, ms=zeros, own_ms=own_ms)


def _side_time(groups: Sequence[KernelGroup], steps: int) -> SideTime:
    """Add groups up by step; zeros where there are none."""
    step_ms = [sum(values) for values in zip(*(group.own_ms for group in groups), strict=True)]
    counts = [float(sum(values)) for values in zip(*(group.count for group in groups), strict=True)]
    return SideTime(groups, step_ms or [0.0] * steps, counts or [0.0] * steps)


def _judged(change: TimeChange, mean_step_ms: float, noise_share: float, least_errors: float) -> TimeChange:
    """Return the change with its verdict; it is the same where the whole interval is less than SAME_PERCENT of a step.

    Args:
        noise_share: the scatter of a typical kernel, as a part of its time: in few steps, some scatter less by chance.
        least_errors: standard errors that a shift must exceed; those of equal captures hardly ever do.
    """
    before, after = (Samples("ms", "capture", tuple(side.step_ms)) for side in (change.before, change.after))
    shift_ms, spread_ms = change.shift_and_spread_ms
    samples_factor = math.sqrt(1 / len(before.measured) + 1 / len(after.measured))
    error_ms = max(spread_ms, noise_share * change.typical_ms) * samples_factor
    is_large = abs(shift_ms) > max(least_errors * error_ms, _LEAST_SHARE * mean_step_ms)
    interval = difference(after, before)
    rank_test = compare_sides([[before.measured]], [[after.measured]], (100 - _CONFIDENCE_PERCENT) / 100)
    largest_ms = max(abs(interval.low), abs(interval.high))
    verdict: Verdict = "same" if 100 * largest_ms <= SAME_PERCENT * mean_step_ms else "undecided"
    # The rank test alone names some of the hundreds of rows of equal captures; the size alone, of few steps, is chance.
    if is_large and rank_test.is_significant:
        verdict = "slower" if shift_ms > 0 else "faster"
    if not change.after.groups and _is_regular(change.before.counts, counts_without=change.after.counts):
        verdict = "gone"
    elif not change.before.groups and _is_regular(change.after.counts, counts_without=change.before.counts):
        verdict = "new"
    return replace(change, verdict=verdict, low_ms=interval.low, high_ms=interval.high)


def _is_regular(counts: Sequence[float], counts_without: Sequence[float]) -> bool:
    """Return whether a kernel runs so regularly that a capture without it is no chance."""
    # Fisher's exact test: of the steps of both captures, those in which it runs are all in one.
    runs = sum(count > 0 for count in counts)
    chance = math.comb(len(counts), runs) / math.comb(len(counts) + len(counts_without), runs)
    return runs == len(counts) or chance <= 1 - _CONFIDENCE_PERCENT / 100
