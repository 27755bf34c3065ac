"""What started Python processes do at their beginning and their end, and what is said of how they died."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from running import is_running

from cs336sys.processes.child import run_spawned
from cs336sys.processes.parent import call_guarded, python_module, start_for_good


def test_a_process_that_ends_finishes_what_it_began(tmp_path, capfd, monkeypatch):
    """It ends without being taken apart, and nothing gets lost by that."""
    # Which would leave nothing to be flushed.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    guarded, connection = call_guarded("endings:end_with_work_left", str(tmp_path))
    assert connection.recv() == "done"
    assert guarded.has_ended(60)
    assert guarded.process.returncode == 0
    guarded.kill()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written.pop("process that it started") == "reached"
    assert written == {"unclosed": "text", "thread": "text", "pool": "text", "atexit": "text"}
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "printed by Python" in captured.err
    assert "printed by C" in captured.err


@pytest.mark.parametrize(
    ("variable", "code"),
    [("NSYS_PROFILING_SESSION_ID", -signal.SIGABRT), ("CUDA_INJECTION64_PATH", -signal.SIGABRT), ("NO_PROFILER", 0)],
)
def test_a_process_under_a_profiler_ends_as_the_profiler_expects(monkeypatch, variable, code):
    monkeypatch.setenv(variable, "x")
    guarded, _ = call_guarded("endings:end_with_abort")
    assert guarded.has_ended(60)
    assert guarded.process.returncode == code
    guarded.kill()


def test_modules_in_the_working_folder_stand_in_for_none_of_pythons_own(tmp_path, monkeypatch, capfd):
    for name in ("random", "socket", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of a stranger')")
    monkeypatch.chdir(tmp_path)
    # Tests may run with the working folder on the path.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    guarded, connection = call_guarded("endings:spawn_another")
    path, found = connection.recv()
    assert (path, found) == (sys.path, tempfile.__file__)
    assert guarded.has_ended(60)
    assert guarded.process.returncode == 0
    guarded.kill()
    commands = [
        python_module("cs336sys", "--version"),
        [sys.executable, "-m", "cs336sys", "--version"],
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
    assert "stranger" not in capfd.readouterr().err


def test_a_spawned_process_does_not_die_with_the_thread_that_asked_for_it():
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_spawned, args=(os.getpid(), "endings:wait", theirs))
    thread = threading.Thread(target=lambda: (start_for_good(process), ours.recv()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert is_running(process.pid), "its thread has ended after it had asked to die with its parent"
    ours.send("end")
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:.* is multi-threaded:DeprecationWarning")
def test_a_process_can_be_spawned_after_a_fork():
    """A fork has no thread of its parent's that could start anything."""
    start_for_good(_Nothing())
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        start_for_good(_Nothing())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class _Nothing:
    def start(self):
        pass
