"""The bucket model: worked by hand, and its optimum is the least of its own curve."""

import math

import pytest

from cs336sys.accounting.communication import (
    AlphaBeta,
    bucketing_overhead_s,
    optimal_bucket_bytes,
    optimal_bucket_on_link_bytes,
    overhead_on_link_s,
)


def test_optimal_bucket_has_the_least_overhead():
    s, w, o = 8e9, 320e9, 20e-6
    best = s / optimal_bucket_bytes(s, w, o)
    least = bucketing_overhead_s(s, best, w, o)
    # 2 sqrt(s o / w), where the transfer and the calls cost the same.
    assert least == pytest.approx(2 * (s * o / w) ** 0.5, rel=1e-12)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert bucketing_overhead_s(s, best * factor, w, o) > least


def test_buckets_on_a_link_are_the_least_and_at_most_everything():
    link = AlphaBeta(latency_s=250e-6, bytes_per_s=400e9)
    best = optimal_bucket_on_link_bytes(8e9, link)
    assert overhead_on_link_s(8e9, best, link) < min(overhead_on_link_s(8e9, b * best, link) for b in (0.9, 1.1))
    # A bucket of 100 GB holds all 8 GB: 20 ms and one call.
    assert overhead_on_link_s(8e9, 100e9, link) == pytest.approx(20.25e-3, rel=1e-12)
    # Calls cost more than the whole transfer.
    assert optimal_bucket_bytes(1e6, 1e11, 1e-3) == 1e6


def test_fits_at_the_edge_have_an_optimum_too():
    assert optimal_bucket_on_link_bytes(8e9, AlphaBeta(0.0, 400e9)) == 0.0
    assert overhead_on_link_s(8e9, 1e6, AlphaBeta(0.0, 400e9)) == pytest.approx(2.5e-6, rel=1e-12)
    # Transfers that cost nothing: one bucket, one call.
    assert optimal_bucket_on_link_bytes(8e9, AlphaBeta(1e-4, math.inf)) == 8e9
    assert overhead_on_link_s(8e9, 8e9, AlphaBeta(1e-4, math.inf)) == pytest.approx(1e-4, rel=1e-12)
