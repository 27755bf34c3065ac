"""The worker process: every way a cell can end becomes its status, and the next cell is measured all the same."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_processes import started_as_by_users
from running import is_held, is_running, wait_for_ids

from cs336sys.errors import DEBUG_VARIABLE, LostProcessError
from cs336sys.processes import parent
from cs336sys.run import cells
from cs336sys.run.cells import Outcome, Worker, _Child, guarded


@pytest.fixture(scope="module", autouse=True)
def real_processes():
    with started_as_by_users():
        yield


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


@pytest.mark.parametrize("debug", [False, True])
def test_a_lost_process_is_one_sentence_unless_more_is_asked_for(debug, monkeypatch, capfd):
    def measure(configuration, progress):
        progress("timing naive")
        raise LostProcessError("rank 1 of 2: was killed by SIGKILL\n\nrank 0 was here:\nin wait")

    if debug:
        monkeypatch.setenv(DEBUG_VARIABLE, "1")
    else:
        monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    outcome = guarded(measure, {}, lambda stage: None)
    assert (outcome.status, outcome.reason) == ("error", "rank 1 of 2: was killed by SIGKILL, at timing naive")
    assert not outcome.leaves_worker_sound
    assert ("rank 0 was here" in capfd.readouterr().err) == debug


def test_a_reason_does_not_end_at_a_colon():
    def measure(configuration, progress):
        raise RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\nSet more")

    reason = guarded(measure, {}, lambda stage: None).reason
    assert reason == (
        "RuntimeError at start: backend='inductor' raised: InvalidCxxCompiler: No working C++ compiler found"
    )


@pytest.mark.parametrize(("kills", "status"), [(4, "oom"), (3, "error")])
def test_a_process_that_the_kernel_killed_for_lack_of_memory_ran_out_of_it(kills, status, monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    for module in (cells, parent):
        monkeypatch.setattr(module, "out_of_memory_kills", lambda: kills)
    ended = SimpleNamespace(has_ended=lambda timeout_s: True, process=SimpleNamespace(returncode=-signal.SIGKILL))
    assert _Child(ended, ours, 3).receive(10).status == status


@pytest.mark.parametrize(
    ("action", "status", "reason"),
    [
        ("out of memory", "oom", "out of memory at forward: DefaultCPUAllocator: can't allocate memory: you tried"),
        ("wrapped out of memory", "oom", "out of memory at forward: the compiler failed"),
        ("raise", "error", "RuntimeError at forward: the kernel is wrong. Second sentence"),
        ("kill while sending", "error", "the measuring process was killed by SIGKILL"),
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


@pytest.mark.usefixtures("time_limit")
def test_cell_is_given_up_after_its_time_with_all_that_it_started(worker, tmp_path, monkeypatch):
    """Its time is up when all has begun: the clock waits for that."""
    assert worker.start() is None
    now_s, stages, ids = 0.0, [], []

    def progress(stage):
        nonlocal now_s
        stages.append(stage)
        if stage != "forward":
            ids.extend(wait_for_ids(tmp_path, ("program", "target", "daemon")))
            assert is_held(tmp_path)
            now_s = 300.0

    monkeypatch.setattr("cs336sys.run.cells.time", SimpleNamespace(monotonic=lambda: now_s))
    configuration = {"action": "sleep beside others", "folder": str(tmp_path)}
    outcome = worker.measure(configuration, timeout_s=300.0, progress=progress)
    assert (outcome.status, outcome.reason) == ("timeout", "not done after 300 s")
    assert not is_held(tmp_path)
    assert not any(map(is_running, ids))
    assert Path(stages[-1]).name.startswith("cs336sys-")
    assert not Path(stages[-1]).exists(), "a temporary folder of the killed process"
    assert run(worker, "measure")[0].status == "ok"


def test_worker_that_died_between_two_cells_is_replaced(worker):
    before = run(worker, "measure")[0].derived["pid"]
    os.kill(before, signal.SIGKILL)
    assert worker._child.guarded.has_ended(60)
    outcome, _ = run(worker, "measure")
    assert outcome.status == "ok"
    assert outcome.derived["pid"] != before


def test_result_that_cannot_be_read_is_an_error():
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(b"cno_such_module\nvalue\n.")
    outcome = _Child(None, ours).receive(10)
    assert outcome.status == "error"
    assert outcome.reason == "cannot read the measuring process's answer: No module named 'no_such_module'"


def test_worker_that_does_not_start_in_time_times_out_and_one_that_dies_is_an_error():
    """Without torch: neither comes as far."""
    worker = Worker("hangs_at_import:measure")
    for _ in range(2):
        outcome = worker.measure({}, timeout_s=0.7, progress=str)
        assert outcome == Outcome("timeout", reason="the measuring process did not start within 0.7 s")
    assert worker.run is None
    worker._measure, worker.run = "no_such_module:measure", object()
    outcome = worker.measure({}, timeout_s=60, progress=str)
    assert outcome.status == "error"
    assert outcome.reason == "the measuring process did not start: the measuring process ended with exit code 1"
    worker.close()


def test_idle_worker_ends_by_itself_and_a_measuring_one_is_killed():
    worker = Worker("fake_cells:measure")
    run(worker, "measure")
    process = worker._child.guarded.process
    worker.close()
    assert process.returncode == 0
    run(worker, "measure")
    process = worker._child.guarded.process
    run(worker, "sleep", timeout_s=0.2)
    assert process.returncode == -signal.SIGKILL
    worker.close()


def test_a_worker_interrupted_as_its_cell_begins_is_killed_in_silence(monkeypatch, capfd):
    def send(connection, configuration):
        send_configuration(connection, configuration)
        assert connection.poll(60)
        raise KeyboardInterrupt

    worker = Worker("fake_cells:measure")
    worker.start()
    send_configuration = Connection.send
    monkeypatch.setattr(Connection, "send", send)
    with pytest.raises(KeyboardInterrupt):
        run(worker, "tell for ever")
    process = worker._child.guarded.process
    worker.close()
    assert process.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == ""


def test_a_worker_nobody_listens_to_ends_in_silence(capfd):
    worker = Worker("fake_cells:measure")
    worker.start()
    child = worker._child
    child.connection.send({"action": "tell for ever"})
    assert child.connection.poll(60)
    child.connection.close()
    assert child.guarded.has_ended(60)
    assert child.guarded.process.returncode == 0
    worker.close()
    assert capfd.readouterr().err == ""


def test_output_of_a_cell_goes_to_stderr(worker, capfd):
    run(worker, "print")
    captured = capfd.readouterr()
    assert captured.out == ""


def test_worker_that_stops_before_its_first_message_is_ended(tmp_path):
    worker = Worker("fake_cells:measure", silence_s=20.0)
    with contextlib.closing(worker):
        outcome = worker.measure({"action": "stop"}, timeout_s=None, progress=str)
    assert outcome.status == "timeout"
