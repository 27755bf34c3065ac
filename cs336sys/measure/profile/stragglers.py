"""Find the rank that holds the others up, by how much, and what it does longer than they. Plain data."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cs336sys.measure.profile.analysis import Analysis
from cs336sys.measure.profile.breakdown import COMPUTING_PART, COPIES_PART, IDLE_PARTS, WAITING_PART

# One-sided, over all ranks: of so many trainings without a straggler one is said to have one.
_FALSE_ALARMS = 1e-3
# A rank that costs less of a step is nobody's concern.
_LEAST_SHARE = 0.003
# Fewer steps say nothing of their noise.
_LEAST_STEPS = 3

# What a rank can do longer than others.
_OWN_PARTS = (COMPUTING_PART, COPIES_PART, *IDLE_PARTS)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        ms, percent: by how much its own part of a step is longer than the median of the others'.
        why: what it does longer.
    """

    label: str
    ms: float
    percent: float
    why: str


def own_ms(analysis: Analysis) -> list[float]:
    """The length of each step without the time in which this rank did nothing but wait for others."""
    waiting = analysis.parts.get(WAITING_PART, (0.0,) * len(analysis.step_ms))
    return [step - waited for step, waited in zip(analysis.step_ms, waiting, strict=True)]


def find_straggler(analyses: Sequence[Analysis]) -> Straggler | None:
    """Return the rank whose own part of the steps is longer than the others', if that is no noise.

    In a step that a collective joins, all ranks take as long as the slowest, and what differs is how long each waits.
    The excess of the rank over the median of the others in each step is compared with Student's t, for one of many;
    ranks of a handful of steps could not say anything with so few false alarms.
    """
    if len(analyses) < 2 or not all(one.has_steps for one in analyses):
        return None
    count = min(len(one.step_ms) for one in analyses)
    if count < _LEAST_STEPS:
        return None
    own = [own_ms(one)[:count] for one in analyses]
    means = [statistics.fmean(values) for values in own]
    slowest = max(range(len(means)), key=means.__getitem__)
    others = [values for number, values in enumerate(own) if number != slowest]
    excess = [value - statistics.median(other[step] for other in others) for step, value in enumerate(own[slowest])]
    mean, step_ms = statistics.fmean(excess), statistics.fmean(analyses[slowest].step_ms)
    error = statistics.stdev(excess) / count**0.5
    if mean < _LEAST_SHARE * step_ms:
        return None
    if error > 0 and _upper_tail(count - 1, mean / error) * len(analyses) > _FALSE_ALARMS:
        return None
    return Straggler(analyses[slowest].label, mean, 100 * mean / step_ms, _why(analyses, slowest, mean))


def _upper_tail(degrees: int, t: float) -> float:
    """The probability of more than ``t`` by Student's t with whole degrees of freedom (Abramowitz, Stegun 26.7.3)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for power in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    if degrees % 2:
        return 0.5 - (angle + math.sin(angle) * total) / math.pi
    return 0.5 - math.sin(angle) * total / 2


def _why(analyses: Sequence[Analysis], slowest: int, excess: float) -> str:
    """The parts, and of computing the kinds of kernel, that are longer on the slowest rank, in words."""
    others = [one for number, one in enumerate(analyses) if number != slowest]
    longer = []
    for part in _OWN_PARTS:
        more = analyses[slowest].mean(part) - statistics.median(one.mean(part) for one in others)
        if more < 0.2 * excess:
            continue
        words = f"{part} {more:.3g} ms"
        if part == COMPUTING_PART and (kinds := _kinds(analyses[slowest], others, more)):
            words += f" ({kinds})"
        longer.append((more, words))
    return ", ".join(words for _, words in sorted(longer, reverse=True)) + " longer" if longer else ""


def _kinds(slowest: Analysis, others: Sequence[Analysis], excess: float) -> str:
    of_slowest, of_others = _by_kind(slowest), [_by_kind(one) for one in others]
    more = {
        kind: ms - statistics.median(other.get(kind, 0.0) for other in of_others) for kind, ms in of_slowest.items()
    }
    return ", ".join(
        f"{kind} {ms:.3g} ms" for kind, ms in sorted(more.items(), key=lambda item: -item[1]) if ms > 0.2 * excess
    )


def _by_kind(analysis: Analysis) -> Mapping[str, float]:
    totals: dict[str, float] = {}
    for kernel in analysis.kernels:
        totals[kernel.kind] = totals.get(kernel.kind, 0.0) + sum(kernel.own_ms) / len(analysis.step_ms)
    return totals
