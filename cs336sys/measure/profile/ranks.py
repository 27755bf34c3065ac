"""Several ranks together: collectives matched, clocks aligned by their ends, who waits for whom, and which is slow."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.measure.profile.analysis import Analysis, step_of
from cs336sys.measure.profile.breakdown import COMPUTING_PART, COPIES_PART, IDLE_PARTS, WAITING_PART, Breakdown
from cs336sys.measure.profile.capture import SYNCHRONIZING
from cs336sys.measure.profile.intervals import Cover, Times
from cs336sys.measure.profile.timeline import Timeline

# A line through fewer points is no drift but noise.
_LEAST_FOR_DRIFT = 12


@dataclass(frozen=True)
class Clocks:
    """The clocks of ranks against that of the first.

    Attributes:
        offset_ns, drift: of each rank, to be added to its times: ``offset + drift * (time - origin)``.
        error_ns: how far ends of collectives are apart afterwards, in 95 of 100.
    """

    origin: Times
    offset_ns: NDArray[np.float64]
    drift: NDArray[np.float64]
    error_ns: float

    def aligned(self, rank: int, time: Times) -> NDArray[np.float64]:
        """Times of a rank by the clock of the first, in ns from its origin."""
        local = (time - self.origin[rank]).astype(float)
        return local + self.offset_ns[rank] + self.drift[rank] * local


@dataclass(frozen=True)
class RanksFound:
    """Matching of ranks: how many collectives, by which clocks (see :class:`Clocks`), and what was left out."""

    matched: int
    error_us: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON types only, for a results file."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RanksFound":
        """The inverse of :meth:`to_json`."""
        return cls(record["matched"], record["error_us"], tuple(record["notes"]))


@dataclass(frozen=True)
class RanksAnalysis:
    """Joint analysis of several ranks.

    Attributes:
        matched: how many collectives were found on more than one rank.
        waiting_ns: of each rank, for each of its collectives, how long it waited for the last rank; -1 if unmatched.
        notes: how they were matched, and what was not.
    """

    clocks: Clocks
    matched: int
    waiting_ns: tuple[Times, ...]
    notes: tuple[str, ...]

    @property
    def found(self) -> RanksFound:
        return RanksFound(self.matched, self.clocks.error_ns / 1e3, self.notes)


def match_ranks(timelines: Sequence[Timeline]) -> RanksAnalysis | None:
    """Match the collectives of ranks, align their clocks, and find who waited; None where fewer than two match.

    Collectives are the same on several ranks that have the same group, kind and recorded sequence number, or where none
    was recorded the same place among those of their group and kind in the same step.
    """
    places, notes = _matched(timelines)
    if len(places) < 2:
        return None
    index = [timeline.collectives.index for timeline in timelines]
    starts = [timeline.start[chosen] for timeline, chosen in zip(timelines, index, strict=True)]
    stops = [timeline.stop[chosen] for timeline, chosen in zip(timelines, index, strict=True)]
    kinds = [timeline.collectives.kinds for timeline in timelines]
    joining = [places_of for places_of in places if kinds[places_of[0][0]][places_of[0][1]] in SYNCHRONIZING]
    clocks = _align(len(timelines), joining or places, stops)
    waiting = tuple(np.full(len(chosen), -1) for chosen in index)
    aligned = [clocks.aligned(rank, times) for rank, times in enumerate(starts)]
    for collective in places:
        last = max(aligned[rank][place] for rank, place in collective)
        for rank, place in collective:
            length = int(stops[rank][place] - starts[rank][place])
            waiting[rank][place] = min(max(int(last - aligned[rank][place]), 0), length)
    return RanksAnalysis(clocks, len(places), waiting, notes)


Place = tuple[int, int]


def _matched(timelines: Sequence[Timeline]) -> tuple[list[tuple[Place, ...]], tuple[str, ...]]:
    """Places (rank, number of its collective) of each collective that more than one rank has."""
    places_of: dict[tuple, list[Place]] = defaultdict(list)
    numbered = ordered = False
    for rank, timeline in enumerate(timelines):
        collectives = timeline.collectives
        steps = step_of(timeline, timeline.start[collectives.index])
        counts: Counter[tuple] = Counter()
        for place in range(len(collectives.index)):
            group, kind = collectives.groups[place], collectives.kinds[place]
            if (sequence := int(collectives.sequences[place])) >= 0:
                numbered = True
                places_of[group, kind, "number", sequence].append((rank, place))
            elif steps[place] >= 0:
                ordered = True
                series = (group, kind, int(steps[place]))
                counts[series] += 1
                places_of[*series, counts[series]].append((rank, place))
    lengths: dict[tuple, set[int]] = defaultdict(set)
    for key, places in places_of.items():
        if key[2] != "number":
            lengths[key[:3]].add(len(places))
    # Of a series that some ranks have less of, nobody knows which is whose.
    uneven = {series for series, counts in lengths.items() if len(counts) > 1}
    matched = [
        tuple(places)
        for key, places in places_of.items()
        if len(places) > 1 and key[:3] not in uneven and len({rank for rank, _ in places}) == len(places)
    ]
    notes = []
    if ordered:
        some = "some collectives have" if numbered else "collectives have"
        notes.append(f"{some} no recorded sequence number, and were matched by their order in each step")
    if uneven:
        notes.append(
            f"{len(uneven)} series of collectives of a step were left out: ranks have different numbers of them"
        )
    return matched, tuple(notes)


def _align(ranks: int, places: Sequence[tuple[Place, ...]], stops: Sequence[Times]) -> Clocks:
    """Fit offset and drift of each rank's clock so that collectives end together on all.

    Least squares of each end's distance from the mean of its collective, reweighted so that those that end apart count
    less (Huber). The first rank's clock is right by definition.
    """
    origin = np.array([stops[rank][0] if len(stops[rank]) else 0 for rank in range(ranks)], np.int64)
    # 4000 are more than enough for offsets and drifts.
    chosen = places[:: max(1, len(places) // 4000)]
    rows = [
        (number, rank, float(stops[rank][place] - origin[rank]))
        for number, collective in enumerate(chosen)
        for rank, place in collective
    ]
    group, rank_of, end = map(np.array, zip(*rows, strict=True))
    scale = max(float(end.max()), 1.0)
    has_drift = len(chosen) >= _LEAST_FOR_DRIFT
    design = np.zeros((len(rows), 2 * ranks))
    design[np.arange(len(rows)), rank_of] = 1.0
    if has_drift:
        design[np.arange(len(rows)), ranks + rank_of] = end / scale
    design[:, [0, ranks]] = 0.0
    members = np.bincount(group)

    def centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
        means = np.zeros((len(members), *values.shape[1:]))
        np.add.at(means, group, values)
        return values - (means.T / members).T[group]

    centred_design, centred_end = centred(design), centred(end)
    weight = np.ones(len(rows))
    solution = np.zeros(2 * ranks)
    residual = centred_end
    for _ in range(8):
        root = np.sqrt(weight)
        solution[:] = np.linalg.lstsq(centred_design * root[:, None], -centred_end * root, rcond=None)[0]
        residual = centred_end + centred_design @ solution
        typical = 1.5 * float(np.median(np.abs(residual))) or 1.0
        weight = np.minimum(1.0, typical / np.maximum(np.abs(residual), 1e-9))
    error = float(np.percentile(np.abs(residual), 95))
    return Clocks(origin, solution[:ranks], solution[ranks:] / scale, error)


def exposed_waiting(timeline: Timeline, breakdown: Breakdown, waiting_ns: Times) -> list[float]:
    """The ms of each step in which a rank did nothing but wait for another in a collective."""
    start = timeline.start[timeline.collectives.index]
    waits = Cover(start, start + np.maximum(waiting_ns, 0))
    begin, end, _ = breakdown.exposed.T
    step = step_of(timeline, begin)
    inside = step >= 0
    waited = waits.within(begin, end)[inside]
    totals = np.bincount(step[inside], weights=waited, minlength=len(timeline.steps.bounds))
    return (totals / 1e6).tolist()


# One-sided, over all ranks: of so many trainings without a straggler one is said to have one.
_FALSE_ALARMS = 1e-3
# A rank that costs less of a step is nobody's concern.
_LEAST_SHARE = 0.003


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
    if len(analyses) < 2 or not all(analysis.has_steps for analysis in analyses):
        return None
    count = min(len(analysis.step_ms) for analysis in analyses)
    if count < 3:
        # Fewer steps say nothing of their noise.
        return None
    own_step_ms = [own_ms(analysis)[:count] for analysis in analyses]
    means = [statistics.fmean(values) for values in own_step_ms]
    slowest = max(range(len(means)), key=means.__getitem__)
    others = [values for number, values in enumerate(own_step_ms) if number != slowest]
    excess = [
        value - statistics.median(other[step] for other in others) for step, value in enumerate(own_step_ms[slowest])
    ]
    mean, step_ms = statistics.fmean(excess), statistics.fmean(analyses[slowest].step_ms)
    error = statistics.stdev(excess) / count**0.5
    if mean < _LEAST_SHARE * step_ms:
        return None
    if error > 0 and _upper_tail(count - 1, mean / error) * len(analyses) > _FALSE_ALARMS:
        return None
    return Straggler(analyses[slowest].label, mean, 100 * mean / step_ms, _longer_parts(analyses, slowest, mean))


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


def _longer_parts(analyses: Sequence[Analysis], slowest: int, excess: float) -> str:
    """The parts, and of computing the kinds of kernel, that are longer on the slowest rank, in words."""
    others = [analysis for number, analysis in enumerate(analyses) if number != slowest]
    longer = []
    for part in (COMPUTING_PART, COPIES_PART, *IDLE_PARTS):
        more = analyses[slowest].mean(part) - statistics.median(other.mean(part) for other in others)
        if more < 0.2 * excess:
            continue
        description = f"{part} {more:.3g} ms"
        if part == COMPUTING_PART and (kinds := _longer_kinds(analyses[slowest], others, more)):
            description += f" ({kinds})"
        longer.append((more, description))
    return ", ".join(description for _, description in sorted(longer, reverse=True)) + " longer" if longer else ""


def _longer_kinds(slowest: Analysis, others: Sequence[Analysis], excess: float) -> str:
    of_slowest, of_others = _by_kind(slowest), [_by_kind(other) for other in others]
    more = {
        kind: ms - statistics.median(other.get(kind, 0.0) for other in of_others) for kind, ms in of_slowest.items()
    }
    return ", ".join(
        f"{kind} {ms:.3g} ms" for kind, ms in sorted(more.items(), key=lambda item: -item[1]) if ms > 0.2 * excess
    )


def _by_kind(analysis: Analysis) -> Mapping[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for kernel in analysis.kernels:
        totals[kernel.kind] += sum(kernel.own_ms) / len(analysis.step_ms)
    return totals
