"""Several ranks together: collectives matched, clocks aligned by their ends, who waits for whom, and which is slow."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.analysis import Analysis
from cs336sys.capture.breakdown import IDLE_PARTS, StepPart
from cs336sys.capture.capture import RECEIVE, SEND, SEND_RECEIVE, SYNCHRONIZING, SavedRecord
from cs336sys.capture.intervals import Cover, Times, group_numbers
from cs336sys.capture.timeline import COMMUNICATING, COMPUTING, Timeline

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
class RanksFound(SavedRecord):
    """Matching of ranks.

    Attributes:
        matched: how many collectives are on several ranks.
        error_us: how far their ends are apart by the clocks (see :class:`Clocks`).
        notes: how they were matched, and what was not.
        missing: which ranks there are no files of, in words; empty if none.
        why_no_waits: why waiting cannot be told; empty if it can.
        late_ms: of each rank by step, how much later than the first it came to the collectives.
        first_late_ms: likewise, to the first collective of the step alone.
        is_pipeline: ranks send to each other.
    """

    matched: int
    error_us: float
    notes: tuple[str, ...]
    missing: str = ""
    why_no_waits: str = ""
    late_ms: tuple[tuple[float, ...], ...] = ()
    first_late_ms: tuple[tuple[float, ...], ...] = ()
    is_pipeline: bool = False


@dataclass(frozen=True)
class RanksAnalysis:
    """Joint analysis of several ranks.

    Attributes:
        waiting_ns: of each rank, for each of its collectives, how long it waited for the last rank, -1 if that is not
            known; for each of its kernels, how much longer it took next to a collective that waited.
        step_numbers: of each rank; equal numbers are one step.
    """

    clocks: Clocks
    waiting_ns: tuple[Times, ...]
    step_numbers: tuple[tuple[int, ...], ...]
    matching: RanksFound


def match_ranks(timelines: Sequence[Timeline], missing: str = "") -> RanksAnalysis | None:
    """Match the collectives of ranks, align their clocks, and find who waited; None where fewer than two match.

    Collectives are the same on several ranks that have the same identifier, or the same group, kind and recorded
    sequence number, or where none was recorded the same place among those of their group and kind in the same step. A
    send is matched with its receive where both name their peers.
    """
    numbers, notes = _step_numbers(timelines)
    places, match_notes = _matched(timelines, numbers)
    records = [timeline.collective_records for timeline in timelines]
    joining = [collective for collective in places if records[collective[0][0]][collective[0][1]].kind in SYNCHRONIZING]
    if len(joining) < 2:
        return None
    clocks = _align(joining, [timeline.collectives.stop for timeline in timelines])
    aligned = [clocks.aligned(rank, timeline.collectives.start) for rank, timeline in enumerate(timelines)]
    waiting = tuple(np.full(len(times), -1) for times in aligned)
    late_ms, first_late_ms = ([np.zeros(len(timeline.steps.bounds)) for timeline in timelines] for _ in range(2))
    steps = [timeline.step_of(timeline.collectives.start) for timeline in timelines]
    lengths = [timeline.collectives.length for timeline in timelines]
    spreads = []
    is_joining = set(joining)
    # The latest are the first, so that the first of each step remains.
    for collective in sorted(places, key=lambda collective: -aligned[collective[0][0]][collective[0][1]]):
        times = [float(aligned[rank][place]) for rank, place in collective]
        if collective in is_joining:
            spreads.append(max(times) - min(times))
        for (rank, place), time in zip(collective, times, strict=True):
            waiting[rank][place] = min(int(max(times) - time), lengths[rank][place])
            if collective in is_joining and steps[rank][place] >= 0:
                first_late_ms[rank][steps[rank][place]] = (time - min(times)) / 1e6
                late_ms[rank][steps[rank][place]] += (time - min(times)) / 1e6
    spread_us = float(np.percentile(spreads, 90)) / 1e3
    error_us = clocks.error_ns / 1e3
    why_no_waits = ""
    if error_us > spread_us:
        why_no_waits = f"clocks are known to {error_us:.3g} us, and ranks come to collectives {spread_us:.3g} us apart"
        waiting = tuple(np.full(len(times), -1) for times in aligned)
    matching = RanksFound(
        len(places),
        error_us,
        (*notes, *match_notes),
        missing,
        why_no_waits,
        tuple(tuple(row.tolist()) for row in late_ms),
        tuple(tuple(row.tolist()) for row in first_late_ms),
        any(record.kind in (SEND, RECEIVE) for of_rank in records for record in of_rank),
    )
    return RanksAnalysis(clocks, _with_slowed_kernels(timelines, numbers, waiting), numbers, matching)


def _with_slowed_kernels(
    timelines: Sequence[Timeline], numbers: Sequence[tuple[int, ...]], waiting_ns: Sequence[Times]
) -> tuple[Times, ...]:
    """Add to the waiting of collectives how much longer each kernel took next to one, which occupies multiprocessors.

    It is compared with the same kernel of the ranks that did not wait meanwhile: of its name, at its place among as
    many between the launches of two collectives of a step. If ranks differ in speed, or in their batches, they do so in
    kernels next to which none waits. A kernel that no such rank has is not corrected.
    """
    texts: dict[str, int] = {}
    columns: list[tuple[Times, ...]] = []
    for rank, timeline in enumerate(timelines):
        begin, step = timeline.collectives.start, timeline.step_of(timeline.start)
        waited_ns = Cover(begin, begin + np.maximum(waiting_ns[rank], 0)).within(timeline.start, timeline.stop)
        launched = np.where(timeline.launched < 0, timeline.start, timeline.launched)
        kernels = np.flatnonzero((timeline.work_class == COMPUTING) & (step >= 0))
        kernels = kernels[np.lexsort((timeline.start[kernels], launched[kernels]))]
        place = np.searchsorted(np.sort(launched[timeline.work_class == COMMUNICATING]), launched[kernels])
        _, firsts, of_step = np.unique(step[kernels], return_index=True, return_inverse=True)
        names = (texts.setdefault(timeline.texts[number], len(texts)) for number in timeline.name[kernels].tolist())
        number, name = np.array(numbers[rank], np.int64)[step[kernels]], np.fromiter(names, np.int64)
        rows = np.full(len(kernels), rank), number, name, place - place[firsts][of_step], kernels
        columns.append((*rows, timeline.length[kernels], waited_ns[kernels]))
    rank_of, number, name, place, kernel, length_ns, waited_ns = map(np.concatenate, zip(*columns, strict=True))
    group = group_numbers(number, name, place)
    _, series, counts = np.unique(group_numbers(rank_of, group), return_inverse=True, return_counts=True)
    nth = np.argsort(np.argsort(series, kind="stable")) - (np.cumsum(counts) - counts)[series]
    _, same = np.unique(group_numbers(group, counts[series], nth), return_inverse=True)
    is_clear = waited_ns == 0
    clear = np.bincount(same, is_clear)[same]
    speeds = np.bincount(rank_of, length_ns * (clear == len(timelines)), len(timelines))
    speed = (speeds if speeds.all() else np.ones_like(speeds))[rank_of]
    expected_ns = speed * np.bincount(same, is_clear * length_ns / speed)[same] / np.maximum(clear, 1)
    longer_ns = np.clip(length_ns - expected_ns, -waited_ns, waited_ns) * (clear > 0)
    together = tuple(np.zeros(len(timeline.start), np.int64) for timeline in timelines)
    for rank, row in enumerate(together):
        row[kernel[rank_of == rank]] = longer_ns[rank_of == rank]
        row[timelines[rank].collective_places] = waiting_ns[rank]
    return together


Place = tuple[int, int]


def _step_numbers(timelines: Sequence[Timeline]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """The numbers of each rank's steps; where no profiler counted them, their places, if all have as many; else -1."""
    are_counted = all(timeline.steps.are_counted for timeline in timelines)
    if are_counted or len({timeline.steps.count for timeline in timelines}) == 1:
        return tuple(timeline.steps.numbers for timeline in timelines), ()
    note = "the ranks hold different numbers of steps that nobody counted, so that no step is matched"
    return tuple((-1,) * len(timeline.steps.bounds) for timeline in timelines), (note,)


def _matched(
    timelines: Sequence[Timeline], numbers: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[Place, ...]], tuple[str, ...]]:
    """Places (rank, number of its collective) of each collective that more than one rank has."""
    places_of: dict[tuple, list[Place]] = defaultdict(list)
    # Of each series of a step without recorded numbers, how many each rank has.
    lengths: dict[tuple, Counter[int]] = defaultdict(Counter)
    is_without_peers = False
    for rank, timeline in enumerate(timelines):
        steps = timeline.step_of(timeline.collectives.start)
        for place, record in enumerate(timeline.collective_records):
            is_sent = record.kind in (SEND, RECEIVE, SEND_RECEIVE)
            if is_sent and record.peers is None and not record.communication:
                is_without_peers = True
                continue
            step = numbers[rank][steps[place]] if steps[place] >= 0 else -1
            kind: Any = record.peers if is_sent else record.kind
            key: tuple = (record.group, kind, step)
            if record.communication:
                key = ("", "", "number", record.communication)
            elif record.sequence >= 0 and not is_sent:
                key = (record.group, kind, "number", record.sequence)
            elif step >= 0:
                lengths[key][rank] += 1
                key = (*key, lengths[key][rank])
            else:
                continue
            places_of[key].append((rank, place))
    # Of a series that some ranks have less of, nobody knows which is whose.
    uneven = {series for series, counts in lengths.items() if len(set(counts.values())) > 1}
    matched = [
        tuple(places)
        for key, places in places_of.items()
        if len(places) > 1 and key[:3] not in uneven and len({rank for rank, _ in places}) == len(places)
    ]
    notes = []
    if lengths:
        some = "some collectives have" if any(key[2] == "number" for key in places_of) else "collectives have"
        notes.append(f"{some} no recorded sequence number, and were matched by their order in each step")
    if is_without_peers:
        notes.append("sends and receives do not name their peers, and were not matched")
    if uneven:
        notes.append(
            f"{len(uneven)} series of collectives of a step were left out: ranks have different numbers of them"
        )
    return matched, tuple(notes)


def _align(places: Sequence[tuple[Place, ...]], stops: Sequence[Times]) -> Clocks:
    """Fit offset and drift of each rank's clock so that collectives end together on all.

    Least squares of each end's distance from the mean of its collective, reweighted so that those that end apart count
    less (Huber). The first rank's clock is right by definition.
    """
    ranks = len(stops)
    origin = np.array([times[0] if len(times) else 0 for times in stops], np.int64)
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


# One-sided, over all ranks: of so many trainings without a straggler one is said to have one.
_FALSE_ALARMS = 1e-3
# A rank that costs less of a step is nobody's concern.
_LEAST_SHARE = 0.003
# Where a larger excess than this share of a step cannot be ruled out, nobody can say that there is none.
_MOST_UNSEEN = 0.05
_LEAST_STEPS = 3
# A step of many times the median is a pause.
_PAUSE_MEDIANS = 3
# What no other rank makes longer.
_LOCAL_PARTS = (StepPart.COMPUTING, StepPart.COPIES, *IDLE_PARTS)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        ms, percent: by how much it computes, copies and idles longer in a step than the median of the others.
        why: what it does longer.
    """

    label: str
    file: str
    ms: float
    percent: float
    why: str


@dataclass(frozen=True)
class RankAnswer:
    """Find the ranks that hold the others up.

    Attributes:
        stragglers: the slowest first; empty for none.
        why_unknown: why nobody can say; empty if it is known.
        unseen_percent: a smaller excess, of a step, would not be seen.
    """

    stragglers: tuple[Straggler, ...] = ()
    why_unknown: str = ""
    unseen_percent: float = 0.0


def local_ms(analysis: Analysis) -> list[float]:
    """Return how long a rank computes, copies and idles in each step, which no other rank makes longer."""
    parts = [analysis.parts[part] for part in _LOCAL_PARTS if part in analysis.parts]
    return [sum(values) for values in zip(*parts, strict=True)] if parts else [0.0] * len(analysis.step_ms)


def find_stragglers(analyses: Sequence[Analysis], ranks: RanksFound | None) -> RankAnswer:
    """Find the ranks that come last to the collectives because they compute, copy or idle longer.

    In a step that a collective joins, all ranks take as long as the slowest. The excess of a rank over the median of
    the others in each step is compared with Student's t, for one of many. Time in collectives does not count: a slow
    link, or the last stage of a pipeline, makes it longer. Neither does what collectives that wait slow down.
    """
    if not all(analysis.has_steps for analysis in analyses):
        return RankAnswer(why_unknown="the captures show no steps")
    if not all(analysis.is_idle_known for analysis in analyses):
        return RankAnswer(why_unknown="work or launches are missing from their steps")
    if ranks is None:
        return RankAnswer(why_unknown="no collectives of theirs could be matched")
    steps, step_ms = _common_steps(analyses)
    if not steps:
        return RankAnswer(why_unknown="the ranks have no step in common")
    count = len(analyses)
    means, errors = _excess_ms(list(map(local_ms, analyses)), steps)
    slowest = int(means.argmax())
    if len(steps) < _LEAST_STEPS:
        seen = ""
        if means[slowest] >= _LEAST_SHARE * step_ms:
            percent = 100 * means[slowest] / step_ms
            seen = f"; in {'it' if len(steps) == 1 else 'them'} {analyses[slowest].label} takes {percent:.1f} % longer"
        few = "one step is" if len(steps) == 1 else f"{len(steps)} steps are"
        return RankAnswer(why_unknown=f"{few} too few to tell a slow rank from noise{seen}")
    deviations = _t_quantile(len(steps) - 1, _FALSE_ALARMS / count)
    is_slow = (means >= np.maximum(_LEAST_SHARE * step_ms, deviations * errors)) & (means >= 0.5 * means[slowest])
    candidates = np.flatnonzero(is_slow).tolist()
    unseen = means[slowest] + errors[slowest] * _t_quantile(len(steps) - 1, 0.05 / count)
    if not candidates:
        if ranks.missing:
            return RankAnswer(why_unknown=f"{ranks.missing}, and may be what the others wait for")
        percent = max(100 * unseen / step_ms, 100 * _LEAST_SHARE)
        if percent > 100 * _MOST_UNSEEN:
            return RankAnswer(why_unknown=f"the steps vary: a rank could take {percent:.1f} % of a step longer unseen")
        # Files of earlier versions hold no such times. Stages of a pipeline come one after another.
        if ranks.first_late_ms and not ranks.is_pipeline:
            means, errors = _excess_ms(ranks.first_late_ms, steps)
            last = int(means.argmax())
            if means[last] > max(percent * step_ms / 100, deviations * errors[last]):
                late = f"comes {means[last]:.3g} ms later than the others to the first collective of a step"
                return RankAnswer(why_unknown=f"{analyses[last].label} {late}, yet does not compute or idle longer")
        return RankAnswer(unseen_percent=percent)
    if ranks.why_no_waits:
        return RankAnswer(why_unknown=ranks.why_no_waits)
    late_ms = [statistics.fmean(row[step[rank]] for step in steps) for rank, row in enumerate(ranks.late_ms)]
    stragglers = []
    for rank in sorted(candidates, key=lambda rank: -means[rank]):
        others = [ms for other, ms in enumerate(late_ms) if other not in candidates]
        if ranks.is_pipeline or not others or late_ms[rank] - statistics.median(others) >= 0.3 * means[rank]:
            excess_ms = float(means[rank])
            about = analyses[rank].label, analyses[rank].file, excess_ms, 100 * excess_ms / step_ms
            stragglers.append(Straggler(*about, _longer_parts(analyses, rank, excess_ms)))
    if not stragglers:
        longer = f"computes or idles {100 * means[slowest] / step_ms:.1f} % of a step longer"
        return RankAnswer(why_unknown=f"{analyses[slowest].label} {longer}, and does not come last to the collectives")
    return RankAnswer(tuple(stragglers))


def _excess_ms(
    times_ms: Sequence[Sequence[float]], steps: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return by how much times of each rank by step exceed the median of the others', and the mean's standard error."""
    times = np.array([[row[step[rank]] for step in steps] for rank, row in enumerate(times_ms)])
    excess = np.array([row - np.median(np.delete(times, rank, 0), axis=0) for rank, row in enumerate(times)])
    return excess.mean(axis=1), excess.std(axis=1, ddof=min(1, len(steps) - 1)) / len(steps) ** 0.5


def _common_steps(analyses: Sequence[Analysis]) -> tuple[list[tuple[int, ...]], float]:
    """Places of each step that all ranks have, in the steps of each, without pauses; and the median length."""
    numbers = [analysis.step_numbers or tuple(range(len(analysis.step_ms))) for analysis in analyses]
    common = sorted(set.intersection(*map(set, numbers)) - {-1})
    places = [tuple(row.index(number) for row in numbers) for number in common]
    lengths = [max(analysis.step_ms[step[rank]] for rank, analysis in enumerate(analyses)) for step in places]
    median = statistics.median(lengths) if lengths else 0.0
    return [step for step, ms in zip(places, lengths, strict=True) if ms <= _PAUSE_MEDIANS * median], median


def _t_quantile(degrees: int, tail: float) -> float:
    """Return the value that Student's t exceeds with this probability, to 1 part in 1000, for 2 degrees and more.

    It is the tangent, times the root of the degrees, of an angle whose density is ``cosine ** (degrees - 1)``.
    """
    angles = np.linspace(math.pi / 2, 0, 1_000_001)
    beyond = np.cumsum(np.cos(angles) ** (degrees - 1))
    return math.sqrt(degrees) * math.tan(angles[np.searchsorted(beyond, 2 * tail * beyond[-1])])


def _longer_parts(analyses: Sequence[Analysis], rank: int, excess_ms: float) -> str:
    """The parts, and of computing the kinds of kernel, that are longer on a rank, in words."""
    parts: list[dict[str, float]] = [{part: analysis.mean(part) for part in _LOCAL_PARTS} for analysis in analyses]
    descriptions = []
    for part, ms in _longer(parts, rank, 0.2 * excess_ms):
        kinds = _longer(list(map(_kind_ms, analyses)), rank, 0.2 * ms) if part == StepPart.COMPUTING else []
        listed = ", ".join(f"{kind} {kind_ms:.3g} ms" for kind, kind_ms in kinds)
        descriptions.append(f"{part} {ms:.3g} ms" + (f" ({listed})" if listed else ""))
    return ", ".join(descriptions) + " longer" if descriptions else ""


def _longer(times_ms: Sequence[Mapping[str, float]], rank: int, least_ms: float) -> list[tuple[str, float]]:
    """Return which times of a rank are longer than the median of the others, and by how much; the most first."""
    others = [times for other, times in enumerate(times_ms) if other != rank]
    more = [(name, ms - statistics.median(o.get(name, 0.0) for o in others)) for name, ms in times_ms[rank].items()]
    return sorted(((name, ms) for name, ms in more if ms > least_ms), key=lambda item: -item[1])


def _kind_ms(analysis: Analysis) -> Mapping[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for kernel in analysis.kernels:
        totals[kernel.kind] += sum(kernel.own_ms) / len(analysis.step_ms)
    return totals
