"""In which order a step uses its units, learned from the step before: what to gather ahead of use."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class GatherOrder(Generic[Unit]):
    """Predicts uses of units: a step uses them in the order of the step before.

    The order in which modules are registered is not it: SwiGLU runs w1, w3, w2, and a backward pass runs backwards.
    The first step predicts nothing.
    """

    def __init__(self) -> None:
        self._expected: list[Unit] = []
        self._seen: list[Unit] = []
        # The position in the expected order of the use that comes next.
        self._next = 0

    def begin(self) -> None:
        """Begin a step: what was seen in the last one is expected now."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._next = 0

    def use(self, unit: Unit) -> None:
        """Note that a unit is used now. Uses that were expected before it are taken as left out."""
        self._seen.append(unit)
        if unit in self._expected[self._next :]:
            self._next = self._expected.index(unit, self._next) + 1

    def upcoming(self, count: int) -> list[Unit]:
        """The next ``count`` units other than the one in use, each once."""
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
