"""The order in which a step uses its units, learned from the step before: it tells what to gather ahead of use."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class GatherOrder(Generic[Unit]):
    """Predicts which units are used next, on the assumption that each step uses them in the order of the one before.

    The order in which modules are registered would not do: SwiGLU runs w1, w3, w2, and a backward pass goes backwards.
    In the first step nothing is predicted.
    """

    def __init__(self) -> None:
        self._expected: list[Unit] = []
        self._seen: list[Unit] = []
        # Position of the next use in the expected order.
        self._next = 0

    def begin(self) -> None:
        """Begin a step: the uses of the last one are expected now."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._next = 0

    def use(self, unit: Unit) -> None:
        """Note that a unit is used now. Uses that were expected before it count as skipped."""
        self._seen.append(unit)
        if unit in self._expected[self._next :]:
            self._next = self._expected.index(unit, self._next) + 1

    def upcoming(self, count: int) -> list[Unit]:
        """The ``count`` units expected next, each once, without the one in use."""
        found: list[Unit] = []
        position = self._next
        while len(found) < count and position < len(self._expected):
            unit = self._expected[position]
            if unit != self._seen[-1] and unit not in found:
                found.append(unit)
            position += 1
        return found

    def repeats(self) -> bool:
        """Whether the unit in use is expected to be used again before any other."""
        return self._next < len(self._expected) and self._expected[self._next] == self._seen[-1]
