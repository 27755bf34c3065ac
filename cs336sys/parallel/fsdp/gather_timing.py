"""Measures whether gathered weights arrive before they are needed."""

import time
from dataclasses import dataclass

import torch

from cs336sys.parallel.fsdp.unit import ShardedUnit


@dataclass(frozen=True)
class GatherTiming:
    """One gather of one unit.

    Attributes:
        unit: the name of the unit.
        is_backward: whether it was gathered for the backward pass.
        late_ms: how long the unit waited for its weights when all else was ready: nothing was computed in this time.
            On a GPU it is negative if they arrived before they were needed.
    """

    unit: str
    is_backward: bool
    late_ms: float


class GatherWatch:
    """Records when weights are needed and when they arrive: two events per gather, for which nothing waits."""

    def __init__(self) -> None:
        # Unit, whether backward, and the delay: in ms, or on a GPU from the first event to the second.
        self._notes: list[tuple[ShardedUnit, bool, float | tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        self._stream: torch.cuda.Stream | None = None

    def use(self, unit: ShardedUnit, is_backward: bool) -> None:
        """Wait for a unit that is being gathered, and record how long that takes."""
        if unit.device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(unit.device)
            needed, arrived = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            needed.record()
            unit.record_arrival(arrived, self._stream)
            unit.use()
            self._notes.append((unit, is_backward, (needed, arrived)))
        else:
            start = time.perf_counter()
            unit.use()
            self._notes.append((unit, is_backward, (time.perf_counter() - start) * 1e3))

    def timings(self) -> list[GatherTiming]:
        """The timings of all gathers so far, in the order of use; waits until a GPU has finished them."""
        return [
            GatherTiming(unit.name, is_backward, delay if isinstance(delay, float) else _elapsed_ms(*delay))
            for unit, is_backward, delay in self._notes
        ]


def _elapsed_ms(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    start.synchronize()
    end.synchronize()
    return start.elapsed_time(end)
