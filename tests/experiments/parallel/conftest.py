"""Ranks that all tests here share, and the engine uses too; each computes with one thread."""

import pytest

from cs336sys.parallel.ranks import launch


@pytest.fixture(scope="module")
def ranks(ranks):
    """``ranks()`` are the two Gloo ranks that the engine keeps, ``ranks(3)`` three of the tests' own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
        yield (
            lambda world_size=2: (
                launch.kept(2, backend="gloo", timeout_s=120.0) if world_size == 2 else ranks(world_size)
            )
        )
