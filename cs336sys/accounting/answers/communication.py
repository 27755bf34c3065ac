"""What the handouts ask about collectives and gradient buckets, with numbers.

Problems ``alternate_ring_all_reduce`` (2026, 8.1) and ``ddp_bucketed_benchmarking`` (b) (2025, 2.3.3).
"""

from cs336sys.accounting.buckets import bucketing_overhead_s, optimal_bucket_bytes
from cs336sys.accounting.collectives import bus_factor
from cs336sys.accounting.derivation import Derived, number_of, symbol
from cs336sys.accounting.rings import (
    alternate_ring_all_reduce_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)


def ring_answers(size_bytes: int, devices: int, bytes_per_s: float) -> list[Derived]:
    """How long the ring collectives take, and the alternate all-reduce beside the usual one."""
    setting = symbol("S", size_bytes), symbol("N", devices), symbol("W", bytes_per_s)
    source = "2026 handout, 8.1"
    usual = Derived(
        "ring all-reduce",
        ring_all_reduce_s(*setting),
        "s",
        symbol="T",
        reason="A reduce-scatter, then an all-gather.",
        source=source,
    )
    alternate = Derived(
        "alternate ring all-reduce",
        alternate_ring_all_reduce_s(*setting),
        "s",
        symbol="T_alternate",
        reason="In each of N - 1 steps every device sends a whole tensor of S bytes.",
        source=source,
        question="alternate_ring_all_reduce",
    )
    rows = [
        Derived(
            "ring all-gather",
            ring_all_gather_s(*setting),
            "s",
            reason="In each of N - 1 steps every device sends a share of S / N bytes.",
            source=source,
        ),
        Derived(
            "ring reduce-scatter",
            ring_reduce_scatter_s(*setting),
            "s",
            reason="The same steps, adding up on the way.",
            source=source,
        ),
        usual,
        alternate,
    ]
    if devices > 1:
        ratio = alternate.as_symbol() / usual.as_symbol()
        rows.append(
            Derived(
                "alternate over usual",
                ratio,
                "times",
                reason="N / 2: it sends whole tensors, not shares.",
                source=source,
            )
        )
    return rows


def ring_times(size_bytes: int, devices: int, bytes_per_s: float) -> dict[str, float | None]:
    """One row of a table of sizes and devices: milliseconds, and the all-reduce's bandwidths in 1e9 bytes/s."""
    setting = size_bytes, devices, bytes_per_s
    all_reduce_s = number_of(ring_all_reduce_s(*setting))
    algorithm_gbps = size_bytes / all_reduce_s / 1e9 if all_reduce_s else None
    return {
        "all_gather_ms": 1e3 * number_of(ring_all_gather_s(*setting)),
        "reduce_scatter_ms": 1e3 * number_of(ring_reduce_scatter_s(*setting)),
        "all_reduce_ms": 1e3 * all_reduce_s,
        "alternate_all_reduce_ms": 1e3 * number_of(alternate_ring_all_reduce_s(*setting)),
        "algbw_gbps": algorithm_gbps,
        "busbw_gbps": algorithm_gbps and algorithm_gbps * bus_factor("all_reduce", devices),
    }


def bucket_answers(gradient_bytes: float, buckets: int, bytes_per_s: float, call_s: float) -> list[Derived]:
    """The overhead of so many buckets, and the size and number with the least."""
    s, w, o = symbol("s", gradient_bytes), symbol("w", bytes_per_s), symbol("o", call_s)
    problem = "ddp_bucketed_benchmarking (b)"
    source = "2025 handout, 2.3.3"
    best = Derived(
        "bucket size with the least overhead",
        optimal_bucket_bytes(s, w, o),
        "decimal_bytes",
        symbol="b",
        reason="The derivative by n_b, o - s / (n_b^2 w), is zero at n_b = sqrt(s / (w o)); b = s / n_b, at most s.",
        source=source,
        question=problem,
    )
    count = Derived("buckets of that size", s / best.as_symbol(), "buckets", symbol="n_b", source=source)
    return [
        Derived(
            f"overhead of {buckets} bucket{'s' * (buckets != 1)}",
            bucketing_overhead_s(s, symbol("n_b", buckets), w, o),
            "s",
            reason="All but the last bucket travel while the next one is computed; every call costs o.",
            source=source,
            question=problem,
        ),
        best,
        count,
        Derived(
            "overhead of these",
            bucketing_overhead_s(s, count.as_symbol(), w, o),
            "s",
            reason="2 sqrt(s o / w): the last bucket's transfer and all calls cost the same.",
            source=source,
        ),
    ]
