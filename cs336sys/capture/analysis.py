"""Analyse a capture of one GPU, as plain data: the time of its steps by part, kernel, operator and module."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Capture, SavedRecord
from cs336sys.capture.intervals import Cover, Times, uncovered_parts
from cs336sys.capture.taxonomy import category_of
from cs336sys.capture.timeline import COMMUNICATING, COMPUTING, COPYING, Timeline


class StepPart(StrEnum):
    """Parts of a step: each instant belongs to one; if several of the first four go on, to the first of these."""

    COMPUTING = "computing"
    COMMUNICATION = "communication alone"
    WAITING = "waiting for ranks"
    COPIES = "copies alone"
    LAUNCHING = "launching"
    SYNCHRONIZING_CALL = "synchronising call"
    LOADING = "data loader"
    OTHER_STREAM = "another stream"
    BETWEEN_KERNELS = "between kernels"
    UNKNOWN = "unknown"


IDLE_PARTS = tuple(StepPart)[tuple(StepPart).index(StepPart.LAUNCHING) :]

_PART_OF_CLASS = {COMPUTING: StepPart.COMPUTING, COMMUNICATING: StepPart.COMMUNICATION, COPYING: StepPart.COPIES}


@dataclass(frozen=True)
class Breakdown:
    """The time of each step of a timeline, in ns; and its pieces that belong to one work alone, a row each."""

    parts: dict[str, Times]  # Time of each step by part; the parts of a step add up to its length.
    work: Times  # Of each piece, the place of the work,
    step: Times  # of the step,
    exclusive_ns: Times  # and how long it is.


def break_down(timeline: Timeline, waiting_ns: Times | None = None) -> Breakdown:
    """Assign every instant of the steps to one kernel, or to one cause of idling.

    An instant belongs to the kernel that computes in it, of several to the first; else to the collective, else to the
    copy. In a gap it belongs to what kept the next kernel from beginning: it had been launched (then it waited for
    another stream, or it is the time that the GPU takes from one kernel to the next); the program waited for a batch;
    it was in a call that waits for the GPU when the GPU became idle; else it was launching.

    Args:
        waiting_ns: how long each collective waited for the last rank, and how much longer each kernel took next to one
            that waited, which is waiting, too; None where nobody can tell.
    """
    step_bounds = timeline.steps.bounds.tolist()
    parts: dict[str, Times] = {part: np.zeros(len(step_bounds), np.int64) for part in StepPart}
    pieces: list[tuple[Times, ...]] = []  # For each class and step: the works, their step, and their exclusive ns.
    classes, stop = timeline.work_class, timeline.stop
    start, waits = _starts_and_waits(timeline, waiting_ns)
    order = np.argsort(start, kind="stable")
    for work_class in (COMPUTING, COMMUNICATING, COPYING):  # Numbered by precedence: the least comes first.
        of_class, before_class = order[classes[order] == work_class], order[classes[order] < work_class]
        covered = Cover(start[before_class], stop[before_class])
        begin, end = uncovered_parts(start[of_class], stop[of_class])
        for step, bounds in enumerate(step_bounds):
            in_step = slice(np.searchsorted(end, bounds[0], side="right"), np.searchsorted(begin, bounds[1]))
            work = of_class[in_step]
            exclusive_ns = _uncovered_ns(begin[in_step], end[in_step], bounds, covered)
            if work_class == COMPUTING and waiting_ns is not None:
                slowed_ns = np.minimum(waiting_ns[work], exclusive_ns)
                # Some are below 0, for by chance kernels are shorter, too: the sum says whether they were slowed.
                if slowed_ns.sum() > 0:
                    exclusive_ns -= slowed_ns
                    parts[StepPart.WAITING][step] += slowed_ns.sum()
            if work_class == COMMUNICATING:
                # It is a part of the collectives' time, which is added below.
                waited_ns = _uncovered_ns(waits.start, waits.stop, bounds, covered).sum()
                parts[StepPart.WAITING][step] += waited_ns
                parts[StepPart.COMMUNICATION][step] -= waited_ns
            parts[_PART_OF_CLASS[work_class]][step] += exclusive_ns.sum()
            is_some = exclusive_ns > 0
            pieces.append((work[is_some], np.full(is_some.sum(), step), exclusive_ns[is_some]))
    _add_gaps(timeline, parts, Cover(start[order], stop[order]))
    return Breakdown(parts, *(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _uncovered_ns(begin: Times, end: Times, bounds: tuple[int, int], covered: Cover) -> Times:
    """Return how long each interval is within a step's bounds, but for what is covered already."""
    begin, end = np.clip(begin, *bounds), np.clip(end, *bounds)
    return end - begin - covered.within(begin, end)


def _starts_and_waits(timeline: Timeline, waiting_ns: Times | None) -> tuple[Times, Cover]:
    """Return when each work starts, and the time in which collectives wait for other ranks.

    A kernel of the main stream that begins while a collective waits has not waited for it. So a collective starts only
    when the last such kernel has ended: until then this rank was busy, or idle for other reasons.
    """
    start, places = timeline.start.copy(), timeline.collective_places
    if waiting_ns is None:
        return start, Cover(start[:0], start[:0])
    wait_stop = start[places] + np.maximum(waiting_ns[places], 0)
    is_computing = timeline.work_class == COMPUTING
    main_stream = statistics.mode(timeline.stream[is_computing].tolist() or [-1])  # -1 without any kernel.
    kernels = np.flatnonzero(is_computing & (timeline.stream == main_stream))
    # 0 where no kernel began before.
    last_kernel_stop = np.append(0, timeline.stop[kernels])[np.searchsorted(start[kernels], wait_stop)]
    start[places] = np.clip(last_kernel_stop, start[places], wait_stop)
    by_start = np.argsort(start[places])
    return start, Cover(start[places][by_start], wait_stop[by_start])


def _add_gaps(timeline: Timeline, parts: dict[str, Times], busy: Cover) -> None:
    """Add each step's idle time to the parts that say what the GPU waited for; loading is the program's, of a batch."""
    waiting_calls = Cover(timeline.waits.start, timeline.waits.stop)
    loading = Cover(timeline.loading.start, timeline.loading.stop)
    by_stop = np.argsort(timeline.stop, kind="stable")
    launched_of_work = np.append(timeline.launched, -1)  # After the last work comes none, which has no launch.
    for step, (first, last) in enumerate(timeline.steps.bounds.tolist()):
        # Gaps are between what is busy, and at both ends of the step.
        low, high = np.searchsorted(busy.stop, first, side="right"), np.searchsorted(busy.start, last)
        begin = np.append(first, busy.stop[low:high])
        end = np.append(busy.start[low:high], last)
        is_gap = end > begin
        begin, end = begin[is_gap], end[is_gap]
        next_work = np.searchsorted(timeline.start, end)
        launched = launched_of_work[next_work]
        last_ended = np.searchsorted(timeline.stop[by_stop], begin, side="right") - 1  # By stop; -1 before all.
        next_stream = timeline.stream[np.minimum(next_work, len(timeline) - 1)]  # Any after the last work.
        changes_stream = (last_ended >= 0) & (timeline.stream[by_stop[last_ended]] != next_stream)
        gap_ns = end - begin
        # Loading counts until the next work is launched; without a launch (-1) the interval is empty.
        loading_ns = loading.within(begin, np.clip(launched, begin, end))
        is_queued = (launched >= 0) & (launched <= begin)
        is_launched_late = launched > begin
        # The call had not returned when the GPU became idle: the gap's first ns lies in it.
        is_synchronizing = is_launched_late & (waiting_calls.within(begin, begin + 1) > 0)
        parts[StepPart.LOADING][step] = loading_ns.sum()
        parts[StepPart.UNKNOWN][step] = gap_ns[launched < 0].sum()
        parts[StepPart.OTHER_STREAM][step] = gap_ns[is_queued & changes_stream].sum()
        parts[StepPart.BETWEEN_KERNELS][step] = gap_ns[is_queued & ~changes_stream].sum()
        parts[StepPart.SYNCHRONIZING_CALL][step] = (gap_ns - loading_ns)[is_synchronizing].sum()
        parts[StepPart.LAUNCHING][step] = (gap_ns - loading_ns)[is_launched_late & ~is_synchronizing].sum()


_LONG_MEDIANS = 10  # A step of so many times the median is named.
_MOST_GROUPS = 4000  # Kernels apart by name, module, operator and shape; the smallest beyond these are one group.


@dataclass(frozen=True)
class KernelGroup:
    """All work of one name, module, operator and shape; the last three fields are series over the steps."""

    name: str
    kind: str
    module: str
    operator: str
    shape: str
    count: tuple[int, ...]
    ms: tuple[float, ...]  # Their durations added up.
    own_ms: tuple[float, ...]  # The time that is theirs alone.


@dataclass(frozen=True)
class CopyTime:
    """All copies or fills of one kind within the steps; bytes of -1 are not recorded."""

    name: str
    count: int
    bytes: int
    ms: float


@dataclass(frozen=True)
class CollectiveTime:
    """All collectives of one kind, group and size within the steps."""

    kind: str
    group: str
    ranks: int
    bytes: int
    count: int
    ms: float  # Time of all of them on this rank.
    waiting_ms: float | None = None  # Of it, waiting for the last rank to come; None where that is not known.


@dataclass(frozen=True)
class Analysis(SavedRecord):
    """Analysis of one GPU of a capture."""

    file: str
    label: str  # What tells it from other GPUs and ranks; empty for the only one.
    profiler: str
    is_gpu: bool
    gpu_name: str
    rank: int | None
    steps_are: str  # How steps were found.
    has_steps: bool  # False where the capture as a whole replaces steps.
    step_ms: tuple[float, ...]  # Length of each step.
    parts: Mapping[str, tuple[float, ...]]  # Which make up the steps, in ms.
    kernels: tuple[KernelGroup, ...]
    copies: tuple[CopyTime, ...]
    collectives: tuple[CollectiveTime, ...]
    waits: Mapping[str, tuple[int, float]]  # Calls that wait for the GPU, by name: how many, and their ms.
    # Of the whole capture, in and outside of steps: events, kernel_ms (durations added up), busy_ms (at least one ran),
    # computing_ms and communication_ms (at least one of these ran), span_ms (from the first start to the last end).
    totals: Mapping[str, float]
    peak_bytes: int | None = None  # Allocated by torch, where recorded.
    step_numbers: tuple[int, ...] = ()  # As the profiler counted the steps; empty where it did not.
    damage: tuple[str, ...] = ()  # What the capture lacks, or holds that cannot be, a sentence each.
    is_idle_known: bool = True  # False where work or launches are missing from every step.

    def mean(self, part: str) -> float:
        """Return the mean ms of a part of a step; 0 for a part that no step has."""
        values = self.parts.get(part) or (0.0,)
        return sum(values) / len(values)

    @property
    def median_step_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def long_steps(self) -> list[tuple[int, float]]:
        """Return number and ms of the steps that take far longer than the median, at most half of them."""
        numbers = self.step_numbers or range(len(self.step_ms))
        least_ms = _LONG_MEDIANS * self.median_step_ms
        return [(number, ms) for number, ms in zip(numbers, self.step_ms, strict=True) if ms >= least_ms]

    def share(self, part: str) -> float:
        """Return the share, 0 to 1, of a part in the middle half of the steps by length: a long one decides nothing."""
        order = sorted(range(len(self.step_ms)), key=self.step_ms.__getitem__)
        middle = order[len(order) // 4 : len(order) - len(order) // 4]
        step_ms = sum(self.step_ms[step] for step in middle)
        part_ms = sum(self.parts[part][step] for step in middle) if part in self.parts else 0.0
        return part_ms / step_ms if step_ms else 0.0


def analyze(
    capture: Capture, timeline: Timeline, file: str, label: str, waiting_ns: Times | None = None, ranks: int = -1
) -> Analysis:
    """Sum up one GPU of a capture.

    Args:
        waiting_ns: of each work: how long a collective waited for the last rank, -1 where that is not known; how much
            longer a kernel took next to a collective that waited. None where nothing is known of any.
        ranks: how many there are, for collectives whose group was not recorded.
    """
    breakdown = break_down(timeline, waiting_ns)
    steps = timeline.steps
    return Analysis(
        file=file,
        label=label,
        profiler=capture.profiler,
        is_gpu=capture.is_gpu,
        gpu_name=capture.gpu_names.get(timeline.gpu[0], ""),  # All work of a timeline is of one GPU.
        rank=capture.rank,
        steps_are=steps.definition,
        has_steps=steps.are_found,
        step_ms=_ns_to_ms(steps.bounds[:, 1] - steps.bounds[:, 0]),
        parts={
            part: _ns_to_ms(ns)
            for part, ns in breakdown.parts.items()
            if ns.any() or (part == StepPart.WAITING and waiting_ns is not None)  # No waiting is a result, too.
        },
        kernels=_kernel_groups(timeline, breakdown),
        copies=_copy_times(timeline),
        collectives=_collective_times(timeline, waiting_ns, ranks),
        waits=_wait_times(timeline),
        totals=_totals(timeline),
        peak_bytes=capture.peak_bytes.get(timeline.gpu[0]),
        step_numbers=steps.numbers,
        damage=capture.damage.sentences + steps.left_out,
        is_idle_known=not steps.hides_idle_time,
    )


def _ns_to_ms(values: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple((values / 1e6).tolist())


def _kernel_groups(timeline: Timeline, breakdown: Breakdown) -> tuple[KernelGroup, ...]:
    """Return the work within the steps by name, module, operator and shape, the longest first."""
    steps = len(timeline.steps.bounds)
    keys = np.column_stack((timeline.name, timeline.module, timeline.operator, timeline.shape))
    groups, group_of = np.unique(keys, axis=0, return_inverse=True)
    group_of = group_of.reshape(-1)  # NumPy 2.0 has places along an axis in two dimensions.
    step = timeline.step_of(timeline.start)
    inside = step >= 0

    def sums(group: NDArray[np.int64], step: NDArray[np.int64], weights: Times | None) -> NDArray[Any]:
        """Add up weights, else count, by group and step: (groups, steps)."""
        return np.bincount(group * steps + step, weights, len(groups) * steps).reshape(-1, steps)

    counts = sums(group_of[inside], step[inside], weights=None)
    ms = sums(group_of[inside], step[inside], timeline.length[inside]) / 1e6
    exclusive_ms = sums(group_of[breakdown.work], breakdown.step, breakdown.exclusive_ns) / 1e6
    # A kernel that began before a step may take time in it.
    is_in_steps = counts.sum(axis=1) + exclusive_ms.sum(axis=1) > 0
    order = [number for number in np.argsort(-ms.sum(axis=1), kind="stable").tolist() if is_in_steps[number]]
    # The number of no text and no module, -1, points at the last.
    texts, modules = [*timeline.texts, ""], [*timeline.modules, ""]
    rows = []
    for number in order[:_MOST_GROUPS]:
        name, module, operator, shape = groups[number].tolist()
        labels = texts[name], category_of(texts[name]), modules[module], texts[operator], texts[shape]
        rows.append(KernelGroup(*labels, *(tuple(column[number].tolist()) for column in (counts, ms, exclusive_ms))))
    if others := order[_MOST_GROUPS:]:
        sums_of_others = (tuple(column[others].sum(axis=0).tolist()) for column in (counts, ms, exclusive_ms))
        rows.append(KernelGroup("(others)", category_of(""), "", "", "", *sums_of_others))
    return tuple(rows)


def _copy_times(timeline: Timeline) -> tuple[CopyTime, ...]:
    """Return the copies within the steps by name, the longest first; their bytes are -1 if those of one are unknown."""
    chosen = np.flatnonzero((timeline.work_class == COPYING) & (timeline.step_of(timeline.start) >= 0))
    rows = []
    for name in np.unique(timeline.name[chosen]).tolist():
        of_name = chosen[timeline.name[chosen] == name]
        sizes = timeline.bytes[of_name]
        total_bytes = int(sizes.sum()) if sizes.min() >= 0 else -1
        ms = float(timeline.length[of_name].sum() / 1e6)
        rows.append(CopyTime(timeline.texts[name], len(of_name), total_bytes, ms))
    return tuple(sorted(rows, key=lambda row: -row.ms))


def _collective_times(timeline: Timeline, waiting_ns: Times | None, ranks: int) -> tuple[CollectiveTime, ...]:
    """Return collectives within the steps, the longest first; unrecorded groups are taken to be of all ``ranks``."""
    step, lengths = timeline.step_of(timeline.collectives.start), timeline.collectives.length
    waits_ns = np.full(len(step), -1) if waiting_ns is None else waiting_ns[timeline.collective_places]
    members: dict[tuple[str, str, int, int], list[int]] = {}
    for number in np.flatnonzero(step >= 0).tolist():
        record = timeline.collective_records[number]
        key = (record.kind, record.group, record.ranks if record.ranks > 0 else ranks, record.bytes)
        members.setdefault(key, []).append(number)
    rows = []
    for key, numbers in members.items():
        # Collectives whose waiting is not known are left out of the sum.
        measured_ns = [waits_ns[number] for number in numbers if waits_ns[number] >= 0]
        waiting_ms = float(sum(wait_ns / 1e6 for wait_ns in measured_ns)) if measured_ns else None
        rows.append(CollectiveTime(*key, len(numbers), float(sum(lengths[numbers] / 1e6)), waiting_ms))
    return tuple(sorted(rows, key=lambda row: -row.ms))


def _wait_times(timeline: Timeline) -> dict[str, tuple[int, float]]:
    """Return how often, and for how many ms in all, calls of each name waited for the GPU within the steps."""
    waits = timeline.waits.select(timeline.step_of(timeline.waits.start) >= 0)
    lengths_ms = waits.length / 1e6
    return {
        timeline.texts[name]: (int((waits.name == name).sum()), sum(lengths_ms[waits.name == name].tolist()))
        for name in dict.fromkeys(waits.name.tolist())
    }


def _totals(timeline: Timeline) -> dict[str, float]:
    """Return sums over the whole capture, in and outside of steps, as :attr:`Analysis.totals` describes them."""
    classes = timeline.work_class

    def union_ms(*chosen: int) -> float:
        is_chosen = np.isin(classes, chosen)
        return Cover(timeline.start[is_chosen], timeline.stop[is_chosen]).total / 1e6

    return {
        "events": len(classes),
        "kernel_ms": float(timeline.length[classes != COPYING].sum() / 1e6),
        "busy_ms": union_ms(COMPUTING, COMMUNICATING, COPYING),
        "computing_ms": union_ms(COMPUTING),
        "communication_ms": union_ms(COMMUNICATING),
        "span_ms": float((timeline.stop.max() - timeline.start.min()) / 1e6),
    }
