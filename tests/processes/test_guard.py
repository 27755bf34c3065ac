"""The guard: nothing that a program has started outlives it or its owner, wherever it hides."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from running import is_held, is_running, wait_for_ids, wait_until

from cs336sys.processes import guard
from cs336sys.processes.parent import Guarded, run_guarded_program

STUBBORN = str(Path(__file__).with_name("stubborn.py"))
PYTHON = (sys.executable, "-I", "-S")
ROLES = ("program", "target", "daemon")

# Owners in processes of their own, without torch.
OWNERS = {
    "any": "import sys, time; from cs336sys.processes.parent import Guarded; "
    "program = Guarded(sys.argv[1:]); time.sleep(600)",
    # As nsys is run.
    "nsys": "import sys; from cs336sys.processes.parent import run_guarded_program; run_guarded_program(sys.argv[1:])",
}


@pytest.mark.parametrize(("owner", "by"), [("any", signal.SIGTERM), ("any", signal.SIGKILL), ("nsys", signal.SIGKILL)])
def test_processes_of_a_program_die_with_the_owner(tmp_path, owner, by):
    with subprocess.Popen([sys.executable, "-c", OWNERS[owner], *PYTHON, STUBBORN, str(tmp_path)]) as process:
        ids = wait_for_ids(tmp_path, ROLES)
        assert all(map(is_running, ids))
        assert is_held(tmp_path)
        process.send_signal(by)
    wait_until(lambda: not any(map(is_running, ids)), 60)


def test_processes_of_a_program_die_when_it_dies(tmp_path):
    guarded = Guarded([*PYTHON, STUBBORN, str(tmp_path)])
    ids = wait_for_ids(tmp_path, ROLES)
    os.kill(ids[0], signal.SIGSEGV)
    assert guarded.has_ended(30)
    assert not any(map(is_running, ids))
    assert guarded.process.returncode == -signal.SIGSEGV
    guarded.kill()


def test_processes_left_behind_die_when_the_program_ends(tmp_path):
    done = run_guarded_program([*PYTHON, STUBBORN, str(tmp_path), "end"])
    assert (done.returncode, done.stdout) == (0, "")
    assert not any(map(is_running, wait_for_ids(tmp_path, ("end", "target", "daemon"))))


def test_a_terminated_guard_kills_and_a_killed_one_takes_the_program_along(tmp_path):
    for by, survivors in ((signal.SIGTERM, 0), (signal.SIGKILL, 2)):
        folder = tmp_path / by.name
        folder.mkdir()
        guarded = Guarded([*PYTHON, STUBBORN, str(folder)])
        ids = wait_for_ids(folder, ROLES)
        guarded.process.send_signal(by)
        assert guarded.has_ended(30)
        wait_until(lambda ids=ids: not is_running(ids[0]), 60)
        left = [process for process in ids if is_running(process)]
        assert len(left) == survivors, "whom nobody can find any more"
        for process in left:
            os.kill(process, signal.SIGKILL)
        guarded.kill()


def test_processes_that_a_look_at_all_processes_missed_are_found_by_the_next(tmp_path):
    """A process that was started while the list was read need not be in it."""
    script = (
        "import os, runpy, sys; listed = os.listdir; missed = []\n"
        "os.listdir = lambda path: listed(path) if path != '/proc' or len(missed) > 2 else missed.append(path) or []\n"
        f"runpy.run_path({guard.__file__!r}, run_name='__main__')"
    )
    told, tell = os.pipe()
    command = [sys.executable, "-c", script, str(told), "", *PYTHON, STUBBORN, str(tmp_path)]
    with subprocess.Popen(command, pass_fds=[told]):
        ids = wait_for_ids(tmp_path, ROLES)
        os.close(tell)
    os.close(told)
    assert not any(map(is_running, ids))


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_a_guard_ends_as_its_program_did(script, code):
    assert run_guarded_program([*PYTHON, "-c", script]).returncode == code


def test_a_program_prints_and_reads_nothing():
    done = run_guarded_program(
        [*PYTHON, "-c", "import sys; print(sys.stdin.read() or 'nothing'); print(3, file=sys.stderr)"]
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing\n", "3\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_ignores_no_signal_that_python_ignores():
    (line,) = run_guarded_program(["grep", "SigIgn", "/proc/self/status"]).stdout.splitlines()
    ignored = int(line.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_a_program_whose_time_is_up_is_killed_with_what_it_started(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_guarded_program([*PYTHON, STUBBORN, str(tmp_path)], timeout_s=0.7, variables={"NAME": "x"})
    assert not is_held(tmp_path)


def test_a_program_that_is_not_there():
    done = run_guarded_program(["/no/such/program"])
    assert done.returncode == 127
    assert done.stderr == "/no/such/program: No such file or directory\n"


def test_a_program_lives_on_when_the_thread_that_started_it_ends_and_is_killed_with_what_it_started(tmp_path):
    started = []
    thread = threading.Thread(target=lambda: started.append(Guarded([*PYTHON, STUBBORN, str(tmp_path)])))
    thread.start()
    ids = wait_for_ids(tmp_path, ROLES)
    thread.join()
    time.sleep(0.2)
    assert all(map(is_running, ids))
    started[0].kill()
    assert not any(map(is_running, ids))
    assert started[0].process.returncode == -signal.SIGKILL


def test_elsewhere_than_on_linux_the_process_group_dies(tmp_path):
    """No orphans are adopted, and there is no /proc."""
    script = (
        "import os, runpy, sys; sys.platform = 'elsewhere'; is_folder = os.path.isdir\n"
        "os.path.isdir = lambda path: path != '/proc' and is_folder(path)\n"
        f"runpy.run_path({guard.__file__!r}, run_name='__main__')"
    )
    told, tell = os.pipe()
    program = f"import os, time; os.fork(); open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(300)"
    command = [sys.executable, "-c", script, str(told), "", *PYTHON, "-c", program]
    with subprocess.Popen(command, pass_fds=[told]) as process:
        os.close(told)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        os.close(tell)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not any(is_running(int(path.name)) for path in tmp_path.iterdir()), 60)
