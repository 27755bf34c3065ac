"""Several ranks together: collectives matched, clocks aligned by their ends, who waits for whom, and which is slow."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.analysis import IDLE_PARTS, Analysis, StepPart
from cs336sys.capture.capture import RECEIVE, SEND, SEND_RECEIVE, SYNCHRONIZING, SavedRecord, say_capture
from cs336sys.capture.intervals import Cover, Times, group_numbers
from cs336sys.capture.timeline import COMMUNICATING, COMPUTING, Timeline
from cs336sys.findings import Finding

Place = tuple[int, int]  # A rank, and the place of a collective among its collectives.
_LEAST_FOR_DRIFT = 12  # A line through fewer collectives is no drift but noise.


@dataclass(frozen=True)
class Clocks:
    """The clocks of ranks against that of the first: offset + drift * (time - origin) is added to a rank's times."""

    origin: Times  # Of each rank, the time from which it is measured.
    offset_ns: NDArray[np.float64]
    drift: NDArray[np.float64]
    error_ns: float  # How far 95 of 100 ends of collectives are from the mean of their collective afterwards.

    def aligned(self, rank: int, time: Times) -> NDArray[np.float64]:
        """Return times of a rank by the first rank's clock, in ns from its origin."""
        local = (time - self.origin[rank]).astype(float)
        return local + self.offset_ns[rank] + self.drift[rank] * local


@dataclass(frozen=True)
class RankMatching(SavedRecord):
    """Collectives of several ranks, matched."""

    matched: int  # How many collectives are on several ranks.
    error_us: float  # Of the clocks, as in Clocks.
    notes: tuple[str, ...]  # How they were matched, and what was not.
    missing: str = ""  # Which ranks there are no files of, in words; empty if none.
    why_no_waits: str = ""  # Why waiting cannot be told; empty if it can.
    late_ms: tuple[tuple[float, ...], ...] = ()  # By rank and step: behind the first to come to the collectives.
    first_late_ms: tuple[tuple[float, ...], ...] = ()  # Likewise, to the first collective of the step alone.
    is_pipeline: bool = False  # Ranks send to each other.


@dataclass(frozen=True)
class RanksAnalysis:
    """Joint analysis of several ranks."""

    clocks: Clocks
    # Of each rank, for each of its collectives, how long it waited for the last rank, -1 if that is not known; for each
    # of its kernels, how much longer it took next to a collective that waited.
    waiting_ns: tuple[Times, ...]
    step_numbers: tuple[tuple[int, ...], ...]  # Of each rank; equal numbers are one step.
    matching: RankMatching


def match_ranks(timelines: Sequence[Timeline], missing: str = "") -> RanksAnalysis | None:
    """Match the collectives of ranks, align their clocks, and find who waited; None where fewer than two match.

    Only the kinds in SYNCHRONIZING align clocks and show who is late: other collectives a rank may leave early.
    """
    numbers, notes = _step_numbers(timelines)
    collectives, match_notes = _match_collectives(timelines, numbers)
    records = [timeline.collective_records for timeline in timelines]
    synchronizing: dict[tuple[Place, ...], None] = {}  # A set in the order of the collectives.
    for members in collectives:
        rank, place = members[0]  # All are of one kind, but for a send and its receive, which do not synchronize.
        if records[rank][place].kind in SYNCHRONIZING:
            synchronizing[members] = None
    if len(synchronizing) < 2:
        return None
    clocks = _align(tuple(synchronizing), [timeline.collectives.stop for timeline in timelines])
    aligned = [clocks.aligned(rank, timeline.collectives.start) for rank, timeline in enumerate(timelines)]
    waiting_ns = tuple(np.full(len(times), -1) for times in aligned)  # -1: not known.
    # By step: how late a rank comes to all synchronizing collectives together, and to the first.
    late_ms, first_late_ms = ([np.zeros(len(timeline.steps.bounds)) for timeline in timelines] for _ in range(2))
    steps = [timeline.step_of(timeline.collectives.start) for timeline in timelines]
    lengths = [timeline.collectives.length for timeline in timelines]
    spreads_ns = []
    start_ns = {members: [float(aligned[rank][place]) for rank, place in members] for members in collectives}
    # From the last collective to the first, so that a step's first collective is the last to write to first_late_ms.
    for members, times in sorted(start_ns.items(), key=lambda item: -item[1][0]):
        if members in synchronizing:
            spreads_ns.append(max(times) - min(times))
        for (rank, place), time in zip(members, times, strict=True):
            waiting_ns[rank][place] = min(int(max(times) - time), lengths[rank][place])
            if members in synchronizing and (step := steps[rank][place]) >= 0:
                first_late_ms[rank][step] = (time - min(times)) / 1e6
                late_ms[rank][step] += (time - min(times)) / 1e6
    # Nobody can tell who waited if clocks are further off than ranks usually come apart.
    spread_us = float(np.percentile(spreads_ns, 90)) / 1e3
    error_us = clocks.error_ns / 1e3
    why_no_waits = ""
    if error_us > spread_us:
        why_no_waits = say_capture("unknown clocks", error_us=error_us, spread_us=spread_us)
        waiting_ns = tuple(np.full(len(times), -1) for times in aligned)
    matching = RankMatching(
        matched=len(collectives),
        error_us=error_us,
        notes=(*notes, *match_notes),
        missing=missing,
        why_no_waits=why_no_waits,
        late_ms=tuple(tuple(row.tolist()) for row in late_ms),
        first_late_ms=tuple(tuple(row.tolist()) for row in first_late_ms),
        is_pipeline=any(record.kind in (SEND, RECEIVE) for of_rank in records for record in of_rank),
    )
    return RanksAnalysis(clocks, _waiting_and_slowed_ns(timelines, numbers, waiting_ns), numbers, matching)


def _waiting_and_slowed_ns(
    timelines: Sequence[Timeline], numbers: Sequence[tuple[int, ...]], waiting_ns: Sequence[Times]
) -> tuple[Times, ...]:
    """Return of each rank's work how long collectives waited, and how much longer kernels took next to one that waits.

    A waiting collective occupies multiprocessors. A kernel is compared with the same kernel of ranks on which it is
    clear, that is, no collective waits meanwhile. Kernels of two ranks are the same if they have one name, and one
    place among equally many of this name between the launches of the same two collectives of a step. How ranks differ
    in speed, or in their batches, is taken from the kernels that are clear on all of them.
    """
    name_numbers: dict[str, int] = {}
    columns: list[tuple[Times, ...]] = []
    for rank, timeline in enumerate(timelines):
        begin = timeline.collectives.start
        # -1, a wait that is not known, counts as none.
        waited_ns = Cover(begin, begin + np.maximum(waiting_ns[rank], 0)).within(timeline.start, timeline.stop)
        kernels, step, collectives_before = _kernels_in_steps(timeline)
        step_number = np.array(numbers[rank], np.int64)[step]
        # Numbers of texts differ between ranks.
        names = map(timeline.texts.__getitem__, timeline.name[kernels].tolist())
        name = np.fromiter((name_numbers.setdefault(name, len(name_numbers)) for name in names), np.int64)
        keys = np.full(len(kernels), rank), step_number, name, collectives_before
        columns.append((*keys, kernels, timeline.length[kernels], waited_ns[kernels]))
    rank_of, step_number, name, collectives_before, kernel, length_ns, waited_ns = map(
        np.concatenate, zip(*columns, strict=True)
    )
    same_kernel = _same_kernels(rank_of, group_numbers(step_number, name, collectives_before))
    is_clear = waited_ns == 0
    clear_ranks = np.bincount(same_kernel, is_clear)[same_kernel]
    # A rank is as slow as it takes time for what is clear on all; if there is nothing, all are equally slow.
    slowness_of_rank = np.bincount(rank_of, length_ns * (clear_ranks == len(timelines)), len(timelines))
    slowness = (slowness_of_rank if slowness_of_rank.all() else np.ones_like(slowness_of_rank))[rank_of]
    sum_at_equal_speed = np.bincount(same_kernel, is_clear * length_ns / slowness)[same_kernel]
    expected_ns = slowness * sum_at_equal_speed / np.maximum(clear_ranks, 1)
    # At most the time in which a collective waited; nothing where no rank shows how long it takes otherwise.
    longer_ns = np.clip(length_ns - expected_ns, -waited_ns, waited_ns) * (clear_ranks > 0)
    of_work_ns = tuple(np.zeros(len(timeline), np.int64) for timeline in timelines)
    for rank, ns in enumerate(of_work_ns):
        ns[kernel[rank_of == rank]] = longer_ns[rank_of == rank]
        ns[timelines[rank].collective_places] = waiting_ns[rank]
    return of_work_ns


def _same_kernels(rank_of: Times, namesakes: Times) -> Times:
    """Number alike what is the same kernel on several ranks: that at one place among equally many ``namesakes``."""
    _, group, counts = np.unique(group_numbers(rank_of, namesakes), return_inverse=True, return_counts=True)
    place_among_all = np.argsort(np.argsort(group, kind="stable"))  # In the order of groups, one after another.
    place = place_among_all - (np.cumsum(counts) - counts)[group]
    return np.unique(group_numbers(namesakes, counts[group], place), return_inverse=True)[1]


def _kernels_in_steps(timeline: Timeline) -> tuple[Times, Times, Times]:
    """Return the steps' kernels in launch order, the step of each, and how many collectives of the step precede it."""
    step = timeline.step_of(timeline.start)
    launched = np.where(timeline.launched < 0, timeline.start, timeline.launched)
    kernels = np.flatnonzero((timeline.work_class == COMPUTING) & (step >= 0))
    kernels = kernels[np.lexsort((timeline.start[kernels], launched[kernels]))]
    collectives_before = np.searchsorted(np.sort(launched[timeline.work_class == COMMUNICATING]), launched[kernels])
    # Without those before the first kernel of the step.
    _, firsts, of_step = np.unique(step[kernels], return_index=True, return_inverse=True)
    return kernels, step[kernels], collectives_before - collectives_before[firsts][of_step]


def _step_numbers(timelines: Sequence[Timeline]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the numbers of each rank's steps, of which equal ones are one step on all ranks, and notes for the user.

    Steps that a profiler has not counted match in their order, or not at all (-1) if ranks have not equally many.
    """
    are_counted = all(timeline.steps.are_counted for timeline in timelines)
    if are_counted or len({timeline.steps.count for timeline in timelines}) == 1:
        return tuple(timeline.steps.numbers for timeline in timelines), ()
    return tuple((-1,) * len(timeline.steps.bounds) for timeline in timelines), (say_capture("uncounted steps"),)


def _match_collectives(
    timelines: Sequence[Timeline], numbers: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[Place, ...]], tuple[str, ...]]:
    """Return the places of each collective that more than one rank has, and notes on how they were matched.

    Collectives of equal identifier are the same, or else of equal group, kind and sequence number, or else of equal
    order in a step. Sends are matched with receives where both name their peers.
    """
    places_of: dict[tuple, list[Place]] = defaultdict(list)  # Keys: group, kind, step or "number", and which.
    # Collectives without recorded numbers, by group, kind and step: how many each rank has.
    unnumbered: dict[tuple, Counter[int]] = defaultdict(Counter)
    is_without_peers = False
    for rank, timeline in enumerate(timelines):
        steps = timeline.step_of(timeline.collectives.start)
        for place, record in enumerate(timeline.collective_records):
            is_sent = record.kind in (SEND, RECEIVE, SEND_RECEIVE)
            if is_sent and record.peers is None and not record.communication:
                is_without_peers = True
                continue
            step = numbers[rank][steps[place]] if steps[place] >= 0 else -1
            kind: Any = record.peers if is_sent else record.kind  # A send and its receive have the same peers.
            key: tuple = (record.group, kind, step)
            if record.communication:  # An identifier, whatever group and kind are called.
                key = ("", "", "number", record.communication)
            elif record.sequence >= 0 and not is_sent:  # Each rank counts its own sends and receives.
                key = (record.group, kind, "number", record.sequence)
            elif step >= 0:
                unnumbered[key][rank] += 1
                key = (*key, unnumbered[key][rank])
            else:
                continue  # Outside of the steps, order says nothing.
            places_of[key].append((rank, place))
    # Where some ranks have fewer, nobody knows which of the others' are missing.
    uneven = {series for series, counts in unnumbered.items() if len(set(counts.values())) > 1}
    matched = []
    for key, places in places_of.items():
        # Numbers that a rank has twice identify nothing.
        is_once_a_rank = len({rank for rank, _ in places}) == len(places)
        if len(places) > 1 and is_once_a_rank and key[:3] not in uneven:  # Without its number, the key of its series.
            matched.append(tuple(places))
    notes = []
    if unnumbered:
        notes.append(say_capture("matched by order", some=any(key[2] == "number" for key in places_of)))
    if is_without_peers:
        notes.append(say_capture("unnamed peers"))
    if uneven:
        notes.append(say_capture("uneven series", count=len(uneven)))
    return matched, tuple(notes)


def _align(collectives: Sequence[tuple[Place, ...]], stops: Sequence[Times]) -> Clocks:
    """Fit offset and drift of each rank's clock so that collectives end together on all.

    Least squares of each end's distance from the mean of its collective, reweighted so that those that end apart count
    less (Huber). The first rank's clock is right by definition. ``stops`` are on each rank's own clock.
    """
    ranks = len(stops)
    origin = np.array([times[0] if len(times) else 0 for times in stops], np.int64)
    chosen = collectives[:: max(1, len(collectives) // 4000)]  # 4000 are more than enough for offsets and drifts.
    rows = [
        (number, rank, float(stops[rank][place] - origin[rank]))
        for number, members in enumerate(chosen)
        for rank, place in members
    ]
    group, rank_of, end = map(np.array, zip(*rows, strict=True))
    scale = max(float(end.max()), 1.0)  # So that the columns for drifts are as large as those for offsets.
    # Columns: each rank's offset, then each rank's drift; those of the first rank stay 0.
    design = np.zeros((len(rows), 2 * ranks))
    design[np.arange(len(rows)), rank_of] = 1.0
    if len(chosen) >= _LEAST_FOR_DRIFT:
        design[np.arange(len(rows)), ranks + rank_of] = end / scale
    design[:, [0, ranks]] = 0.0
    group_sizes = np.bincount(group)

    def centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values without the mean of their collective."""
        sums = np.zeros((len(group_sizes), *values.shape[1:]))
        np.add.at(sums, group, values)
        return values - (sums.T / group_sizes).T[group]

    centred_design, centred_end = centred(design), centred(end)
    weight = np.ones(len(rows))
    solution = np.zeros(2 * ranks)
    for _ in range(8):  # A few rounds settle the weights.
        root = np.sqrt(weight)
        solution[:] = np.linalg.lstsq(centred_design * root[:, None], -centred_end * root, rcond=None)[0]
        residual = np.abs(centred_end + centred_design @ solution)
        full_weight_ns = 1.5 * float(np.median(residual)) or 1.0  # Full weight up to 1.5 times the median.
        weight = np.minimum(1.0, full_weight_ns / np.maximum(residual, 1e-9))
    return Clocks(origin, solution[:ranks], drift=solution[ranks:] / scale, error_ns=float(np.percentile(residual, 95)))


_FALSE_ALARMS = 1e-3  # One of so many trainings without a straggler is said to have one: one-sided, over all ranks.
_LEAST_SHARE = 0.003  # A rank that costs less of a step is nobody's concern.
_MOST_UNSEEN = 0.05  # Where an excess of more than this share of a step may go unseen, nobody can say there is none.
_LEAST_STEPS = 3
_NEAR_SLOWEST = 0.5  # A rank is named next to the slowest from this share of its excess on.
_UNSEEN_TAIL = 0.05  # One-sided, over all ranks: how rarely an excess is larger than what is called unseen.
_LATE_SHARE = 0.3  # A straggler comes to the collectives later than the others by at least this share of its excess.
_PAUSE_MEDIANS = 3  # A step of so many times the median is a pause.
_NAMED_SHARE = 0.2  # A longer part of a step, or kind of kernel, is named from this share of the whole excess on.
_LOCAL_PARTS = (StepPart.COMPUTING, StepPart.COPIES, *IDLE_PARTS)  # No other rank makes these longer.


def local_ms(analysis: Analysis) -> list[float]:
    """Return how long a rank computes, copies and idles in each step, which no other rank makes longer."""
    parts = [analysis.parts[part] for part in _LOCAL_PARTS if part in analysis.parts]
    return [sum(values) for values in zip(*parts, strict=True)] if parts else [0.0] * len(analysis.step_ms)


def find_stragglers(analyses: Sequence[Analysis], ranks: RankMatching | None) -> list[Finding]:
    """Find the ranks that come last to the collectives because they compute, copy or idle longer.

    In a step that a collective joins, all ranks take as long as the slowest. The excess of a rank over the median of
    the others in each step is tested by Student's t, corrected for the number of ranks. Time in collectives does not
    count, nor the slowing of kernels by a collective that waits: a slow link or another rank makes them longer.

    Returns:
        one of ``straggler`` for each, with the ms that it is longer in a step, the slowest first; or ``fast ranks``,
        which wait for all others; or ``no straggler``, with the percentage of a step that could go unseen; or the
        reason why nobody can tell.
    """
    if not all(analysis.has_steps for analysis in analyses):
        return [_cannot_tell("no steps")]
    if not all(analysis.is_idle_known for analysis in analyses):
        return [_cannot_tell("missing work")]
    if ranks is None:
        return [_cannot_tell("unmatched collectives")]
    steps, step_ms = _common_steps(analyses)
    if not steps:
        return [_cannot_tell("no common step")]
    times_ms = list(map(local_ms, analyses))
    excess_ms, excess_errors_ms = _mean_excess(times_ms, steps)
    slowest = int(excess_ms.argmax())
    slowest_percent = 100 * excess_ms[slowest] / step_ms
    if len(steps) < _LEAST_STEPS:
        # The sentence names the slowest only if it would matter.
        label = analyses[slowest].label if excess_ms[slowest] >= _LEAST_SHARE * step_ms else ""
        return [_cannot_tell("few steps", label, amount=slowest_percent, steps=len(steps))]
    critical_t = _t_quantile(len(steps) - 1, _FALSE_ALARMS / len(analyses))  # Each rank has a part (Bonferroni).
    is_slow = excess_ms >= np.maximum(_LEAST_SHARE * step_ms, critical_t * excess_errors_ms)
    candidates = np.flatnonzero(is_slow & (excess_ms >= _NEAR_SLOWEST * excess_ms[slowest])).tolist()
    if not candidates:
        unseen_t = _t_quantile(len(steps) - 1, _UNSEEN_TAIL / len(analyses))
        unseen_ms = excess_ms[slowest] + unseen_t * excess_errors_ms[slowest]
        is_fast = -excess_ms >= np.maximum(_LEAST_SHARE * step_ms, critical_t * excess_errors_ms)
        if is_fast.any() and not ranks.missing:  # More than half are slow alike: the median is one of them.
            fast = [analyses[rank].label for rank in np.flatnonzero(is_fast).tolist()]
            return [Finding("fast ranks", ", ".join(fast), float(-100 * excess_ms.min() / step_ms), "percent")]
        return [_answer_without_candidates(analyses, ranks, max(unseen_ms, _LEAST_SHARE * step_ms))]
    if ranks.why_no_waits:
        return [_cannot_tell("unknown waits", reason=ranks.why_no_waits)]
    # A step is the tuple of its places on the ranks.
    mean_late_ms = [fmean(row[step[rank]] for step in steps) for rank, row in enumerate(ranks.late_ms)]
    others_ms = [ms for rank, ms in enumerate(mean_late_ms) if rank not in candidates]
    usual = [rank for rank in range(len(analyses)) if rank not in candidates] or candidates
    stragglers = []
    for rank in sorted(candidates, key=lambda rank: -excess_ms[rank]):
        compared = [rank, *(other for other in usual if other != rank)]  # Without what else is slow.
        compared_steps = [tuple(step[other] for other in compared) for step in steps]
        ms = float(_mean_excess([times_ms[other] for other in compared], compared_steps)[0][0])
        # Stages of a pipeline come one after another, whichever is slow; where all ranks are slow, none comes earlier.
        if ranks.is_pipeline or not others_ms or mean_late_ms[rank] - median(others_ms) >= _LATE_SHARE * ms:
            facts: dict[str, Any] = {"file": analyses[rank].file, "percent": 100 * ms / step_ms}
            facts["longer_parts"] = _longer_parts([analyses[other] for other in compared], ms)
            facts |= {"missing": ranks.missing} if ranks.missing else {}
            stragglers.append(Finding("straggler", analyses[rank].label, amount=ms, unit="ms", facts=facts))
    return stragglers or [_cannot_tell("not last", analyses[slowest].label, amount=slowest_percent)]


def _cannot_tell(cause: str, where: str = "", amount: float = 0.0, unit: str = "percent", **facts: Any) -> Finding:
    return Finding(cause, where, float(amount), unit, "cannot tell", facts)


def _answer_without_candidates(analyses: Sequence[Analysis], ranks: RankMatching, unseen_ms: float) -> Finding:
    """Say that no rank is slow, or why nobody can tell: up to ``unseen_ms`` in a step of a rank would not be seen."""
    steps, step_ms = _common_steps(analyses)
    unseen_percent = 100 * unseen_ms / step_ms
    if ranks.missing:
        return _cannot_tell("missing ranks", where=ranks.missing)
    if unseen_percent > 100 * _MOST_UNSEEN:
        return _cannot_tell("varying steps", amount=unseen_percent)
    # A rank may still begin its steps late: files of earlier versions lack that, and a pipeline's later stages have to.
    if ranks.first_late_ms and not ranks.is_pipeline:
        late_ms, errors_ms = _mean_excess(ranks.first_late_ms, steps)
        last = int(late_ms.argmax())
        critical_t = _t_quantile(len(steps) - 1, _FALSE_ALARMS / len(analyses))  # Each rank has a part (Bonferroni).
        if late_ms[last] > max(unseen_ms, critical_t * errors_ms[last]):
            return _cannot_tell("late start", analyses[last].label, amount=late_ms[last], unit="ms")
    return Finding("no straggler", amount=unseen_percent, unit="percent")


def _mean_excess(
    times_ms: Sequence[Sequence[float]], steps: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each rank's mean excess, in ms a step, over the others' median, and its standard error (0 of one step)."""
    times = np.array([[row[step[rank]] for step in steps] for rank, row in enumerate(times_ms)])
    excess = np.array([row - np.median(np.delete(times, rank, 0), axis=0) for rank, row in enumerate(times)])
    return excess.mean(axis=1), excess.std(axis=1, ddof=min(1, len(steps) - 1)) / len(steps) ** 0.5


def _common_steps(analyses: Sequence[Analysis]) -> tuple[list[tuple[int, ...]], float]:
    """Return the steps that all ranks have, each as its places on the ranks, and their median length in ms.

    Steps of equal numbers are the same; the number -1 matches none. Pauses, which are far longer, are left out.
    """
    numbers = [analysis.step_numbers or tuple(range(len(analysis.step_ms))) for analysis in analyses]
    common = sorted(set.intersection(*map(set, numbers)) - {-1})
    steps = [tuple(of_rank.index(number) for of_rank in numbers) for number in common]
    lengths_ms = [max(analysis.step_ms[step[rank]] for rank, analysis in enumerate(analyses)) for step in steps]
    median_ms = median(lengths_ms) if steps else 0.0
    return [step for step, ms in zip(steps, lengths_ms, strict=True) if ms <= _PAUSE_MEDIANS * median_ms], median_ms


def _t_quantile(degrees: int, tail: float) -> float:
    """Return the value that Student's t exceeds with this probability, to 1 part in 1000, for 2 degrees and more.

    It is the tangent, times the root of the degrees, of an angle whose density is ``cosine ** (degrees - 1)``.
    """
    angles = np.linspace(math.pi / 2, 0, 1_000_001)  # Of the upper half alone, which has half of the probability.
    beyond = np.cumsum(np.cos(angles) ** (degrees - 1))
    return math.sqrt(degrees) * math.tan(angles[np.searchsorted(beyond, 2 * tail * beyond[-1])])


def _longer_parts(analyses: Sequence[Analysis], excess_ms: float) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Return which parts of a step are longer on the first rank, by how many ms, and which kinds of kernel.

    A part is named from :data:`_NAMED_SHARE` of the excess on, a kind of kernel from that share of computing's.
    """
    parts: list[dict[str, float]] = [{part: analysis.mean(part) for part in _LOCAL_PARTS} for analysis in analyses]
    kinds: list[dict[str, float]] = [defaultdict(float) for _ in analyses]  # Of each rank's mean step, by kind.
    for analysis, kind_ms in zip(analyses, kinds, strict=True):
        for kernel in analysis.kernels:
            kind_ms[kernel.kind] += sum(kernel.own_ms) / len(analysis.step_ms)
    return [
        (part, ms, _longer_times(kinds, _NAMED_SHARE * ms) if part == StepPart.COMPUTING else [])
        for part, ms in _longer_times(parts, _NAMED_SHARE * excess_ms)
    ]


def _longer_times(times_ms: Sequence[Mapping[str, float]], least_ms: float) -> list[tuple[str, float]]:
    """Return which times of the first rank exceed the median of the others' by more than ``least_ms``, and how far."""
    first, *others = times_ms
    excess_ms = {name: ms - median(times.get(name, 0.0) for times in others) for name, ms in first.items()}
    return sorted(((name, ms) for name, ms in excess_ms.items() if ms > least_ms), key=lambda item: -item[1])
