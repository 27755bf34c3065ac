"""Bus factors and sizes as nccl-tests defines them, and a line that is found again from its own points."""

import math

import pytest

from cs336sys.accounting.communication import (
    AlphaBeta,
    buffer_bytes,
    bus_factor,
    fit_alpha_beta,
    ring_all_gather_s,
    ring_all_reduce_s,
)
from cs336sys.errors import UsageError


@pytest.mark.parametrize(
    ("collective", "factors"),
    [
        # For 1, 2, 4 and 8 ranks.
        ("all_reduce", [0.0, 1.0, 1.5, 1.75]),
        ("all_gather", [0.0, 0.5, 0.75, 0.875]),
        ("reduce_scatter", [0.0, 0.5, 0.75, 0.875]),
        ("broadcast", [0.0, 1.0, 1.0, 1.0]),
    ],
)
def test_bus_factor_of_each_collective(collective, factors):
    assert [bus_factor(collective, ranks) for ranks in (1, 2, 4, 8)] == factors


def test_ring_algorithms_reach_the_bus_bandwidth():
    """They keep every link busy all the time: S * factor / time is the link's bandwidth for any number of ranks."""
    size, link = 1.2e9, 300e9
    for ranks in (2, 3, 6, 64):
        for collective, time_s in (
            ("all_reduce", ring_all_reduce_s(size, ranks, link)),
            ("all_gather", ring_all_gather_s(size, ranks, link)),
        ):
            assert size / time_s * bus_factor(collective, ranks) == pytest.approx(link, rel=1e-12)


@pytest.mark.parametrize(
    ("collective", "needed"),
    [("all_reduce", 1200), ("broadcast", 1200), ("all_gather", 1500), ("reduce_scatter", 1500)],
)
def test_buffers_of_a_rank(collective, needed):
    assert buffer_bytes(collective, 1200, 4) == needed


def test_time_of_a_message_worked_by_hand():
    link = AlphaBeta(latency_s=20e-6, bytes_per_s=300e9)
    # 3 GB at 300 GB/s are 10 ms.
    assert link.time_s(3e9) == pytest.approx(10.02e-3, rel=1e-12)
    assert link.half_bandwidth_bytes == pytest.approx(6e6, rel=1e-12)
    assert 6e6 / link.time_s(6e6) == pytest.approx(150e9, rel=1e-12)


@pytest.mark.parametrize("line", [AlphaBeta(25e-6, 320e9), AlphaBeta(0.0, 1e9), AlphaBeta(1e-3, 5e11)])
def test_a_line_is_found_again_from_its_points(line):
    sizes = [8.0, 1e3, 1e6, 1e7, 1e8, 1e9]
    found = fit_alpha_beta(sizes, [line.time_s(size) for size in sizes])
    assert found.latency_s == pytest.approx(line.latency_s, rel=1e-6, abs=1e-12)
    assert found.bytes_per_s == pytest.approx(line.bytes_per_s, rel=1e-6)
    assert found.largest_deviation(sizes, [line.time_s(size) for size in sizes]) < 1e-6


def test_small_messages_count_as_much_as_large_ones():
    """Unweighted, the large message decided alone."""
    sizes = [1e3, 1e9]
    exact = AlphaBeta(20e-6, 300e9)
    times = [exact.time_s(size) for size in sizes]
    slow_start = fit_alpha_beta([*sizes, 1e3], [*times, 1.1 * times[0]])
    # Of |x / t - 1| + |x / 1.1 t - 1| the least is at t: 0.09.
    assert slow_start.time_s(1e3) == pytest.approx(times[0], rel=1e-6)
    assert slow_start.time_s(1e9) == pytest.approx(times[1], rel=1e-6)


def test_an_outlier_does_not_move_the_line():
    line = AlphaBeta(20e-6, 300e9)
    sizes = [1e3, 1e6, 1e7, 1e8, 1e9]
    times = [line.time_s(size) * (5 if size == 1e7 else 1) for size in sizes]
    found = fit_alpha_beta(sizes, times)
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(20e-6), pytest.approx(300e9))


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
