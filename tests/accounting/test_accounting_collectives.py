"""Sizes as nccl-tests defines them, a line that is found again from its own points, and buckets on it."""

import math
from pathlib import Path

import pytest

from cs336sys.accounting.communication import (
    AlphaBeta,
    BusBandwidths,
    bucketing_overhead_s,
    buffer_bytes,
    bus_factor,
    fit_alpha_beta,
    optimal_bucket_bytes,
    optimal_bucket_on_link_bytes,
    overhead_on_link_s,
    ring_all_gather_s,
    ring_all_reduce_s,
)
from cs336sys.errors import UsageError
from cs336sys.results.model import read_results

SAVED = Path(__file__).parents[2] / "docs" / "results" / "allreduce-x4-h200.jsonl.gz"


def test_ring_algorithms_reach_the_bus_bandwidth():
    """They keep every link busy all the time: S * factor / time is the link's bandwidth for any number of ranks."""
    size, link = 1.2e9, 300e9
    for ranks in (2, 3, 6, 64):
        for collective, time_s in (
            ("all_reduce", ring_all_reduce_s(size, ranks, link)),
            ("all_gather", ring_all_gather_s(size, ranks, link)),
        ):
            assert size / time_s * bus_factor(collective, ranks) == pytest.approx(link, rel=1e-12)


def test_buffers_of_a_rank():
    needed = {"all_reduce": 1200, "broadcast": 1200, "all_gather": 1500, "reduce_scatter": 1500}
    assert {collective: buffer_bytes(collective, 1200, 4) for collective in needed} == needed


def test_a_message_that_takes_as_long_to_start_as_to_transfer_has_half_of_the_bandwidth():
    link = AlphaBeta(latency_s=20e-6, bytes_per_s=300e9)
    assert link.half_bandwidth_bytes / link.time_s(link.half_bandwidth_bytes) == pytest.approx(150e9, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "factors"),
    [
        ([8.0, 1e3, 1e6, 1e9], [1, 1, 1, 1]),
        # One of two small messages is slow: unweighted, the large one decided alone.
        ([1e3, 1e9, 1e3], [1, 1, 1.1]),
        # An outlier.
        ([1e3, 1e6, 1e7, 1e8, 1e9], [1, 1, 5, 1, 1]),
    ],
)
def test_a_line_is_found_again_from_its_points(sizes, factors):
    for line in (AlphaBeta(20e-6, 300e9), AlphaBeta(0.0, 1e9)):
        times = [factor * line.time_s(size) for size, factor in zip(sizes, factors, strict=True)]
        found = fit_alpha_beta(sizes, times)
        assert found.latency_s == pytest.approx(line.latency_s, rel=1e-6, abs=1e-12)
        assert found.bytes_per_s == pytest.approx(line.bytes_per_s, rel=1e-6)


def test_latency_is_not_negative():
    # The steep line through both points would start below zero; of t = S / B one through a point is best.
    found = fit_alpha_beta([1.0, 2.0], [1.0, 3.0])
    assert found.latency_s == 0.0
    # |b - 1| + |2 b / 3 - 1| is 1/3 at b = 1, and 1/2 at b = 3/2.
    assert found.bytes_per_s == pytest.approx(1, rel=1e-12)


def test_times_that_do_not_grow_have_no_bandwidth_limit():
    found = fit_alpha_beta([1e3, 1e4], [2e-5, 2e-5])
    assert found == AlphaBeta(pytest.approx(2e-5), math.inf)
    assert found.time_s(1e9) == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_alpha_beta([1e6, 1e6], [1.0, 1.1]), "at least two message sizes"),
        (lambda: fit_alpha_beta([1e6, 1e7], [1.0, 0.0]), "must be positive"),
    ],
)
def test_impossible_values_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_optimal_buckets_have_the_least_overhead_and_hold_at_most_everything():
    s, w, o = 8e9, 320e9, 20e-6
    best = s / optimal_bucket_bytes(s, w, o)
    least = bucketing_overhead_s(s, best, w, o)
    # Where the transfer and the calls cost the same.
    assert least == pytest.approx(2 * (s * o / w) ** 0.5, rel=1e-12)
    assert least < min(bucketing_overhead_s(s, best * factor, w, o) for factor in (0.9, 1.1))
    # Calls cost more than the whole transfer.
    assert optimal_bucket_bytes(1e6, 1e11, 1e-3) == 1e6
    link = AlphaBeta(latency_s=250e-6, bytes_per_s=400e9)
    best = optimal_bucket_on_link_bytes(8e9, link)
    assert overhead_on_link_s(8e9, best, link) < min(overhead_on_link_s(8e9, b * best, link) for b in (0.9, 1.1))
    # A bucket of 100 GB holds all 8 GB: 20 ms and one call.
    assert overhead_on_link_s(8e9, 100e9, link) == pytest.approx(20.25e-3, rel=1e-12)
    # Calls, or transfers, that cost nothing.
    assert optimal_bucket_on_link_bytes(8e9, AlphaBeta(0.0, 400e9)) == 0.0
    assert optimal_bucket_on_link_bytes(8e9, AlphaBeta(1e-4, math.inf)) == 8e9


def test_bandwidths_of_saved_cells_are_those_of_their_ranks_kinds_and_backend():
    cells = read_results(SAVED).cells
    bandwidths = BusBandwidths.of_cells(cells, "nccl")
    sizes = [size for size, _ in bandwidths.points["all_gather", 2]]
    beyond, below = (bandwidths.gbps_at("all_gather", 2, size) for size in (10 * max(sizes), min(sizes) // 2))
    assert (beyond, below) == (bandwidths.gbps_at("all_gather", 2, max(sizes)), None)
    assert bandwidths.gbps_at("all_reduce", 3, 10**6) is bandwidths.gbps_at("reduce", 4, 10**6) is None
    assert BusBandwidths.of_cells(cells, "gloo").points == {}
    assert BusBandwidths.from_json(bandwidths.to_json()) == bandwidths
