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
class TimeChange:
    """One kernel, or one part of a step that is no kernel's, in both captures.

    Attributes:
        label: the kernel's name, or the part's; of one that another has replaced, both.
        is_kernel: False for a part: launching, the data loader, ...
        before_ms, after_ms: mean time of a step that is its own.
        low_ms, high_ms: where the true difference lies in 95 of 100 cases; infinite with too few steps to say.
        before_count, after_count: how often it runs in a step.
        before_us, after_us: mean of one run; None where there is none.
    """

    label: str
    is_kernel: bool
    kind: str
    module: str
    operator: str
    shape: str
    verdict: Verdict
    before_ms: float
    after_ms: float
    low_ms: float
    high_ms: float
    before_count: float = 0.0
    after_count: float = 0.0
    before_us: float | None = None
    after_us: float | None = None

    @property
    def delta_ms(self) -> float:
        return self.after_ms - self.before_ms

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
        keys: tuple[Callable[[KernelGroup], tuple[str, ...] | None], ...] = (
            lambda group: (group.module, group.operator, group.shape, group.name),
            lambda group: (group.module, group.operator, group.shape) if group.operator else None,
            lambda group: (group.name,),
        )
    else:
        keys = (lambda group: (short_name(group.name),),)
    pairs = _pair_by_keys(before.kernels, after.kernels, keys)
    totals = before.mean_step_ms, after.mean_step_ms
    if alike:
        # Waiting for ranks is part of the collectives' own time.
        parts = [part for part in IDLE_PARTS if part in before.parts or part in after.parts]
        pairs += [([_as_group(before, part)], [_as_group(after, part)]) for part in parts]
    else:
        totals = before.mean_kernel_ms, after.mean_kernel_ms
    steps = len(before.step_ms), len(after.step_ms)
    changes = [_change(pair, steps, before.mean_step_ms) for pair in pairs]
    changes.sort(key=lambda change: -abs(change.delta_ms))
    return CaptureDifference(*totals, not alike, tuple(changes))


def _pair_by_keys(
    before: Iterable[KernelGroup],
    after: Iterable[KernelGroup],
    keys: Sequence[Callable[[KernelGroup], tuple[str, ...] | None]],
) -> list[_Pair]:
    """Pair by the first key, what is left by the next, and so on; what no key pairs stands alone."""
    unpaired = [list(before), list(after)]
    pairs: list[_Pair] = []
    for key in keys:
        pair_of_key: dict[Any, _Pair] = defaultdict(lambda: ([], []))
        for side, groups in enumerate(unpaired):
            # Groups without a key come first, each alone.
            for number, group in sorted(enumerate(groups), key=lambda item: key(item[1]) is not None):
                pair_of_key[key(group) or (side, number)][side].append(group)
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
    step_ms = [_summed((group.own_ms for group in groups), count) for groups, count in zip(sides, steps, strict=True)]
    counts = [sum(sum(group.count) for group in groups) for groups in sides]
    lengths = [sum(sum(group.ms) for group in groups) for groups in sides]
    each = [1e3 * length / count if count else None for length, count in zip(lengths, counts, strict=True)]
    verdict, low, high = _judged(step_ms[0], step_ms[1], mean_step_ms)
    for number, groups in enumerate(sides):
        present = _summed((group.count for group in groups), steps[number])
        # A kernel of fewer steps is not always there.
        is_always = sum(count > 0 for count in present) >= 0.5 * steps[number]
        if is_always and not sides[1 - number]:
            verdict = "new" if number else "gone"
    names = [list(dict.fromkeys(group.name for group in groups)) for groups in sides]
    is_replaced = names[0] and names[1] and set(names[0]) != set(names[1])
    label = (
        " -> ".join(" + ".join(map(short_name, some)) for some in names) if is_replaced else (names[0] or names[1])[0]
    )
    example = (sides[0] or sides[1])[0]
    return TimeChange(
        label=label,
        is_kernel=bool(example.kind),
        kind=example.kind,
        module=example.module,
        operator=example.operator,
        shape=example.shape,
        verdict=verdict,
        before_ms=sum(step_ms[0]) / steps[0],
        after_ms=sum(step_ms[1]) / steps[1],
        low_ms=low,
        high_ms=high,
        before_count=counts[0] / steps[0],
        after_count=counts[1] / steps[1],
        before_us=each[0],
        after_us=each[1],
    )


def _summed(rows: Iterable[Sequence[float]], steps: int) -> list[float]:
    return [sum(values) for values in zip(*rows, strict=True)] or [0.0] * steps


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
