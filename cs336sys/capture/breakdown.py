"""Break down the time of each step: every instant belongs to one kernel, or to one cause of idling."""

import statistics
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.intervals import Cover, Times, own_shares
from cs336sys.capture.timeline import COMMUNICATING, COMPUTING, COPYING, Timeline


class StepPart(StrEnum):
    """Parts of a step. Where computing, communication and copies go on together the instant is the first one's."""

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


IDLE_PARTS = tuple(StepPart)[4:]

_PART_OF_CLASS = {COMPUTING: StepPart.COMPUTING, COMMUNICATING: StepPart.COMMUNICATION, COPYING: StepPart.COPIES}


@dataclass(frozen=True)
class Breakdown:
    """The time of each step of a timeline, in ns.

    Attributes:
        parts: time of each step by part; the parts of a step add up to its length.
        work, step, credit: pieces of the steps' time that are some work's own: which work, in which step, how long.
    """

    parts: dict[str, Times]
    work: NDArray[np.int64]
    step: NDArray[np.int64]
    credit: Times


def break_down(timeline: Timeline, waiting_ns: Times | None = None) -> Breakdown:
    """Give every instant of the steps away.

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
    last_comes = start[places]
    if waiting_ns is not None:
        last_comes = last_comes + np.maximum(waiting_ns[places], 0)
        # A kernel of the main stream that begins while a collective waits has not waited for it.
        main = statistics.mode(timeline.stream[classes == COMPUTING].tolist() or [-1])
        kernels = np.flatnonzero((classes == COMPUTING) & (timeline.stream == main))
        reached = np.append(0, timeline.stop[kernels])[np.searchsorted(start[kernels], last_comes)]
        start[places] = np.clip(reached, start[places], last_comes)
    by_start = np.argsort(start[places])
    waits = Cover(start[places][by_start], last_comes[by_start])
    order = np.argsort(start, kind="stable")
    for work_class in (COMPUTING, COMMUNICATING, COPYING):
        index, higher = order[classes[order] == work_class], order[classes[order] < work_class]
        cover = Cover(start[higher], timeline.stop[higher])
        begin, end = own_shares(start[index], timeline.stop[index])
        for step, (first, last) in enumerate(bounds.tolist()):
            low, high = np.searchsorted(end, first, side="right"), np.searchsorted(begin, last)
            begins, ends = np.maximum(begin[low:high], first), np.minimum(end[low:high], last)
            credit = np.maximum(ends - begins - cover.within(begins, ends), 0)
            if work_class == COMPUTING and waiting_ns is not None:
                slowed = np.minimum(waiting_ns[index[low:high]], credit)
                # Some are shorter by chance, as others are longer.
                slowed *= slowed.sum() > 0
                credit -= slowed
                parts[StepPart.WAITING][step] += slowed.sum()
            if work_class == COMMUNICATING:
                begins, ends = np.clip(waits.start, first, last), np.clip(waits.stop, first, last)
                waited_ns = (ends - begins - cover.within(begins, ends)).sum()
                parts[StepPart.WAITING][step] += waited_ns
                parts[StepPart.COMMUNICATION][step] -= waited_ns
            is_some = credit > 0
            parts[_PART_OF_CLASS[work_class]][step] += credit.sum()
            pieces.append((index[low:high][is_some], np.full(is_some.sum(), step), credit[is_some]))
    _add_gaps(timeline, parts, Cover(start[order], timeline.stop[order]))
    return Breakdown(parts, *(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _add_gaps(timeline: Timeline, parts: dict[str, Times], busy: Cover) -> None:
    """Add each step's idle time to the parts that say what the GPU waited for."""
    waits = Cover(timeline.waits.start, timeline.waits.stop)
    loading = Cover(timeline.loading.start, timeline.loading.stop)
    last_to_stop = np.argsort(timeline.stop, kind="stable")
    for step, (first, last) in enumerate(timeline.steps.bounds.tolist()):
        low, high = np.searchsorted(busy.stop, first, side="right"), np.searchsorted(busy.start, last)
        begin = np.concatenate(([first], np.maximum(busy.stop[low:high], first)))
        end = np.concatenate((np.minimum(busy.start[low:high], last), [last]))
        is_gap = end > begin
        begin, end = begin[is_gap], end[is_gap]
        # Which work ended the gap, and which was the last before it.
        following = np.searchsorted(timeline.start, end)
        exists = following < len(timeline.start)
        following = np.minimum(following, len(timeline.start) - 1)
        before = np.searchsorted(timeline.stop[last_to_stop], begin, side="right") - 1
        other = (before >= 0) & (timeline.stream[last_to_stop[before]] != timeline.stream[following])
        launched = np.where(exists, timeline.launched[following], -1)
        length = end - begin
        of_loader = loading.within(begin, np.clip(launched, begin, end))
        rest = length - of_loader
        is_queued = (launched >= 0) & (launched <= begin)
        is_known = launched > begin
        is_waiting = is_known & (waits.within(begin, begin + 1) > 0)
        parts[StepPart.LOADING][step] = of_loader.sum()
        parts[StepPart.UNKNOWN][step] = length[launched < 0].sum()
        parts[StepPart.OTHER_STREAM][step] = length[is_queued & other].sum()
        parts[StepPart.BETWEEN_KERNELS][step] = length[is_queued & ~other].sum()
        parts[StepPart.SYNCHRONIZING_CALL][step] = rest[is_waiting].sum()
        parts[StepPart.LAUNCHING][step] = rest[is_known & ~is_waiting].sum()
