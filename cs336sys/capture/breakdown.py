"""Break down the time of each step: every instant belongs to one kernel, or to one cause of idling."""

import statistics
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cs336sys.capture.intervals import Cover, Times, uncovered_parts
from cs336sys.capture.timeline import COMMUNICATING, COMPUTING, COPYING, Timeline


class StepPart(StrEnum):
    """Parts of a step; an instant in which several of the first four go on belongs to the first of these."""

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
