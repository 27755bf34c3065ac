"""The order in which a step uses its units, learned from the step before, and whether weights arrive in time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cs336sys.parallel.fsdp.unit import ShardedUnit


class GatherOrder:
    """Predicts which units are used next, on the assumption that each step uses them in the order of the one before.

    The order in which modules are registered would not do: SwiGLU runs w1, w3, w2, and a backward pass goes backwards.
    In the first step nothing is predicted.
    """

    def __init__(self) -> None:
        self._expected: list[ShardedUnit] = []  # Those that the last step used, in its order.
        self._used: list[ShardedUnit] = []  # Those that this step has used.
        self._next = 0  # Position of the next use in the expected order.

    def begin(self) -> None:
        """Begin a step: the uses of the last one are expected now."""
        if self._used:
            self._expected, self._used = self._used, []
        self._next = 0

    def use(self, unit: ShardedUnit) -> None:
        """Note that a unit is used now. Uses that were expected before it count as skipped."""
        self._used.append(unit)
        if unit in self._expected[self._next :]:
            self._next = self._expected.index(unit, self._next) + 1

    def upcoming(self, count: int) -> list[ShardedUnit]:
        """Return the ``count`` units expected next, each once, without the one in use."""
        units = [self._used[-1]]
        for unit in self._expected[self._next :]:  # Left early: a step asks at every use, and may have hundreds.
            if len(units) > count:
                break
            if unit not in units:
                units.append(unit)
        return units[1:]

    def repeats(self) -> bool:
        """Return whether the unit in use is expected to be used again before any other."""
        return self._next < len(self._expected) and self._expected[self._next] == self._used[-1]


@dataclass(frozen=True)
class GatherTiming:
    """One gather of one unit.

    Attributes:
        unit: the name of the unit, gathered for the backward pass if ``is_backward``.
        late_ms: how long the unit waited for its weights when all else was ready: nothing was computed in this time.
            On a GPU it is negative if they arrived before they were needed.
    """

    unit: str
    is_backward: bool
    late_ms: float


class GatherWatch:
    """Records when weights are needed and when they arrive: two events per gather, for which nothing waits."""

    def __init__(self) -> None:
        # As in GatherTiming, with functions that return the delay: a GPU comes to its events later.
        self._delays: list[tuple[str, bool, Callable[[], float]]] = []
        self._stream: torch.cuda.Stream | None = None

    def use(self, unit: ShardedUnit, is_backward: bool) -> None:
        """Put a unit that is being gathered into use, and record how long it waits for its weights."""
        if unit.device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(unit.device)  # Only it waits, and nothing that computes.
            needed, arrived = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            needed.record()
            unit.record_arrival(arrived, self._stream)  # Before the unit is used, which forgets the collective.
            unit.use()
            self._delays.append((unit.name, is_backward, lambda: _elapsed_ms(needed, arrived)))
        else:
            start = time.perf_counter()
            unit.use()
            late_ms = (time.perf_counter() - start) * 1e3
            self._delays.append((unit.name, is_backward, lambda: late_ms))

    def timings(self) -> list[GatherTiming]:
        """Return the timings of all gathers so far, in the order of use, once a GPU has finished them."""
        return [GatherTiming(name, is_backward, late_ms()) for name, is_backward, late_ms in self._delays]


def _elapsed_ms(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    start.synchronize()  # Both, because either may come first.
    end.synchronize()
    return start.elapsed_time(end)
