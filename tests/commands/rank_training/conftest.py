"""Ranks that all tests here share, and the engine uses too; each computes with one thread."""

import weakref

import pytest
import training_ranks

from cs336sys.parallel.ranks import launch

_with_compiler: weakref.WeakSet[launch.Ranks] = weakref.WeakSet()


@pytest.fixture(scope="module")
def ranks(ranks):
    """``ranks()`` are the two Gloo ranks that the engine keeps, ``ranks(3)`` three of the tests' own."""

    def get(world_size=2):
        if world_size != 2:
            return ranks(world_size)
        kept = launch.kept(2, backend="gloo", timeout_s=120.0)
        if kept not in _with_compiler:
            kept.run(training_ranks.import_compiler)
            _with_compiler.add(kept)
        return kept

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
        yield get
