"""Ranks of tests, forked from one process that has imported torch, which takes a spawned rank more than a second."""

import multiprocessing
import os

import torch

from cs336sys.processes.child import run_spawned

# Modules that most ranks import.
PRELOADED = ["cs336sys.parallel.ranks.spawned", "cs336sys.experiments.parallel.rank"]


class ForkedContext:
    """Take the place of multiprocessing's context "spawn" in :mod:`cs336sys.parallel.ranks.spawned`."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self.Pipe = self._context.Pipe

    def Process(self, target, args):
        assert target is run_spawned
        return self._context.Process(target=run_forked, args=(dict(os.environ), *args[1:]))


def run_forked(environment, *arguments):
    """As ``run_spawned``; the environment is that of the test, not of when the server was started."""
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    run_spawned(os.getppid(), *arguments)
