"""Arithmetic of intervals of time: unions, how much of one lies in another, the innermost around an instant."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def uncovered_parts(start: Times, stop: Times) -> tuple[Times, Times]:
    """Return begin and end of the part of each interval that no interval before it covers; ``start`` is ordered.

    These parts do not overlap and make up the union; that of an interval that is covered wholly is empty.
    """
    covered_until = np.maximum.accumulate(stop)
    begin = start.copy()
    begin[1:] = np.maximum(start[1:], covered_until[:-1])
    return begin, np.maximum(stop, begin)


def first_rows(keys: Times, numbers: Times) -> Times:
    """Return for each number the first row of ``keys`` that equals it; -1 for none, and for numbers below 0."""
    order = np.argsort(keys, kind="stable")
    # A number beyond all keys finds the -1 at the end of the rows, which points at the -1 at the end of the keys.
    row = np.append(order, -1)[np.searchsorted(keys[order], numbers)]
    return np.where((np.append(keys, -1)[row] == numbers) & (numbers >= 0), row, -1)


def containing(windows: Times, times: Times) -> Times:
    """Return in which window each instant lies, -1 for none; ``windows``, (windows, 2), are ordered and apart."""
    window = np.searchsorted(windows[:, 0], times, side="right") - 1
    # Before the first window it is -1, which points at the last of the ends: none is before that.
    ends = np.append(windows[:, 1], np.iinfo(np.int64).min)
    return np.where(times < ends[window], window, -1)


def group_numbers(*keys: Times) -> Times:
    """Return for each row the number of its combination of keys: 0 and more, but not every number is used."""
    groups = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        distinct, numbers = np.unique(key, return_inverse=True)
        groups = groups * len(distinct) + numbers
    return groups


def is_within_another(start: Times, stop: Times, *keys: Times) -> NDArray[np.bool_]:
    """Return which intervals lie in another of equal keys; of equal intervals, all but the first do."""
    group = group_numbers(*keys)
    # Of intervals that begin together the longest comes first, so that only later ones lie in earlier ones.
    order = np.lexsort((-stop, start, group))
    _, firsts = np.unique(group[order], return_index=True)  # From 0 on: np.split's first part is empty.
    is_inner = np.zeros(len(start), bool)
    for members in np.split(order, firsts)[1:]:
        latest_stop = np.maximum.accumulate(stop[members])[:-1]
        later = members[1:]
        # An interval without length that begins where another ends follows that, and does not lie in it.
        is_inner[later] = (stop[later] <= latest_stop) & (start[later] < latest_stop)
    return is_inner


class Cover:
    """The union of intervals, ordered by start: how much of any other interval it covers."""

    def __init__(self, start: Times, stop: Times):
        begin, end = uncovered_parts(start, stop)
        is_some = end > begin
        self.start, self.stop = begin[is_some], end[is_some]
        # Covered time before each part, and at the end that of all.
        self._covered_before = np.concatenate(([0], np.cumsum(self.stop - self.start)))

    @property
    def total(self) -> int:
        return int(self._covered_before[-1])

    def until(self, time: Times) -> Times:
        """Return the covered time before each instant."""
        if not len(self.start):
            return np.zeros_like(time)
        # The part that began last; the first one for instants before all, which have no covered time before them.
        last = np.maximum(np.searchsorted(self.start, time, side="right") - 1, 0)
        within_last = np.minimum(time, self.stop[last]) - self.start[last]
        return np.maximum(self._covered_before[last] + within_last, 0)

    def within(self, start: Times, stop: Times) -> Times:
        """Return the covered time in each interval."""
        return self.until(stop) - self.until(start)


class Nested:
    """Intervals of threads that lie in each other or apart, as calls do."""

    def __init__(self, start: Times, stop: Times, thread: Times):
        self._start, self._stop, self._thread = start, stop, thread
        # Numbers of the intervals by thread and begin; of those that begin together, the longest first.
        self.order = np.lexsort((-stop, start, thread))
        self.parent = np.full(len(start), -1)  # Of each, the number of the one around it; -1 for none.
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
        """Return the number of the innermost interval around each instant on its ``thread``; -1 for none."""
        innermost = np.full(len(time), -1)
        for thread_number in np.unique(self._thread).tolist():
            of_thread = self.order[self._thread[self.order] == thread_number]
            instants = np.flatnonzero(thread == thread_number)
            place = np.searchsorted(self._start[of_thread], time[instants], side="right")
            # The last to begin, -1 before all; where it has ended, the one around it, and so on.
            last = np.append(-1, of_thread)[place]
            while np.any(has_ended := (last >= 0) & (self._stop[last] < time[instants])):
                last[has_ended] = self.parent[last[has_ended]]
            innermost[instants] = last
        return innermost
