"""Which ranks are started, with which backend, and kept: processes are only asked for here."""

import pytest
import torch

from cs336sys.parallel.ranks import launch


class Asked:
    """In place of spawned ranks."""

    def __init__(self, *arguments):
        self.arguments, self.alive = arguments, True

    def __exit__(self, *exception):
        self.alive = False


@pytest.fixture
def machine(monkeypatch):
    """A machine with no GPU; ``machine(2)`` has two."""

    def describe(gpus=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

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
