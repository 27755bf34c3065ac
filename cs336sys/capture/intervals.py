"""Arithmetic of intervals of time: unions, how much of one lies in another, the innermost around an instant."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def own_shares(start: Times, stop: Times) -> tuple[Times, Times]:
    """The part of each interval that none before it has covered; ordered by start. Those parts make up the union."""
    reached = np.maximum.accumulate(stop) if len(stop) else stop
    begin = start.copy()
    begin[1:] = np.maximum(start[1:], reached[:-1])
    return begin, np.maximum(stop, begin)


class Cover:
    """Cover of any interval by some others together.

    Args:
        start, stop: of these, ordered by start.
    """

    def __init__(self, start: Times, stop: Times):
        begin, end = own_shares(start, stop)
        is_some = end > begin
        self.start, self.stop = begin[is_some], end[is_some]
        self._before = np.concatenate(([0], np.cumsum(self.stop - self.start)))

    @property
    def total(self) -> int:
        return int(self._before[-1])

    def until(self, time: Times) -> Times:
        """The covered time before each instant."""
        if not len(self.start):
            return np.zeros_like(time)
        place = np.searchsorted(self.start, time, side="right") - 1
        last = np.maximum(place, 0)
        within = np.minimum(time, self.stop[last]) - self.start[last]
        return np.where(place >= 0, self._before[last] + within, 0)

    def within(self, start: Times, stop: Times) -> Times:
        """The covered time in each interval."""
        return self.until(stop) - self.until(start)


class Nested:
    """Intervals of threads that lie in each other or apart, as calls do.

    Attributes:
        order: the number of each in the arguments, by thread and begin.
        parent: of each in the order of thread and begin, the number of the one around it; -1 for none.
    """

    def __init__(self, start: Times, stop: Times, thread: Times):
        self.order = np.lexsort((-stop, start, thread))
        self._start, self._stop, thread = start[self.order], stop[self.order], thread[self.order]
        parents = np.full(len(thread), -1)
        around: list[int] = []
        of, begins, ends = thread.tolist(), self._start.tolist(), self._stop.tolist()
        for number in range(len(ends)):
            while around and (of[around[-1]] != of[number] or ends[around[-1]] <= begins[number]):
                around.pop()
            parents[number] = around[-1] if around else -1
            around.append(number)
        self.parent = parents
        numbers, first = (array.tolist() for array in np.unique(thread, return_index=True))
        self._bounds = dict(zip(numbers, pairwise([*first, len(thread)]), strict=True))

    def innermost(self, time: Times, thread: Times) -> Times:
        """The number of the innermost interval of the thread around each instant; -1 for none."""
        innermost = np.full(len(time), -1)
        for thread_number in np.unique(thread).tolist():
            if thread_number not in self._bounds:
                continue
            low, high = self._bounds[thread_number]
            chosen = np.flatnonzero(thread == thread_number)
            at = np.searchsorted(self._start[low:high], time[chosen], side="right") + low - 1
            at[at < low] = -1
            while np.any(ended := (at >= 0) & (self._stop[at] < time[chosen])):
                at[ended] = self.parent[at[ended]]
            innermost[chosen] = at
        return innermost
