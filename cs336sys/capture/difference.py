"""Compare two captures: align kernels, and give each change in ms of a step, and whether it is noise."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cs336sys.capture.analysis import Analysis, KernelGroup
from cs336sys.capture.breakdown import IDLE_PARTS
from cs336sys.capture.taxonomy import short_name
from cs336sys.results.model import Samples
from cs336sys.results.statistics import SAME_PERCENT, compare_sides, difference

Verdict = Literal["slower", "faster", "new", "gone", "same", "undecided"]

# A change of less of a step is nobody's concern.
_LEAST_SHARE = 1e-5
# A capture has hundreds of kernels: at 95 % one in twenty of them would be marked.
_CONFIDENCE_PERCENT = 99.0


@dataclass(frozen=True)
class SideTime:
    """Time of a kernel, or of a part of a step, in one capture.

    Attributes:
        ms: mean time of a step that is its own.
        count: how often it runs in a step.
        us: mean of one run; None where there is none.
    """

    ms: float
    count: float
    us: float | None


@dataclass(frozen=True)
class TimeChange:
    """One kernel, or one part of a step that is no kernel's, in both captures.

    Attributes:
        label: the kernel's name, or the part's; of one that another has replaced, both.
        example: one of its groups of kernels, of no kind for a part: launching, the data loader, ...
        low_ms, high_ms: where the true difference lies in 95 of 100 cases; infinite with too few steps to say.
    """

    label: str
    example: KernelGroup
    verdict: Verdict
    before: SideTime
    after: SideTime
    low_ms: float
    high_ms: float

    @property
    def is_kernel(self) -> bool:
        return bool(self.example.kind)

    @property
    def delta_ms(self) -> float:
        return self.after.ms - self.before.ms

    @property
    def is_significant(self) -> bool:
        """It is more than noise."""
        return self.verdict not in ("same", "undecided")


@dataclass(frozen=True)
class CaptureDifference:
    """Changes from one capture to another.

    Attributes:
        before_ms, after_ms: the mean step, or where two profilers made the captures, the time of it that is kernels'.
            The changes add up to their difference.
        of_kernels: only kernels were compared.
        changes: the largest first.
    """

    before_ms: float
    after_ms: float
    of_kernels: bool
    changes: tuple[TimeChange, ...]

    @property
    def delta_ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def explained_ms(self) -> float:
        """The sum of the changes that are no noise."""
        return sum(change.delta_ms for change in self.changes if change.is_significant)


# Groups of kernels before and after that are one thing.
_Pair = tuple[list[KernelGroup], list[KernelGroup]]


def compare_captures(before: Analysis, after: Analysis) -> CaptureDifference:
    """Compare two captures step by step.

    Kernels of the same module, operator, shape and name are the same; then those of the same module, operator and shape
    are, one instead of the other; then those of the same name. Captures of different profilers have names alone.
    What is left is new or gone. A change is told from noise by the rank test of
    :mod:`cs336sys.results.statistics` over the steps.
    """
    alike = before.profiler == after.profiler
    if alike:
        keys: tuple[Callable[[KernelGroup], tuple[Any, ...]], ...] = (
            lambda group: (group.module, group.operator, group.shape, group.name),
            # One without an operator is like no other.
            lambda group: (group.module, group.operator, group.shape) if group.operator else (id(group),),
            lambda group: (group.name,),
        )
    else:
        keys = (lambda group: (short_name(group.name),),)
    pairs = _pair_by_keys(before.kernels, after.kernels, keys)
    if alike:
        # Waiting for ranks is part of the collectives' own time.
        parts = [part for part in IDLE_PARTS if part in before.parts or part in after.parts]
        pairs += [([_as_group(before, part)], [_as_group(after, part)]) for part in parts]
    steps = len(before.step_ms), len(after.step_ms)
    step_ms = sum(before.step_ms) / steps[0], sum(after.step_ms) / steps[1]
    kernel_ms = [sum(sum(group.own_ms) for group in side.kernels) / len(side.step_ms) for side in (before, after)]
    changes = [_change(pair, steps, step_ms[0]) for pair in pairs]
    changes.sort(key=lambda change: -abs(change.delta_ms))
    before_ms, after_ms = step_ms if alike else kernel_ms
    return CaptureDifference(before_ms, after_ms, not alike, tuple(changes))


def _pair_by_keys(
    before: Iterable[KernelGroup],
    after: Iterable[KernelGroup],
    keys: Sequence[Callable[[KernelGroup], tuple[Any, ...]]],
) -> list[_Pair]:
    """Pair by the first key, what is left by the next, and so on; what no key pairs stands alone."""
    unpaired = [list(before), list(after)]
    pairs: list[_Pair] = []
    for key in keys:
        pair_of_key: dict[tuple[Any, ...], _Pair] = defaultdict(lambda: ([], []))
        for side, groups in enumerate(unpaired):
            for group in groups:
                pair_of_key[key(group)][side].append(group)
        pairs += [pair for pair in pair_of_key.values() if all(pair)]
        unpaired = [
            [group for pair in pair_of_key.values() if not all(pair) for group in pair[side]] for side in (0, 1)
        ]
    return [*pairs, *(([group], []) for group in unpaired[0]), *(([], [group]) for group in unpaired[1])]


def _as_group(analysis: Analysis, part: str) -> KernelGroup:
    """Return a part of the steps like a kernel that never ran."""
    none = (0,) * len(analysis.step_ms)
    return KernelGroup(part, "", "", "", "", none, none, analysis.parts.get(part, none))


def _change(sides: _Pair, steps: tuple[int, int], mean_step_ms: float) -> TimeChange:
    step_ms = [_step_sums(groups, "own_ms", count) for groups, count in zip(sides, steps, strict=True)]
    counts = [_step_sums(groups, "count", count) for groups, count in zip(sides, steps, strict=True)]
    verdict, low, high = _judged(step_ms[0], step_ms[1], mean_step_ms)
    # A kernel of fewer steps is not always there.
    is_always = [sum(count > 0 for count in of_side) >= 0.5 * len(of_side) for of_side in counts]
    if is_always[0] and not sides[1]:
        verdict = "gone"
    elif is_always[1] and not sides[0]:
        verdict = "new"
    before, after = (
        SideTime(sum(ms) / len(ms), sum(count) / len(count), _run_us(groups, sum(count)))
        for ms, count, groups in zip(step_ms, counts, sides, strict=True)
    )
    names = [list(dict.fromkeys(group.name for group in groups)) for groups in sides]
    label = (names[0] or names[1])[0]
    if all(names) and set(names[0]) != set(names[1]):
        label = " -> ".join(" + ".join(map(short_name, of_side)) for of_side in names)
    return TimeChange(label, (sides[0] or sides[1])[0], verdict, before, after, low, high)


def _step_sums(groups: Sequence[KernelGroup], column: str, steps: int) -> list[float]:
    return [sum(values) for values in zip(*(getattr(group, column) for group in groups), strict=True)] or [0.0] * steps


def _run_us(groups: Sequence[KernelGroup], count: float) -> float | None:
    return 1e3 * sum(sum(group.ms) for group in groups) / count if count else None


def _judged(before: Sequence[float], after: Sequence[float], step_ms: float) -> tuple[Verdict, float, float]:
    """Return whether the values of steps differ, and the interval of their difference.

    They are the same where the whole interval is less than SAME_PERCENT of a step.
    """
    interval = difference(Samples("ms", "capture", tuple(after)), Samples("ms", "capture", tuple(before)))
    judged = compare_sides([[before]], [[after]], confidence_percent=_CONFIDENCE_PERCENT)
    if judged.is_significant and abs(interval.estimate) >= _LEAST_SHARE * step_ms:
        return ("slower" if interval.estimate > 0 else "faster"), interval.low, interval.high
    most_ms = max(abs(interval.low), abs(interval.high))
    return ("same" if 100 * most_ms <= SAME_PERCENT * step_ms else "undecided"), interval.low, interval.high
