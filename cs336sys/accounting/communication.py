"""Collectives and gradient buckets on paper: bytes, times, and how much of them a step hides."""

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Self

from cs336sys.accounting.derivation import Derived, Number, minimum, number_of, symbol, why
from cs336sys.accounting.hardware import OverlapSlowdown
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell
from cs336sys.settings.operations import COLLECTIVES

# Collectives of which NVIDIA/nccl-tests (``doc/PERFORMANCE.md``) define a bus bandwidth. The size of a message, ``S``,
# counts the whole array: what one rank contributes to an all-reduce or broadcasts, what an all-gather delivers to each
# rank, what each rank brings to a reduce-scatter.
WITH_BUS_BANDWIDTH = (*COLLECTIVES, "all_to_all", "reduce")


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus over algorithm bandwidth: the part of ``S`` that the busiest link must carry, whatever the algorithm.

    With ``n`` ranks each element of an all-reduce takes ``n - 1`` additions and ``n - 1`` deliveries, which ``n`` links
    share: ``2 (n - 1) / n``. All-gather and reduce-scatter are one half of it, ``(n - 1) / n``, as all-to-all is. A
    broadcast sends all through the root's link, which a reduction receives: 1. One rank alone communicates nothing: 0.
    These are all of :data:`WITH_BUS_BANDWIDTH`.
    """
    if collective in ("broadcast", "reduce"):
        return 1.0 if ranks > 1 else 0.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def buffer_bytes(collective: str, message_bytes: int, ranks: int) -> int:
    """Return the bytes of a rank's tensors: all-reduce and broadcast work in place, the others need a part besides."""
    if collective in ("all_gather", "reduce_scatter"):
        return message_bytes + message_bytes // ranks
    return message_bytes


@dataclass(frozen=True)
class AlphaBeta:
    """The time of a message: ``latency_s + message_bytes / bytes_per_s``.

    The first term is known as alpha, the inverse of ``bytes_per_s`` as beta (Hockney 1994, "The communication challenge
    for MPP"). ``bytes_per_s`` is the algorithm bandwidth of endless messages, infinite if larger ones take no longer.
    """

    latency_s: float
    bytes_per_s: float

    def time_s(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes / self.bytes_per_s

    @property
    def has_bandwidth(self) -> bool:
        """Return whether larger messages took longer, which noise can hide."""
        return math.isfinite(self.bytes_per_s)

    @property
    def half_bandwidth_bytes(self) -> float:
        """Return the size that takes as long to start as to transfer, so that it reaches half of the bandwidth."""
        return self.latency_s * self.bytes_per_s

    def largest_deviation(self, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> float:
        """Return the largest relative difference of the line from a measured time."""
        points = zip(sizes_bytes, times_s, strict=True)
        return max(abs(self.time_s(size) / time_s - 1) for size, time_s in points)


def fit_alpha_beta(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """Fit the line of the least sum of relative deviations: small messages count as large ones do, outliers hardly.

    It minimizes ``sum(|a + b S - t| / t)``. Such a line goes through two of the points (Bloomfield and Steiger 1983),
    so all pairs are tried; and as no latency or slope is negative, level lines and those through the origin, too.

    Raises:
        UsageError: fewer than two different sizes, or a time or size that is not positive.
    """
    points = list(zip(sizes_bytes, times_s, strict=True))
    if len({size for size, _ in points}) < 2:
        raise UsageError("fitting a latency and a bandwidth needs at least two message sizes")
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


# Seconds of collectives on a ring of devices, by bandwidth alone: CS336 assignment 2 (2026), section 8.1. ``N`` devices
# each send ``W`` bytes/s to their neighbour and receive as much at the same time; ``S`` bytes is the whole tensor, one
# device's share ``S / N``. Arguments may be numbers or symbols (:mod:`cs336sys.accounting.derivation`).


def ring_all_gather_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Return the seconds of an all-gather, or of a reduce-scatter: ``N - 1`` steps, each passing on ``S / N`` bytes."""
    return (devices - 1) / devices * size_bytes / bytes_per_s


def ring_all_reduce_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Return the seconds of an all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * (devices - 1) / devices * size_bytes / bytes_per_s


def alternate_ring_all_reduce_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Return the seconds of passing whole tensors round, each device adding them up: ``N - 1`` steps of ``S`` bytes."""
    return (devices - 1) * size_bytes / bytes_per_s


def bucketing_overhead_s(gradient_bytes: Number, buckets: Number, bytes_per_s: Number, call_s: Number) -> Number:
    """Return the seconds that a step takes beyond its backward pass: ``s / (n_b w) + n_b o``; arguments may be symbols.

    The handout (2025, problem ``ddp_bucketed_benchmarking`` (b)) assumes that a bucket's gradients take as long to
    compute as to communicate: ``i`` travels while ``i + 1`` is computed. The last transfer and the calls' cost remain.

    Args:
        gradient_bytes: all gradients of one rank, ``s``.
        buckets: their number, ``n_b``; the model holds for fractions too.
        bytes_per_s: algorithm bandwidth of the all-reduce, ``w``: one rank's bytes over the time of the call.
        call_s: cost of one call besides the transfer, ``o``.
    """
    return gradient_bytes / (buckets * bytes_per_s) + buckets * call_s


def optimal_bucket_bytes(gradient_bytes: Number, bytes_per_s: Number, call_s: Number) -> Number:
    """Return the bucket size with the least :func:`bucketing_overhead_s`, ``sqrt(s w o)`` bytes, at most all gradients.

    The overhead's derivative by ``n_b``, ``o - s / (n_b^2 w)``, is zero at ``n_b = sqrt(s / (w o))`` buckets.
    """
    return minimum(gradient_bytes, (gradient_bytes * bytes_per_s * call_s) ** 0.5)


def overhead_on_link_s(gradient_bytes: float, bucket_bytes: float, link: AlphaBeta) -> float:
    """Return :func:`bucketing_overhead_s` with a measured link: a call costs latency, the transfer bandwidth."""
    buckets = max(1.0, gradient_bytes / bucket_bytes)  # A bucket larger than all gradients holds them all.
    return number_of(bucketing_overhead_s(gradient_bytes, buckets, link.bytes_per_s, link.latency_s))


def optimal_bucket_on_link_bytes(gradient_bytes: float, link: AlphaBeta) -> float:
    """Return :func:`optimal_bucket_bytes` with a measured link; 0 where calls are free: the smaller the better."""
    if link.latency_s == 0:
        return 0.0  # Not 0 times an infinite bandwidth.
    return number_of(optimal_bucket_bytes(gradient_bytes, link.bytes_per_s, link.latency_s))


def exposed_communication(medians_ms: Mapping[str, float], running_ms: float | None = None) -> dict[str, float | None]:
    """Return how much longer a step is than without communication, and how much of its communication it hides.

    Args:
        medians_ms: of ``step``, and where measured of ``unsynchronized`` steps and of ``communication`` alone.
        running_ms: how long communication ran in a profiled step. Alone, launches may hold it up: 436 all-reduces of xl
            took 61 ms launched one after another, and 35 in a CUDA graph. The shorter of both could be hidden.

    Returns:
        ``exposed_ms`` = step - unsynchronized; ``exposed_percent`` of the step; ``hidden_percent``, the part of the
        communication that is not exposed, 0 to 100; each None where it is not known.
    """
    exposed_ms = exposed_percent = hidden_percent = None
    step_ms, alone_ms = medians_ms["step"], medians_ms.get("communication")
    if "unsynchronized" in medians_ms:
        exposed_ms = step_ms - medians_ms["unsynchronized"]
        exposed_percent = 100 * exposed_ms / step_ms
        if alone_ms is not None:
            to_hide_ms = min(alone_ms, running_ms or alone_ms)
            hidden_percent = 100 * (1 - min(max(exposed_ms, 0), to_hide_ms) / to_hide_ms)
    return {"exposed_ms": exposed_ms, "exposed_percent": exposed_percent, "hidden_percent": hidden_percent}


def measured_slowdown(cells: Sequence[Cell]) -> tuple[OverlapSlowdown, str]:
    """Return how much communication and computing slow each other down, as medians over steps of ``ddp``, and a source.

    A profile of a step says how long kernels ran, how long communication ran, and how long both ran at once. The same
    step without communication, and communication alone, were timed, too. The time that kernels took longer in the
    profile they lost while both ran. Steps launched by the CPU are left out, because a GPU also waits for launches, and
    steps that send by copy engines, because those take no multiprocessors.
    """
    computing_speeds, communication_speeds = [], []
    for cell in cells:
        timeline, settings = cell.derived.get("timeline"), cell.configuration
        is_replayed = cell.command == "ddp" and settings.get("cuda_graph") == "on"
        has_parts = {"unsynchronized", "communication"} <= cell.samples.keys()
        if not timeline or not is_replayed or not has_parts or settings.get("transport") == "copy-engines":
            continue
        overlap_ms, sending_ms = timeline["overlap_ms"], timeline["communication_ms"]
        lost_ms = timeline["compute_ms"] - cell.samples["unsynchronized"].median
        # Communication that runs mostly alone says nothing of this. Kernels lose between none and all of the time in
        # which both run: what is outside of that was timed in noise.
        if overlap_ms >= sending_ms / 2 and 0 <= lost_ms < overlap_ms:
            computing_speeds.append(1 - lost_ms / overlap_ms)
            communication_speeds.append(min(1.0, cell.samples["communication"].median / sending_ms))
    if not computing_speeds:
        return OverlapSlowdown(), "assumed: no step of ddp in CUDA graphs says more"
    source = f"ddp, {len(computing_speeds)} steps in CUDA graphs"
    return OverlapSlowdown(median(computing_speeds), median(communication_speeds)), source


def ring_answers(size_bytes: int, devices: int, bytes_per_s: float) -> list[Derived]:
    """Answer ``alternate_ring_all_reduce`` (2026): seconds of ring collectives, and of the alternate all-reduce."""
    setting = symbol("S", size_bytes), symbol("N", devices), symbol("W", bytes_per_s)
    row = partial(Derived, source="2026 handout, 8.1")
    gather_s = ring_all_gather_s(*setting)
    usual = row("ring all-reduce", ring_all_reduce_s(*setting), "s", "T", reason=why("all_reduce"))
    name, problem = "alternate ring all-reduce", "alternate_ring_all_reduce"
    alternate_s = alternate_ring_all_reduce_s(*setting)
    alternate = row(name, alternate_s, "s", "T_alternate", reason=why("alternate"), question=problem)
    rows = [
        row("ring all-gather", gather_s, "s", reason=why("all_gather")),
        row("ring reduce-scatter", gather_s, "s", reason=why("reduce_scatter")),
        usual,
        alternate,
    ]
    if devices > 1:  # One device takes no time for either.
        ratio = alternate.as_symbol() / usual.as_symbol()
        rows.append(row("alternate over usual", ratio, "times", reason=why("alternate_over_usual")))
    return rows


def bucket_answers(gradient_bytes: float, buckets: int, bytes_per_s: float, call_s: float) -> list[Derived]:
    """Answer ``ddp_bucketed_benchmarking`` (b), 2025: the overhead of so many buckets, the best size and number."""
    s, w, o = symbol("s", gradient_bytes), symbol("w", bytes_per_s), symbol("o", call_s)
    row = partial(Derived, source="2025 handout, 2.3.3")
    problem = "ddp_bucketed_benchmarking (b)"
    overhead_s = bucketing_overhead_s(s, symbol("n_b", buckets), w, o)
    quantity = f"overhead of {buckets} bucket{'s' * (buckets != 1)}"
    overhead = row(quantity, overhead_s, "s", reason=why("overhead"), question=problem)
    quantity, best_bytes = "bucket size with the least overhead", optimal_bucket_bytes(s, w, o)
    best = row(quantity, best_bytes, "decimal_bytes", "b", reason=why("best_bucket"), question=problem)
    count = row("buckets of that size", s / best.as_symbol(), "buckets", "n_b")
    least_s = bucketing_overhead_s(s, count.as_symbol(), w, o)
    return [overhead, best, count, row("overhead of these", least_s, "s", reason=why("least_overhead"))]


@dataclass(frozen=True)
class BusBandwidths:
    """Bus bandwidths of collectives, one after another and alone on the GPUs."""

    # By kind and number of ranks: sizes in bytes, ascending, with GB/s.
    points: Mapping[tuple[str, int], tuple[tuple[int, float], ...]]

    @classmethod
    def of_cells(cls, cells: Iterable[Cell], backend: str) -> Self:
        """Read the bandwidths of a backend from measured cells of ``allreduce``; of one size the fastest counts."""
        rates_by_size: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for cell in cells:
            rate = cell.derived.get("back_to_back_busbw_gbps")
            if cell.command != "allreduce" or cell.status != "ok" or not rate:
                continue
            configuration = cell.configuration
            if configuration["backend"] == backend:
                sizes = rates_by_size[configuration["collective"], configuration["world_size"]]
                size = cell.derived["size_bytes"]
                sizes[size] = max(rate, sizes.get(size, 0.0))
        return cls({key: tuple(sorted(sizes.items())) for key, sizes in rates_by_size.items()})

    def gbps_at(self, kind: str, ranks: int, size: int) -> float | None:
        """Return the bus bandwidth of a collective, GB/s, between the next smaller and larger size in logarithms.

        Beyond the largest size it is that size's; None below the smallest, and where none was measured.
        """
        points = self.points.get((kind, ranks), ())
        if not points or size < points[0][0]:
            return None
        upper = bisect_left(points, (size, 0.0))  # The first point of this size or a larger one.
        if upper == len(points):
            return points[-1][1]
        # The first size itself has no smaller one.
        (low, slow), (high, fast) = points[max(0, upper - 1)], points[upper]
        share = 1.0 if size == high else math.log(size / low) / math.log(high / low)
        return slow ** (1 - share) * fast**share

    def to_json(self) -> list[Any]:
        return [[*key, [list(point) for point in points]] for key, points in self.points.items()]

    @classmethod
    def from_json(cls, values: Iterable[Any]) -> Self:
        return cls({(kind, ranks): tuple((size, rate) for size, rate in points) for kind, ranks, points in values})
