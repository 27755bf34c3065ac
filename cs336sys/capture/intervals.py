"""Arithmetic of intervals of time: unions, how much of one lies in another, the innermost around an instant."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def uncovered_parts(start: Times, stop: Times) -> tuple[Times, Times]:
    """Return begin and end of the part of each interval that no interval before it covers; ``start`` is ordered.

    These parts do not overlap and make up the union.
    """
    covered_until = np.maximum.accumulate(stop) if len(stop) else stop
    begin = start.copy()
    begin[1:] = np.maximum(start[1:], covered_until[:-1])
    return begin, np.maximum(stop, begin)


def first_rows(keys: Times, numbers: Times) -> Times:
    """Return for each number the first row of ``keys`` that equals it; -1 for none, and for numbers below 0."""
    order = np.append(np.argsort(keys, kind="stable"), -1)
    row = order[np.searchsorted(keys[order[:-1]], numbers)]
    return np.where((np.append(keys, -1)[row] == numbers) & (numbers >= 0), row, -1)


def containing(windows: Times, times: Times) -> Times:
    """Return in which window each instant lies, -1 for none; ``windows``, (windows, 2), are ordered and apart."""
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
    """Return which intervals lie in another of equal keys."""
    _, group = np.unique(group_numbers(*keys), return_inverse=True)
    stops, stop_rank = np.unique(stop, return_inverse=True)
    order = np.lexsort((-stop, start, group))
    # Increases with the group, and in it with the stop, so that its maximum so far is of the same group.
    reach = (group * len(stop) + stop_rank)[order]
    latest = np.maximum.accumulate(reach)[:-1]
    is_inner = np.zeros(len(start), bool)
    is_inner[order[1:]] = (reach[1:] <= latest) & (start[order[1:]] < stops[latest % max(1, len(stop))])
    return is_inner


class Cover:
    """The union of intervals, ordered by start: how much of any other interval it covers."""

    def __init__(self, start: Times, stop: Times):
        begin, end = uncovered_parts(start, stop)
        is_some = end > begin
        self.start, self.stop = begin[is_some], end[is_some]
        self._before = np.concatenate(([0], np.cumsum(self.stop - self.start)))

    @property
    def total(self) -> int:
        return int(self._before[-1])

    def until(self, time: Times) -> Times:
        """Return the covered time before each instant."""
        if not len(self.start):
            return np.zeros_like(time)
        place = np.searchsorted(self.start, time, side="right") - 1
        last = np.maximum(place, 0)
        within_last = np.minimum(time, self.stop[last]) - self.start[last]
        return np.where(place >= 0, self._before[last] + within_last, 0)

    def within(self, start: Times, stop: Times) -> Times:
        """Return the covered time in each interval."""
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
        open_intervals: list[int] = []
        threads, begins, ends = thread.tolist(), start.tolist(), stop.tolist()
        for number in self.order.tolist():
            while open_intervals:
                innermost = open_intervals[-1]
                if threads[innermost] == threads[number] and ends[innermost] > begins[number]:
                    self.parent[number] = innermost
                    break
                open_intervals.pop()
            open_intervals.append(number)

    def innermost(self, time: Times, thread: Times) -> Times:
        """Return the number of the innermost interval of the thread around each instant; -1 for none."""
        innermost = np.full(len(time), -1)
        for thread_number in np.unique(thread).tolist():
            of_thread = self.order[self._thread[self.order] == thread_number]
            if not len(of_thread):
                continue
            chosen = np.flatnonzero(thread == thread_number)
            place = np.searchsorted(self._start[of_thread], time[chosen], side="right") - 1
            # The last to begin; where it has ended, the one around it, and so on.
            last = np.where(place >= 0, of_thread[place], -1)
            while np.any(has_ended := (last >= 0) & (self._stop[last] < time[chosen])):
                last[has_ended] = self.parent[last[has_ended]]
            innermost[chosen] = last
        return innermost
