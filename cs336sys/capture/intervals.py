"""Arithmetic of intervals of time: unions, how much of one lies in another, the innermost around an instant."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def own_shares(start: Times, stop: Times) -> tuple[Times, Times]:
    """The part of each interval that none before it has covered; ordered by start. Those parts make up the union."""
    reached = np.maximum.accumulate(stop) if len(stop) else stop
    begin = start.copy()
    begin[1:] = np.maximum(start[1:], reached[:-1])
    return begin, np.maximum(stop, begin)


def first_rows(keys: Times, numbers: Times) -> Times:
    """Return for each number the first row that has it as its key; -1 for none, and for numbers below 0."""
    order = np.append(np.argsort(keys, kind="stable"), -1)
    place = np.searchsorted(keys[order[:-1]], numbers)
    return np.where((np.append(keys, -1)[order[place]] == numbers) & (numbers >= 0), order[place], -1)


def containing(windows: Times, times: Times) -> Times:
    """Return which of some windows, (windows, 2) in their order, each instant lies in; -1 for none."""
    place = np.searchsorted(windows[:, 0], times, side="right") - 1
    ends = np.append(windows[:, 1], np.iinfo(np.int64).min)
    return np.where(times < ends[place], place, -1)


def group_numbers(*keys: Times) -> Times:
    """Return a number for each combination of keys, from 0."""
    groups = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        distinct, numbers = np.unique(key, return_inverse=True)
        groups = groups * len(distinct) + numbers.reshape(-1)
    return groups


def is_within_another(start: Times, stop: Times, *keys: Times) -> NDArray[np.bool_]:
    """Find intervals that lie in another of equal keys."""
    _, group = np.unique(group_numbers(*keys), return_inverse=True)
    stops, place = np.unique(stop, return_inverse=True)
    order = np.lexsort((-stop, start, group))
    # Increases with the group, and in it with the stop, so that its maximum so far is of the same group.
    reach = (group * len(stop) + place)[order]
    latest = np.maximum.accumulate(reach)[:-1]
    is_inner = np.zeros(len(start), bool)
    is_inner[order[1:]] = (reach[1:] <= latest) & (start[order[1:]] < stops[latest % max(1, len(stop))])
    return is_inner


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
        return self.until(stop) - self.until(start)


class Nested:
    """Intervals of threads that lie in each other or apart, as calls do.

    Attributes:
        order: the numbers of the intervals by thread and begin; of those that begin together, the longest first.
        parent: of each, the number of the one around it; -1 for none.
    """

    def __init__(self, start: Times, stop: Times, thread: Times):
        self.order = np.lexsort((-stop, start, thread))
        self._start, self._stop, self._thread = start, stop, thread
        self.parent = np.full(len(start), -1)
        around: list[int] = []
        of, begins, ends = thread.tolist(), start.tolist(), stop.tolist()
        for number in self.order.tolist():
            while around and (of[around[-1]] != of[number] or ends[around[-1]] <= begins[number]):
                around.pop()
            if around:
                self.parent[number] = around[-1]
            around.append(number)

    def innermost(self, time: Times, thread: Times) -> Times:
        """Return the number of the innermost interval of the thread around each instant; -1 for none."""
        innermost = np.full(len(time), -1)
        for thread_number in np.unique(thread).tolist():
            of_thread = self.order[self._thread[self.order] == thread_number]
            if not len(of_thread):
                continue
            chosen = np.flatnonzero(thread == thread_number)
            place = np.searchsorted(self._start[of_thread], time[chosen], side="right") - 1
            at = np.where(place >= 0, of_thread[place], -1)
            while np.any(ended := (at >= 0) & (self._stop[at] < time[chosen])):
                at[ended] = self.parent[at[ended]]
            innermost[chosen] = at
        return innermost
