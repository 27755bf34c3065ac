"""Ranks and workers of tests, forked from one process that has imported torch, which takes a fresh one two seconds."""

import contextlib
import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path

import pytest
import torch

from cs336sys.parallel.ranks import spawned
from cs336sys.processes import child
from cs336sys.processes.parent import call_guarded
from cs336sys.run import cells


@contextlib.contextmanager
def _started_by(context, call):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spawned, "_CONTEXT", context)
        monkeypatch.setattr(cells, "call_guarded", call)
        yield


# A driver of GPUs does not survive a fork.
START = "spawn" if torch.cuda.is_available() else "forkserver"


def forked():
    """Within this, ranks and workers are forked where there is no GPU, and started as users' are where there is."""
    return started_as_by_users() if START == "spawn" else _started_by(ForkedContext(), call_forked)


def started_as_by_users():
    """Within this, ranks are spawned and workers guarded again."""
    return _started_by(multiprocessing.get_context("spawn"), call_guarded)


# What most of them import, and torch's optimizers with their first step, in two seconds.
PRELOADED = [
    "cs336sys.parallel.ranks.spawned",
    "torch._inductor.compile_fx",
    "cs336sys.machine.environment",
    "cs336sys.training.step",
]


class ForkedContext:
    """Take the place of multiprocessing's context "spawn" in :mod:`cs336sys.parallel.ranks.spawned`."""

    def __init__(self):
        self._context = multiprocessing.get_context(START)
        self._context.set_forkserver_preload(PRELOADED)
        self.Pipe = self._context.Pipe

    def Process(self, target, args):
        assert target is child.run_spawned
        return self.process(run_rank, *args[1:])

    def process(self, function, *args):
        return self._context.Process(target=function, args=(Surroundings(), *args))


class Surroundings:
    """This process's environment, working folder and standard error, which another process takes over.

    That process forks its own from the same process, too, where multiprocessing would start another, and ends with
    this one.
    """

    def __init__(self):
        forkserver._forkserver.ensure_running()
        self.environment, self.folder, self.process_id = dict(os.environ), os.getcwd(), os.getpid()
        # The second from Python 3.14 on.
        known = ("_forkserver_address", "_forkserver_authkey")
        self.server = {name: value for name, value in vars(forkserver._forkserver).items() if name in known}

    def __getstate__(self):
        return self.__dict__ | {"stderr": DupFd(2)}

    def take_over(self):
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        os.dup2(self.stderr.detach(), 2)
        if "OMP_NUM_THREADS" in self.environment:
            torch.set_num_threads(int(self.environment["OMP_NUM_THREADS"]))
        vars(forkserver._forkserver).update(self.server, ensure_running=lambda: None)
        threading.Thread(target=end_with, args=(self.process_id,), daemon=True).start()


def end_with(process_id):
    """Kill this process once that one has ended: its parent is the process from which both were forked."""
    try:
        select.select([os.pidfd_open(process_id)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):
        # Not every system has such descriptors; without, it ends when it finds its connection closed.
        return
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(surroundings, *arguments):
    """As ``run_spawned``."""
    surroundings.take_over()
    child.run_spawned(os.getppid(), *arguments)


def run_script(surroundings, environment, outputs, path, *arguments):
    """Run a Python file with more variables; ``outputs`` are the files for what it prints and for its errors."""
    surroundings.take_over()
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with forked():
        runpy.run_path(str(path), run_name="__main__")


@dataclass(frozen=True)
class Answer:
    """What a script wrote, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str


def run_scripts(
    script: Path,
    arguments: Sequence[Sequence[str]] = ((),),
    variables: Sequence[dict[str, str]] = ({},),
    *,
    folder: Path,
    timeout_s: float = 180,
) -> list[Answer]:
    """Run a script in as many processes as there are arguments and environment variables; none outlives this.

    Args:
        folder: for what they write.

    Raises:
        TimeoutError: one is not done in time.
    """
    outputs = [[folder / f"{name} {number}" for name in ("stdout", "stderr")] for number in range(len(arguments))]
    processes = [
        ForkedContext().process(run_script, own_variables, own_outputs, script, *own_arguments)
        for own_variables, own_outputs, own_arguments in zip(variables, outputs, arguments, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
            if process.exitcode is None:
                raise TimeoutError(f"not done after {timeout_s} s: {script}")
    finally:
        for process in processes:
            # torchrun ends its ranks when it is terminated, and not when it is killed.
            process.terminate()
            process.join()
    return [
        Answer(process.exitcode, *(output.read_text() for output in own))
        for process, own in zip(processes, outputs, strict=True)
    ]


class ForkedWorker:
    """Take the place of :class:`cs336sys.processes.parent.Guarded`."""

    def __init__(self, process):
        self.process, self._forked = self, process

    @property
    def returncode(self):
        return self._forked.exitcode

    def poll(self):
        return self.returncode

    def has_ended(self, timeout_s):
        self._forked.join(timeout_s)
        return self.returncode is not None

    def kill(self):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._forked.pid, signal.SIGKILL)
            self._forked.kill()
            self._forked.join()


def call_forked(function, *args):
    """As ``call_guarded``."""
    context = ForkedContext()
    ours, theirs = context.Pipe()
    process = context.process(run_worker, theirs, function, args)
    process.start()
    theirs.close()
    return ForkedWorker(process), ours


def run_worker(surroundings, connection, function, args):
    """Run a worker whose ranks are forked, too, as ``run_guarded``."""
    surroundings.take_over()
    spawned._CONTEXT = ForkedContext()
    child.run_spawned(os.getppid(), function, connection, *args)
