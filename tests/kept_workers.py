"""Fixtures: every command with its options; workers that outlive their command, for tests of anything else."""

import dataclasses
import os
import uuid

import pytest
import typer

from cs336sys.cli import COMMANDS, app
from cs336sys.run import cells
from cs336sys.run.cells import Worker

# Variables that are options of a command: its workers do not read them.
OPTIONS = tuple(f"CS336SYS_{command.upper()}_" for command in COMMANDS)


def surroundings():
    others = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {name: value for name, value in others.items() if not name.startswith(OPTIONS)}


class KeptWorkers:
    """Workers that commands have left in a sound state, by what they measure; for commands in an equal environment."""

    def __init__(self):
        self.idle = {}
        self.are_kept = True

    def end(self):
        for worker, _ in self.idle.values():
            Worker.close(worker)
        self.idle.clear()

    def worker_class(self):
        kept = self

        class KeptWorker(Worker):
            """A worker that starts in its predecessor's process, and leaves its own to its successor."""

            is_replacing = False

            def start(self, *, timeout_s=None):
                if self._child is not None:
                    return super().start(timeout_s=timeout_s)
                predecessor, found = kept.idle.pop(self._measure, (None, None))
                if predecessor is not None and (not kept.are_kept or found != surroundings()):
                    Worker.close(predecessor)
                    predecessor = None
                if predecessor is None or self.run is not None:
                    return super().start(timeout_s=timeout_s)
                self._child = predecessor._child
                self.run = dataclasses.replace(predecessor.run, run_id=str(uuid.uuid4()))
                return None

            def measure(self, *arguments, **options):
                self.is_replacing = True
                try:
                    return super().measure(*arguments, **options)
                finally:
                    self.is_replacing = False

            def close(self):
                if self._child is None or self._is_busy or self.is_replacing or not kept.are_kept:
                    super().close()
                    return
                successor = Worker(self._measure, self._arguments)
                successor._child, successor.run, self._child = self._child, self.run, None
                former, _ = kept.idle.pop(self._measure, (None, None))
                if former is not None:
                    Worker.close(former)
                kept.idle[self._measure] = successor, surroundings()

        return KeptWorker


@pytest.fixture(scope="module")
def kept_workers():
    """A command of this module leaves its worker, and its ranks, to the next one that measures the same.

    To start a worker takes 3 to 5 s of CPU time, with two ranks 10; to measure what these tests look at, milliseconds.
    """
    kept = KeptWorkers()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cells, "Worker", kept.worker_class())
        yield kept
    kept.end()


@pytest.fixture
def fresh_workers(kept_workers):
    """Every command of this test starts workers of its own."""
    kept_workers.end()
    kept_workers.are_kept = False
    yield
    kept_workers.are_kept = True


def _commands(group, context):
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        below = typer.Context(command, parent=context, info_name=name)
        yield from _commands(command, below) if hasattr(command, "list_commands") else [(below, command)]


@pytest.fixture(scope="session")
def every_command():
    """Contexts and commands, those of groups too."""
    root = typer.main.get_command(app)
    return list(_commands(root, typer.Context(root, info_name="cs336sys", auto_envvar_prefix="CS336SYS")))
