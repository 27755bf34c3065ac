"""Break down the time of each step: every instant belongs to one kernel, or to one cause of idling."""

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
        exposed: (pieces, 3) begin and end of the time in which work communicates and nothing computes, and the work.
    """

    parts: dict[str, Times]
    work: NDArray[np.int64]
    step: NDArray[np.int64]
    credit: Times
    exposed: Times


def break_down(timeline: Timeline) -> Breakdown:
    """Give every instant of the steps away.

    An instant belongs to the kernel that computes in it, of several to the first; else to the collective, else to the
    copy. In a gap it belongs to what kept the next kernel from beginning: it had been launched (then it waited for
    another stream, or it is the time that the GPU takes from one kernel to the next); the program waited for a batch;
    it was in a call that waits for the GPU when the GPU became idle; else it was launching.
    """
    bounds = timeline.steps.bounds
    parts: dict[str, Times] = {part: np.zeros(len(bounds), np.int64) for part in StepPart}
    pieces: list[tuple[NDArray[np.int64], ...]] = []
    exposed = []
    classes = timeline.work_class
    for work_class in (COMPUTING, COMMUNICATING, COPYING):
        index = np.flatnonzero(classes == work_class)
        higher = np.flatnonzero(classes < work_class)
        cover = Cover(timeline.start[higher], timeline.stop[higher])
        begin, end = own_shares(timeline.start[index], timeline.stop[index])
        for step, (first, last) in enumerate(bounds.tolist()):
            low, high = np.searchsorted(end, first, side="right"), np.searchsorted(begin, last)
            from_, until = np.maximum(begin[low:high], first), np.minimum(end[low:high], last)
            credit = np.maximum(until - from_ - cover.within(from_, until), 0)
            is_some = credit > 0
            parts[_PART_OF_CLASS[work_class]][step] = credit.sum()
            pieces.append((index[low:high][is_some], np.full(is_some.sum(), step), credit[is_some]))
            if work_class == COMMUNICATING:
                exposed.append(_uncovered(cover, from_[is_some], until[is_some], index[low:high][is_some]))
    _add_gaps(timeline, parts)
    work, steps, credit = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Breakdown(parts, work, steps, credit, np.concatenate(exposed))


def _uncovered(cover: Cover, begin: Times, end: Times, work: NDArray[np.int64]) -> Times:
    """The parts of some intervals that the cover leaves out, with the work of each interval."""
    rows = []
    for first, last, number in zip(begin.tolist(), end.tolist(), work.tolist(), strict=True):
        low, high = np.searchsorted(cover.stop, first, side="right"), np.searchsorted(cover.start, last)
        edges = np.concatenate(
            ([first], np.column_stack((cover.start[low:high], cover.stop[low:high])).ravel(), [last])
        )
        free = edges.reshape(-1, 2)
        free = free[free[:, 1] > free[:, 0]]
        rows.append(np.column_stack((free, np.full(len(free), number))))
    return np.concatenate(rows) if rows else np.zeros((0, 3), np.int64)


def _add_gaps(timeline: Timeline, parts: dict[str, Times]) -> None:
    busy = Cover(timeline.start, timeline.stop)
    waits = Cover(timeline.waits[:, 0], timeline.waits[:, 1])
    loading = Cover(timeline.loading[:, 0], timeline.loading[:, 1])
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
