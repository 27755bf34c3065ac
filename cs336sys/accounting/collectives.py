"""Collective operations on paper: one call, the memory and bandwidth it needs, and a line through measured times.

The size of a message, ``S``, is that of the whole array: what one rank contributes to an all-reduce or broadcasts, what
an all-gather delivers to each rank, what each rank brings to a reduce-scatter. Source of sizes and bandwidths:
NVIDIA/nccl-tests, ``doc/PERFORMANCE.md``. Times of ring algorithms are in :mod:`cs336sys.accounting.rings`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.errors import UsageError, choose_from

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what part of ``S`` the busiest link must carry, whatever the algorithm.

    With ``n`` ranks each element of an all-reduce takes ``n - 1`` additions and ``n - 1`` deliveries, which ``n`` links
    share: ``2 (n - 1) / n``. All-gather and reduce-scatter are one half of it, ``(n - 1) / n``. A broadcast sends all
    through the root's link: 1. One rank alone communicates nothing: 0.

    Raises:
        UsageError: the collective is none of :data:`COLLECTIVES`, or there is no rank.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks: must be at least 1")
    if collective not in COLLECTIVES:
        raise UsageError(f"unknown collective '{collective}': {choose_from(collective, COLLECTIVES)}")
    share = (ranks - 1) / ranks
    if collective == "all_reduce":
        return 2 * share
    if collective == "broadcast":
        return 1.0 if ranks > 1 else 0.0
    return share


def buffer_bytes(collective: str, message_bytes: int, ranks: int) -> int:
    """Bytes that one rank's tensors take: all-reduce and broadcast work in place, the others need a part besides."""
    if collective in ("all_gather", "reduce_scatter"):
        return message_bytes + message_bytes // ranks
    return message_bytes


@dataclass(frozen=True)
class AlphaBeta:
    """How long messages take: ``latency_s + message_bytes / bytes_per_s``.

    The first term is known as alpha, the inverse of ``bytes_per_s`` as beta (Hockney 1994, "The communication challenge
    for MPP"). ``bytes_per_s`` is the algorithm bandwidth of endless messages, infinite if larger ones take no longer.
    """

    latency_s: float
    bytes_per_s: float

    def time_s(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes / self.bytes_per_s

    @property
    def half_bandwidth_bytes(self) -> float:
        """The message that takes as long to start as to transfer, so that it reaches half of the bandwidth."""
        return self.latency_s * self.bytes_per_s

    def largest_deviation(self, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> float:
        """The largest relative difference of the line from a measured time."""
        points = zip(sizes_bytes, times_s, strict=True)
        return max(abs(self.time_s(size) / time_s - 1) for size, time_s in points)


def fit_alpha_beta(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """The line of the least sum of relative deviations: small messages count as large ones do, outliers hardly.

    It minimizes ``sum(|a + b S - t| / t)``. Such a line goes through two of the points (Bloomfield and Steiger 1983),
    so all pairs are tried. Latency and slope are not negative: lines through one point that are level, or go through
    the origin, are tried, too.

    Raises:
        UsageError: fewer than two different sizes, or a time or size that is not positive.
    """
    points = list(zip(sizes_bytes, times_s, strict=True))
    if len({size for size, _ in points}) < 2:
        raise UsageError("a latency and a bandwidth cannot be told apart with fewer than two message sizes")
    if not all(size > 0 and time_s > 0 for size, time_s in points):
        raise UsageError("message sizes and times must be positive")
    lines = [(time_s, 0.0) for _, time_s in points] + [(0.0, time_s / size) for size, time_s in points]
    for (size, time_s), (other_size, other_s) in itertools.combinations(points, 2):
        if size != other_size:
            slope = (other_s - time_s) / (other_size - size)
            lines.append((time_s - slope * size, slope))

    def deviation(line: tuple[float, float]) -> float:
        return sum(abs(line[0] + line[1] * size - time_s) / time_s for size, time_s in points)

    latency_s, slope = min((line for line in lines if min(line) >= 0), key=deviation)
    return AlphaBeta(latency_s, 1 / slope if slope else math.inf)
