"""Break down the time of each step: every instant belongs to one kernel, or to one cause of idling."""

import statistics
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

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
    """The time of each step of a timeline, in ns.

    Attributes:
        parts: time of each step by part; the parts of a step add up to its length.
        work, step, exclusive_ns: pieces of time that belong to one work alone: which work, in which step, how long.
    """

    parts: dict[str, Times]
    work: NDArray[np.int64]
    step: NDArray[np.int64]
    exclusive_ns: Times


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
    bounds = timeline.steps.bounds
    parts: dict[str, Times] = {part: np.zeros(len(bounds), np.int64) for part in StepPart}
    pieces: list[tuple[NDArray[np.int64], ...]] = []
    classes = timeline.work_class
    start, places = timeline.start.copy(), timeline.collective_places
    wait_stop = start[places]
    if waiting_ns is not None:
        wait_stop = wait_stop + np.maximum(waiting_ns[places], 0)
        # A kernel of the main stream that begins while a collective waits has not waited for it.
        main_stream = statistics.mode(timeline.stream[classes == COMPUTING].tolist() or [-1])
        kernels = np.flatnonzero((classes == COMPUTING) & (timeline.stream == main_stream))
        last_kernel_stop = np.append(0, timeline.stop[kernels])[np.searchsorted(start[kernels], wait_stop)]
        start[places] = np.clip(last_kernel_stop, start[places], wait_stop)
    by_start = np.argsort(start[places])
    waits = Cover(start[places][by_start], wait_stop[by_start])
    order = np.argsort(start, kind="stable")
    for work_class in (COMPUTING, COMMUNICATING, COPYING):
        of_class, before_class = order[classes[order] == work_class], order[classes[order] < work_class]
        cover = Cover(start[before_class], timeline.stop[before_class])
        begin, end = uncovered_parts(start[of_class], timeline.stop[of_class])
        for step, (first, last) in enumerate(bounds.tolist()):
            low, high = np.searchsorted(end, first, side="right"), np.searchsorted(begin, last)
            begins, ends = np.maximum(begin[low:high], first), np.minimum(end[low:high], last)
            exclusive_ns = np.maximum(ends - begins - cover.within(begins, ends), 0)
            if work_class == COMPUTING and waiting_ns is not None:
                slowed_ns = np.minimum(waiting_ns[of_class[low:high]], exclusive_ns)
                # Some kernels are shorter by chance, as others are longer.
                slowed_ns *= slowed_ns.sum() > 0
                exclusive_ns -= slowed_ns
                parts[StepPart.WAITING][step] += slowed_ns.sum()
            if work_class == COMMUNICATING:
                begins, ends = np.clip(waits.start, first, last), np.clip(waits.stop, first, last)
                waited_ns = (ends - begins - cover.within(begins, ends)).sum()
                parts[StepPart.WAITING][step] += waited_ns
                parts[StepPart.COMMUNICATION][step] -= waited_ns
            is_some = exclusive_ns > 0
            parts[_PART_OF_CLASS[work_class]][step] += exclusive_ns.sum()
            pieces.append((of_class[low:high][is_some], np.full(is_some.sum(), step), exclusive_ns[is_some]))
    _add_gaps(timeline, parts, Cover(start[order], timeline.stop[order]))
    return Breakdown(parts, *(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _add_gaps(timeline: Timeline, parts: dict[str, Times], busy: Cover) -> None:
    """Add each step's idle time to the parts that say what the GPU waited for."""
    waits = Cover(timeline.waits.start, timeline.waits.stop)
    loading = Cover(timeline.loading.start, timeline.loading.stop)
    by_stop = np.argsort(timeline.stop, kind="stable")
    # After the last work comes none, which has no launch.
    launched_of_work = np.append(timeline.launched, -1)
    for step, (first, last) in enumerate(timeline.steps.bounds.tolist()):
        low, high = np.searchsorted(busy.stop, first, side="right"), np.searchsorted(busy.start, last)
        begin = np.concatenate(([first], np.maximum(busy.stop[low:high], first)))
        end = np.concatenate((np.minimum(busy.start[low:high], last), [last]))
        is_gap = end > begin
        begin, end = begin[is_gap], end[is_gap]
        next_work = np.searchsorted(timeline.start, end)
        launched = launched_of_work[next_work]
        place = np.searchsorted(timeline.stop[by_stop], begin, side="right") - 1
        next_stream = timeline.stream[np.minimum(next_work, len(timeline) - 1)]
        changes_stream = (place >= 0) & (timeline.stream[by_stop[place]] != next_stream)
        gap_ns = end - begin
        loading_ns = loading.within(begin, np.clip(launched, begin, end))
        is_queued = (launched >= 0) & (launched <= begin)
        is_launched_late = launched > begin
        is_synchronizing = is_launched_late & (waits.within(begin, begin + 1) > 0)
        parts[StepPart.LOADING][step] = loading_ns.sum()
        parts[StepPart.UNKNOWN][step] = gap_ns[launched < 0].sum()
        parts[StepPart.OTHER_STREAM][step] = gap_ns[is_queued & changes_stream].sum()
        parts[StepPart.BETWEEN_KERNELS][step] = gap_ns[is_queued & ~changes_stream].sum()
        parts[StepPart.SYNCHRONIZING_CALL][step] = (gap_ns - loading_ns)[is_synchronizing].sum()
        parts[StepPart.LAUNCHING][step] = (gap_ns - loading_ns)[is_launched_late & ~is_synchronizing].sum()
