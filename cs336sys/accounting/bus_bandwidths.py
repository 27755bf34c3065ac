"""Bus bandwidths that ``allreduce`` measured, for collectives of any size."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from cs336sys.results.model import Cell


@dataclass(frozen=True)
class BusBandwidths:
    """Bus bandwidths of collectives, one after another and alone on the GPUs.

    Attributes:
        points: by kind and number of ranks, sizes in bytes, ascending, with GB/s.
    """

    points: Mapping[tuple[str, int], tuple[tuple[int, float], ...]]

    @classmethod
    def of_cells(cls, cells: Iterable[Cell], backend: str) -> Self:
        """Read them from measured cells of ``allreduce``: of one size the fastest."""
        found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for cell in cells:
            rate = cell.derived.get("back_to_back_busbw_gbps")
            if cell.command != "allreduce" or cell.status != "ok" or not rate:
                continue
            one = cell.configuration
            if one["backend"] == backend:
                sizes = found[one["collective"], one["world_size"]]
                size = cell.derived["size_bytes"]
                sizes[size] = max(rate, sizes.get(size, 0.0))
        return cls({key: tuple(sorted(sizes.items())) for key, sizes in found.items()})

    def of(self, kind: str, ranks: int, size: int) -> float | None:
        """Return the bus bandwidth of a collective, GB/s, between the next smaller and larger size in logarithms.

        Beyond the largest size it is that size's; None below the smallest, and where none was measured.
        """
        points = self.points.get((kind, ranks), ())
        at = bisect_left(points, (size, 0.0))
        if at == len(points):
            return points[-1][1] if points else None
        if points[at][0] == size:
            return points[at][1]
        if at == 0:
            return None
        (low, slow), (high, fast) = points[at - 1], points[at]
        share = math.log(size / low) / math.log(high / low)
        return slow ** (1 - share) * fast**share

    def to_json(self) -> list[Any]:
        """Return them as plain values, for JSON."""
        return [[*key, [list(point) for point in points]] for key, points in self.points.items()]

    @classmethod
    def from_json(cls, values: Iterable[Any]) -> Self:
        """Build them from what :meth:`to_json` returned."""
        return cls({(kind, ranks): tuple((size, rate) for size, rate in points) for kind, ranks, points in values})
