"""Commands whose output cannot be written, or that are ended: as a user sees them, in processes of their own."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app

COMMAND = [sys.executable, "-m", "cs336sys"]
PAPER = ["account", "buckets"]
TINY = ["bench", "--size", "tiny", "--num-layers", "1", "--device", "cpu", "--batch-size", "1", "--warmup", "0"]


def shell(redirected, *arguments):
    """Run a command in a shell: ``redirected`` goes behind it. Its output is buffered."""
    command = ["bash", "-c", f'"$@" {redirected}', "bash", *COMMAND, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


FULL = "error: cannot write standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("redirected", "arguments", "code", "sentence"),
    [
        ("> /dev/full", PAPER, 1, FULL),
        ("> /dev/full", ["--help"], 1, FULL),
        (">&-", PAPER, 1, "error: cannot write the result: standard output is closed; give a file with --output\n"),
        (">&- 2>&-", PAPER, 1, ""),
        # A reader that has left.
        ("| true; exit ${PIPESTATUS[0]}", PAPER, 141, ""),
        ("| true; exit ${PIPESTATUS[0]}", ["--help"], 141, ""),
    ],
)
def test_standard_output_that_cannot_be_written_is_one_sentence(redirected, arguments, code, sentence):
    ended = shell(redirected, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", sentence)


def test_child_processes_have_standard_streams_where_the_command_s_are_closed():
    """Else the first file that a worker opens would take their place, and get what is written to them."""
    child = "import sys; sys.stderr.write(str(None in (sys.stdin, sys.stdout, sys.stderr)))"
    script = (
        "import subprocess, sys\n"
        "from cs336sys.command_line.faults import open_closed_streams\n"
        "open_closed_streams()\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    command = ["bash", "-c", '"$@" <&- >&-', "bash", sys.executable, "-c", script]
    assert subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr == "False"


def test_a_result_goes_to_its_file_where_standard_output_is_closed(tmp_path):
    ended = shell(">&-", *PAPER, "--output", str(tmp_path / "result.md"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Gradient buckets" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize(("option", "name"), [("--output", "file.md"), ("--plot", "file.svg")])
def test_the_table_is_printed_where_a_file_finds_no_room(monkeypatch, tmp_path, option, name):
    arguments = ["account", "parallel"]
    table = CliRunner().invoke(app, arguments).stdout
    path = tmp_path / name

    def fill_disk(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    result = CliRunner().invoke(app, [*arguments, option, str(path)])
    assert (result.exit_code, result.stdout) == (1, table)
    assert result.stderr == f"error: cannot write {option} {path}: No space left on device\n"


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_prints_what_was_measured(number, code, word):
    # A second cell that outlasts the way of the signal on a loaded machine.
    arguments = [*TINY, "--context", "16,2048", "--steps", "50", "--format", "csv"]
    # Else Ctrl-C would not reach it where tests run in the background of a shell, which ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    # Every half minute a cell says what it has come to.
    line = next(line for line in process.stderr if ", after " not in line)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert line.startswith("bench: 1 of 2: ok: context 16: ")
    assert (process.returncode, err) == (code, f"{word}: 1 of 2 cells measured\n")
    assert len(out.splitlines()) == 2
