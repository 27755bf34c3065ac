"""The watcher of collectives, on one rank of a group whose others are imagined."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cs336sys.parity import collectives
from cs336sys.parity.collectives import LATE_S, OBSERVED, CollectiveWatcher

HERE = Path(__file__)


@pytest.fixture(scope="module", autouse=True)
def fake_ranks():
    """Rank 0 of four, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def launched(run, *, step=0, phase="finish", files=()):
    """Return what is recorded of the launches of a function."""
    watcher = CollectiveWatcher(list(files), is_late=False)
    watcher.step, watcher.phase = step, phase
    with watcher:
        run()
    return watcher


def records(run, **settings):
    return [
        (launch.name, launch.elements, launch.dtype, launch.step, launch.phase, launch.ranks)
        for launch in launched(run, **settings).launches
    ]


ALL = (0, 1, 2, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_are_recorded_with_what_all_ranks_must_launch_alike():
    pair = dist.new_group([0, 2])

    def run():
        dist.all_reduce(torch.ones(3, dtype=torch.float64), group=pair)
        dist.all_gather_into_tensor(torch.ones(8), torch.ones(2))
        half = torch.ones(2, 2, dtype=torch.bfloat16)
        dist.all_gather([half.clone() for _ in ALL], half)
        dist.broadcast(torch.ones(5, dtype=torch.int64), src=0)
        dist.send(torch.ones(7), dst=1)

    assert records(run, step=2) == [
        ("allreduce_", 3, "float64", 2, "finish", (0, 2)),
        ("_allgather_base_", 8, "float32", 2, "finish", ALL),
        ("allgather_", 16, "bfloat16", 2, "finish", ALL),
        ("broadcast_", 5, "int64", 2, "finish", ALL),
        ("send", 7, "float32", 2, "finish", ALL),
    ]
    dist.destroy_process_group(pair)


def test_functional_collectives_are_recorded_once_and_waits_are_not():
    def run():
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).add(1)
        sent = torch.ops._c10d_functional.broadcast(torch.ones(4), 0, group_name=dist.group.WORLD.group_name)
        functional.wait_tensor(sent)

    assert records(run) == [
        ("all_reduce", 3, "float32", 0, "finish", ALL),
        ("broadcast", 4, "float32", 0, "finish", ALL),
    ]


def test_collectives_of_dtensors_are_those_they_launch():
    mesh = init_device_mesh("cpu", (4,))
    sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    assert records(lambda: sharded.redistribute(placements=[Replicate()])) == [
        ("all_gather_into_tensor", 6, "float32", 0, "finish", ALL)
    ]
    assert records(lambda: sharded + sharded) == []
    columns = DTensor.from_local(torch.ones(8, 1), mesh, [Shard(1)])
    rows = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    # Within the operator one of the two is cut otherwise.
    assert {launch.dtype for launch in launched(lambda: rows + columns).launches} == {"float32"}


def test_barriers_and_what_is_looked_at_in_between_are_left_out():
    assert records(dist.barrier) == []
    assert records(lambda: dist.all_reduce(torch.ones(3)), phase=OBSERVED) == []


def test_watching_begins_with_the_wrap():
    watcher = CollectiveWatcher([], is_late=False)
    with watcher:
        dist.all_reduce(torch.ones(3, dtype=torch.float16))
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert [(launch.step, launch.phase, launch.line) for launch in watcher.launches] == [(0, "wrap", "")]
    assert watcher.dtypes == set(), "what a wrap computes and sends says nothing of the steps"


def test_precision_of_products_and_of_numbers_that_are_sent():
    double, half, single = (torch.ones(2, 2, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32))

    def run():
        torch.mm(double, double)
        torch.addmm(half, half, half)
        torch.bmm(single[None], single[None])
        torch.ones(2, dtype=torch.float16).add(1)
        dist.all_reduce(torch.ones(3, dtype=torch.float16))
        dist.broadcast(torch.ones(3, dtype=torch.int64), src=0)

    assert launched(run).dtypes == {
        ("compute", torch.float64),
        ("compute", torch.bfloat16),
        ("compute", torch.float32),
        ("send", torch.float16),
    }


def test_a_late_rank_sleeps_before_the_first_eight_collectives_of_each_phase(monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    watcher = CollectiveWatcher([], is_late=True)
    with watcher:
        for number, phase in ((10, "backward"), (3, "finish"), (1, OBSERVED)):
            watcher.phase = phase
            for _ in range(number):
                dist.all_reduce(torch.ones(1))
        watcher.step, watcher.phase = 1, "backward"
        dist.barrier()
    assert naps == [LATE_S] * (8 + 3 + 1)
    assert len(watcher.launches) == 13
    launched(lambda: dist.all_reduce(torch.ones(1)))
    assert len(naps) == 12, "other ranks do not sleep"


def send_from_here():
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("run", [send_from_here, lambda: send_from_here()], ids=["called", "called by another"])
def test_the_innermost_line_of_the_users_files_is_named(run):
    line = send_from_here.__code__.co_firstlineno + 1
    (launch,) = launched(run, files=[HERE]).launches
    assert launch.line == f"{HERE.name}, line {line}"
    (launch,) = launched(send_from_here, files=[HERE.parents[1] / "command_line" / "mine.py"]).launches
    assert launch.line == ""


@pytest.fixture
def backward():
    """A watcher in the backward pass of three parameters, and the parameters."""
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "frozen")}
    parameters["frozen"].requires_grad_(False)
    watcher = CollectiveWatcher([], is_late=False)
    watcher.phase = "backward"
    return watcher, parameters


def incomplete(watcher, *tensors):
    """Return the parameters named with the launch of each tensor."""
    with watcher:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [launch.incomplete for launch in watcher.launches[-len(tensors) :]]


def test_gradients_are_incomplete_until_the_backward_pass_has_added_to_them(backward):
    watcher, parameters = backward
    a, b = parameters["a"], parameters["b"]
    handles = watcher.expect(parameters)
    assert len(handles) == 2, "a frozen parameter has no backward pass"
    memory = torch.zeros(4)
    a.grad, b.grad = memory[:2], torch.zeros(2)
    assert incomplete(watcher, memory[2:], b.grad, torch.ones(2)) == [("a",), ("b",), ()]
    (3 * a).sum().backward()
    assert set(watcher.waiting) == {"b", "frozen"}
    assert a.grad.tolist() == [3, 3], "a hook changes no gradient"
    assert incomplete(watcher, a.grad, b.grad) == [(), ("b",)]
    for handle in handles:
        handle.remove()
    assert not a._backward_hooks


def test_gradients_are_incomplete_in_the_backward_pass_alone(backward):
    watcher, parameters = backward
    watcher.expect(parameters)
    parameters["a"].grad = torch.zeros(2)
    for phase, names in (("finish", ()), ("backward", ("a",)), ("optimizer", ())):
        watcher.phase = phase
        assert incomplete(watcher, parameters["a"].grad) == [names]


def test_gradients_that_are_dtensors_or_empty_are_left_out(backward):
    """All empty tensors have one address."""
    watcher, parameters = backward
    parameters["empty"] = torch.nn.Parameter(torch.ones(0))
    parameters["empty"].grad = torch.zeros(0)
    sharded = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Shard(0)])
    parameters["a"] = torch.nn.Parameter(sharded)
    parameters["a"].grad = torch.zeros_like(sharded)
    parameters["b"].grad = torch.zeros(2)
    watcher.expect(parameters)
    assert incomplete(watcher, parameters["b"].grad, torch.zeros(0)) == [("b",), ()]


def test_a_collective_without_a_known_group_has_no_ranks(monkeypatch):
    for error in (RuntimeError, ValueError, KeyError):

        def refuse(arguments, error=error):
            raise error("no such group")

        monkeypatch.setattr(collectives, "group_of_collective", refuse)
        assert records(lambda: dist.all_reduce(torch.ones(3))) == [("allreduce_", 3, "float32", 0, "finish", ())]
