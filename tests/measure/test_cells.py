"""The worker process: every way a cell can end becomes its status, and the next cell is measured all the same."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cs336sys.errors import CapabilityError
from cs336sys.measure.cells import Worker


@pytest.fixture(scope="module")
def worker():
    worker = Worker("fake_cells:measure", ("bench", "--size", "tiny"))
    yield worker
    worker.close()


def run(worker, action, timeout_s=60.0):
    stages = []
    return worker.measure({"action": action}, timeout_s=timeout_s, progress=stages.append), stages


def test_measured_cell_comes_back_with_samples_and_stages(worker):
    outcome, stages = run(worker, "measure")
    assert outcome.status == "ok"
    assert outcome.samples["step"].mean == 2.0
    assert stages == ["forward"]


def test_run_describes_the_machine_and_the_arguments(worker):
    assert worker.run.arguments == ("bench", "--size", "tiny")
    assert worker.run.machine["torch"]


@pytest.mark.parametrize(
    ("action", "status", "reason"),
    [
        ("out of memory", "oom", "out of memory at forward: DefaultCPUAllocator: can't allocate memory: you tried"),
        ("wrapped out of memory", "oom", "out of memory at forward: the compiler failed"),
        ("raise", "error", "RuntimeError at forward: the kernel is wrong. Second sentence"),
        ("kill", "error", "the measuring process was killed by SIGKILL: out of host memory, or killed from outside"),
        ("exit", "error", "the measuring process ended with exit code 7"),
        ("capture", "unsupported", "phase 'forward' cannot be captured in a CUDA graph"),
    ],
)
def test_failed_cell_has_its_status_and_costs_the_worker_its_life(worker, action, status, reason):
    before = run(worker, "measure")[0].derived["pid"]
    outcome, _ = run(worker, action)
    assert (outcome.status, outcome.samples) == (status, {})
    assert outcome.reason.startswith(reason)
    after, _ = run(worker, "measure")
    assert after.status == "ok"
    assert after.derived["pid"] != before


def test_unsupported_cell_keeps_the_worker(worker):
    before = run(worker, "measure")[0].derived["pid"]
    outcome, _ = run(worker, "unsupported")
    assert (outcome.status, outcome.reason) == ("unsupported", "no such unit here")
    assert run(worker, "measure")[0].derived["pid"] == before


def test_cell_is_given_up_after_its_time(worker):
    started = time.monotonic()
    outcome, _ = run(worker, "sleep", timeout_s=0.5)
    assert (outcome.status, outcome.reason) == ("timeout", "not done after 0.5 s")
    assert time.monotonic() - started < 20
    assert run(worker, "measure")[0].status == "ok"


def test_idle_worker_ends_by_itself_and_a_measuring_one_is_killed():
    worker = Worker("fake_cells:measure")
    run(worker, "measure")
    process = worker._child.process
    worker.close()
    assert process.exitcode == 0
    run(worker, "measure")
    process = worker._child.process
    run(worker, "sleep", timeout_s=0.2)
    assert process.exitcode == -signal.SIGKILL
    worker.close()


def test_what_a_cell_prints_goes_to_stderr(worker, capfd):
    run(worker, "print")
    captured = capfd.readouterr()
    assert captured.out == ""


def test_worker_that_cannot_start_is_one_sentence():
    with pytest.raises(CapabilityError, match=r"the measuring process did not start: .* exit code 1"):
        Worker("no_such_module:measure").run  # noqa: B018


def test_worker_dies_with_its_parent():
    """A killed parent leaves no orphan, even in the middle of a cell."""
    script = (
        "from cs336sys.measure.cells import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker('fake_cells:measure')\n"
        "    worker.run\n"
        "    print(worker._child.process.pid, flush=True)\n"
        "    worker.measure({'action': 'sleep'}, timeout_s=None, progress=str)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        worker_pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 10
    while is_running(worker_pid):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
