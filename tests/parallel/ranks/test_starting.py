"""Which ranks are started, with which backend, and which are refused: processes are only asked for here."""

import os

import pytest
import torch

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.ranks import launch


class Asked:
    """In place of spawned ranks."""

    def __init__(self, *arguments):
        self.arguments, self.alive = arguments, True

    def __exit__(self, *exception):
        self.alive = False


@pytest.fixture
def machine(monkeypatch):
    """A machine with no GPU; ``machine(2)`` has two, and memory for a number of ranks."""

    def describe(gpus=0, ranks=1000):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        # A rank takes 0.2e9 bytes.
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 200_000 * ranks}.__getitem__)

    describe()
    monkeypatch.setattr(launch, "SpawnedRanks", Asked)
    monkeypatch.setattr(launch, "use_private_caches", lambda: None)
    monkeypatch.setattr(launch, "_kept", {})
    return describe


def test_ranks_are_on_gpus_where_there_are_some(machine):
    assert launch.start(3).arguments[:3] == (3, "gloo", 120.0)
    machine(gpus=2)
    assert launch.start(2, timeout_s=5.0).arguments[:3] == (2, "nccl", 5.0)
    assert launch.start(3, backend="gloo").arguments[:3] == (3, "gloo", 120.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world size 0: must be at least 1"),
        ({"world_size": 1, "timeout_s": 0.0}, "timeout 0.0 s: must be positive"),
        ({"world_size": 1, "timeout_s": float("nan")}, "timeout nan s: must be positive"),
        ({"world_size": 1, "backend": "mpi"}, "unknown backend 'mpi': choose from gloo, nccl"),
    ],
)
def test_impossible_arguments_are_refused(machine, arguments, message):
    with pytest.raises(UsageError) as refusal:
        launch.start(**arguments)
    assert str(refusal.value) == message


def test_as_many_ranks_as_the_machine_has_room_for(machine):
    machine(gpus=2, ranks=4)
    assert launch.start(2).arguments[0] == 2
    assert launch.start(4, backend="gloo").arguments[0] == 4
    with pytest.raises(CapabilityError, match=r"^3 ranks on this machine: NCCL needs a GPU for each and torch sees 2;"):
        launch.start(3)
    with pytest.raises(CapabilityError) as refusal:
        launch.start(5, backend="gloo")
    assert str(refusal.value) == (
        "5 ranks on this machine: each is a process of at least 0.2 GB, and it has 1 GB; choose a smaller world size"
    )


def test_ranks_are_kept_until_others_are_asked_for(machine):
    first = launch.kept(2)
    assert launch.kept(2, backend="gloo") is first
    second = launch.kept(2, timeout_s=9.0)
    assert (first.alive, second.alive) == (False, True)
    assert second.arguments[:3] == (2, "gloo", 9.0)
    second.alive = False
    third = launch.kept(2, timeout_s=9.0)
    assert third is not second
    assert third.alive
    launch.end_kept()
    assert not third.alive
