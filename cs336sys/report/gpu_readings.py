"""What a table of times says about the GPU's clock while they were taken."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.measure.system import SLOWDOWNS
from cs336sys.report.tables import Column
from cs336sys.results import Cell

# A clock that is lower by more than this makes what computing limits slower by as much, more than the spread of steps.
_FALLEN_PART = 0.03

CLOCK_COLUMN = Column("sm_clock_mhz", "SM clock", "mhz")


def median_clock(cell: Cell) -> float | None:
    """The clock of the multiprocessors in MHz while the cell was measured, None where it is not known."""
    clocks = _clocks(cell.derived.get("gpu_readings") or {})
    return statistics.median(clocks) if clocks else None


def joined_readings(cells: Sequence[Cell]) -> dict[str, list[Any]] | None:
    """The readings of rounds, one after another."""
    known = [readings for cell in cells if (readings := cell.derived.get("gpu_readings"))]
    return {name: [value for one in known for value in one[name]] for name in known[0]} if known else None


def clock_notes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """A sentence where clocks fell during a cell, or something held them down."""
    seen: dict[str, list[float]] = {}
    lowest: list[tuple[float, float]] = []
    hottest: list[float] = []
    for cell in cells:
        readings = cell.derived.get("gpu_readings") or {}
        limits = [set(text.split(", ")) & SLOWDOWNS for text in readings.get("clock_limits", [])]
        for limit in set().union(*limits):
            seen.setdefault(limit, []).append(sum(limit in one for one in limits) / len(limits))
        fall = _fall(_clocks(readings))
        if fall is not None:
            lowest.append(fall)
        if fall is not None or any(limits):
            hottest += [degrees for degrees in readings["temperature_c"] if degrees is not None]
    words = [
        f"{limit} in {len(parts)} of {len(cells)} cells (up to {100 * max(parts):.0f} % of the readings)"
        for limit, parts in sorted(seen.items())
    ]
    if lowest:
        before, after = min(lowest, key=lambda fall: fall[1] / fall[0])
        words.append(f"the SM clock fell in {len(lowest)} of {len(cells)} cells, from {before:.0f} to {after:.0f} MHz")
    if not words:
        return ()
    heat = f", at up to {max(hottest):.0f} °C" if hottest else ""
    return (f"clocks: {'; '.join(words)}{heat}; steadier: --cool-down, or nvidia-smi --lock-gpu-clocks",)


def _clocks(readings: Mapping[str, Any]) -> list[float]:
    return [clock for clock in readings.get("sm_clock_mhz", ()) if clock is not None]


def _fall(clocks: Sequence[float]) -> tuple[float, float] | None:
    """The highest clock and the lowest after it, where that is noticeably lower; it rises from an idle GPU's first."""
    if not clocks:
        return None
    highest = max(clocks)
    after = min(clocks[clocks.index(highest) :])
    return (highest, after) if after < (1 - _FALLEN_PART) * highest else None
