"""Collectives are checked on integer data before they are timed, and what is timed is torch's own function.

``figures.txt`` has what follows from the times of ranks that do not run (tests/written_figures.py).
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import collective_ranks
import pytest
import torch
from written_figures import read_figures, rows_of, write_figures

from cs336sys.commands.allreduce import measure as collectives
from cs336sys.commands.allreduce.measure import RankHardware, RankTimes, count_differences, exact_data, write
from cs336sys.machine.device import DTYPES
from cs336sys.parallel.ranks import launch
from cs336sys.settings.operations import COLLECTIVE_DTYPES, COLLECTIVES, CollectiveWorkload

pytestmark = pytest.mark.usefixtures("time_limit", "one_thread_a_rank")

PATH = Path(__file__).with_name("figures.txt")


def workload(collective="all_reduce", world_size=2, dtype="fp32", message_bytes=1000, **options):
    return CollectiveWorkload("gloo", collective, world_size, dtype, message_bytes, **options)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("gloo", 1), ("gloo", 2), ("gloo", 3), pytest.param("nccl", 2, marks=pytest.mark.multigpu)],
)
def test_every_collective_is_right_in_every_dtype_and_timed(ranks, backend, world_size):
    workloads = [
        replace(workload(collective, world_size, dtype, size, warmup=1, iterations=2), backend=backend)
        for collective in COLLECTIVES
        for dtype in COLLECTIVE_DTYPES
        for size in (24, 100_000)
    ]
    if backend == "gloo":
        of_ranks = ranks(world_size).run(collective_ranks.time_all, workloads)
    else:
        of_ranks = launch.run(collective_ranks.time_all, workloads, world_size=world_size, backend=backend)
    for of_rank in of_ranks:
        for times, cell in zip(of_rank, workloads, strict=True):
            assert times.wrong_elements == 0, cell
            assert len(times.back_to_back_us) == len(times.synchronized_us) == 3
            assert min(times.back_to_back_us + times.synchronized_us) > 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_that_moves_nothing_is_wrong_and_not_timed(ranks, collective):
    answers = ranks(2).run(collective_ranks.time_faulty, workload(collective, message_bytes=1000), "nothing")
    outputs = 125 if collective == "reduce_scatter" else 250
    for rank, (wrong, *timed) in enumerate(answers):
        assert timed == [0, 0]
        if collective == "all_reduce":
            # In place of the sum stands the input, which equals it where the other rank has 0.
            assert outputs - 10 <= wrong <= outputs
        elif collective == "broadcast" and rank == 0:
            assert wrong == 0
        else:
            assert wrong == outputs, "an element that nobody wrote counted as right"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_neighbours_in_each_others_place_are_found_on_the_rank_that_has_them(ranks, collective):
    answers = ranks(2).run(collective_ranks.time_faulty, workload(collective), "swapped")
    assert answers == [(0, 0, 0), (2, 0, 0)]


def test_nan_is_wrong(ranks):
    assert ranks(2).run(collective_ranks.time_faulty, workload(dtype="bf16"), "nan") == [(1, 0, 0), (1, 0, 0)]


def test_late_rank_makes_the_call_late_on_every_rank(ranks):
    for times in ranks(2).run(collective_ranks.times_with_a_late_rank, workload(warmup=0, iterations=5), 0.02):
        assert min(times.back_to_back_us + times.synchronized_us) > 15e3


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100, 300])
@pytest.mark.parametrize("dtype", COLLECTIVE_DTYPES)
def test_sums_of_the_data_are_exact_in_any_order(dtype, world_size):
    data = exact_data(dtype, world_size)
    largest = {"fp32": 2**24, "bf16": 2**8, "fp16": 2**11, "fp64": 2**53, "int32": 2**31 - 1}[dtype]
    sums = torch.stack(data).sum(0)
    assert all(tensor.min() >= 0 for tensor in data)
    assert sums.max() <= largest
    assert torch.equal(sums.to(DTYPES[dtype]).to(torch.int64), sums)
    assert len(set(sums.tolist())) > 1


@pytest.mark.parametrize("dtype", COLLECTIVE_DTYPES)
def test_data_differs_between_ranks_and_between_neighbours(dtype):
    data = exact_data(dtype, 4)
    assert len({tuple(tensor.tolist()) for tensor in data}) == 4
    for tensor in [*data, torch.stack(data).sum(0)]:
        assert (tensor != tensor.roll(1)).float().mean() > 0.95


@pytest.mark.parametrize("elements", [1, 6, 7, 8, 100])
@pytest.mark.parametrize("start", [0, 3, 7, 100])
def test_pieces_of_the_data_are_those_of_the_whole(elements, start, monkeypatch):
    monkeypatch.setattr(collectives, "_COMPARED_AT_ONCE", 21)
    data = torch.arange(7)
    whole, piece = torch.empty(300), torch.empty(elements)
    write(whole, data)
    assert whole.tolist() == [position % 7 for position in range(300)]
    write(piece, data, start)
    assert torch.equal(piece, whole[start : start + elements])
    assert count_differences(piece, data, start) == 0
    assert count_differences(piece, data, start + 1) == elements
    piece[elements // 2] = torch.nan
    assert count_differences(piece, data, start) == 1


class CannedRanks:
    """Stands in for started ranks: the hardware is given, and every rank has the given times."""

    def __init__(self, hardware, results=()):
        self.answers = {collectives.hardware_of_rank: hardware, collectives.time_collective: results}
        self.functions = []

    def run(self, function, *args):
        self.functions.append(function)
        return self.answers[function]


def measured(hardware, results, *cell, **options):
    """Return the outcome of a cell on such ranks, its series, and whether they were asked for times."""
    canned = CannedRanks(hardware, results)
    with (
        mock.patch.object(launch, "kept", return_value=canned),
        mock.patch.object(collectives, "describe_links", return_value="NV18"),
    ):
        configuration = workload(*cell, **options).configuration()
        outcome = collectives.measure_collective(configuration, lambda stage: None)
    series = {name: (times.warmup, times.measured) for name, times in outcome.samples.items()}
    return outcome, series, collectives.time_collective in canned.functions


def link_of(*hardware):
    with (
        mock.patch.object(collectives, "describe_links", lambda uuids: f"links of {', '.join(uuids)}"),
        mock.patch.object(collectives.platform, "node", return_value="here"),
    ):
        return collectives._link_name(hardware)


CPU = RankHardware("a", None, None)
HERE, BESIDE, THERE = (
    RankHardware(node, f"GPU-{number}", 1) for node, number in (("here", 0), ("here", 1), ("there", 7))
)


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_outcomes_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


@pytest.fixture
def order(monkeypatch):
    """What a GPU is told to do, in order; each call takes 3 ms, and nothing else takes time."""
    order = []

    class Event(SimpleNamespace):
        def record(self, stream):
            order.append("record")
            self.calls_before = order.count("call")

        def elapsed_time(self, end):
            return 3.0 * (end.calls_before - self.calls_before)

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: order.append("event") or Event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr("torch.distributed.barrier", lambda: order.append("barrier"))
    return order


def test_calls_back_to_back_have_nothing_but_events_between_them(order):
    times = collectives._back_to_back_us(lambda: order.append("call"), 3, torch.device("cuda", 0))
    assert times == [3000.0] * 3
    events = [*["event"] * 4, *["record"] * 4]
    assert order == [*events, "barrier", "record", *["call", "record"] * 3, "synchronize"]


def test_synchronized_calls_begin_and_end_with_an_idle_gpu(order):
    assert len(collectives._synchronized_us(lambda: order.append("call"), 2, torch.device("cuda", 0))) == 2
    assert order == ["barrier", "synchronize", "call", "synchronize"] * 2


def test_gpu_says_how_much_memory_it_has_left_after_the_last_cell(monkeypatch):
    freed = []
    properties = type("Properties", (), {"uuid": "1234"})
    monkeypatch.setattr(collectives, "group_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 10**9 if freed else 0, 10**11))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    hardware = collectives.hardware_of_rank()
    assert (hardware.gpu_uuid, hardware.memory_bytes) == ("GPU-1234", 5 * 10**9)


if __name__ == "__main__":
    write_figures(PATH, globals())
