"""A sweep keeps what it measured, whatever happens to its cells."""

import contextlib
import csv
import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from fake_worker import FakeWorker
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.command_line import faults
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.commands.bench.tables import bench_tables
from cs336sys.errors import INTERRUPTED, TERMINATED, OutputError
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, read_results
from cs336sys.run import progress as progress_module
from cs336sys.run.cells import Outcome
from cs336sys.run.progress import showing_progress
from cs336sys.run.sweep import Sweep, run_sweep
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import name_object
from cs336sys.tables.render import render
from cs336sys.tables.saved import tidy, with_origin
from cs336sys.tables.table import Column, Table


def sweep(actions, **options):
    configurations = [{"action": action} for action in actions]
    return run_sweep("bench", "fake_cells:measure", configurations, SweepOptions(**options))


def test_failed_cells_end_neither_the_sweep_nor_the_command(tmp_path):
    path = tmp_path / "r.jsonl"
    measured = sweep(("measure", "out of memory", "print", "kill", "measure again", "unsupported"), save=path)
    assert [cell.status for cell in measured.cells] == ["ok", "oom", "ok", "error", "ok", "unsupported"]
    with pytest.raises(typer.Exit):
        measured.exit()
    results = read_results(path)
    assert list(results.runs) == [measured.run.run_id]
    assert results.cells == measured.cells


def test_resume_measures_again_what_was_measured_under_other_conditions(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    sweep(("measure",), save=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    now = lines[0]["environment"].get("OMP_NUM_THREADS")
    lines[0]["environment"]["OMP_NUM_THREADS"] = "77"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    taken = sweep(("measure",), save=path, resume_any=True)
    assert len(read_results(path).cells) == 1
    assert taken.run == read_results(path).runs[taken.cells[0].run_id], "titles name the machine of the cells"
    assert "--resume-any takes 1 cell that the file holds from other conditions: " in capsys.readouterr().err
    sweep(("measure",), save=path, resume=True)
    assert len(read_results(path).cells) == 2
    assert f"OMP_NUM_THREADS (77 then, {now} now)" in capsys.readouterr().err


def test_cells_whose_worker_does_not_start_time_out(tmp_path):
    path = tmp_path / "r.jsonl"
    configurations = [{"action": "measure"}, {"action": "print"}]
    for resume in (False, True):
        measured = run_sweep(
            "bench", "hangs_at_import:measure", configurations, SweepOptions(path, resume=resume, cell_timeout=0.5)
        )
        assert {(cell.status, cell.reason) for cell in measured.cells} == {
            ("timeout", "the measuring process did not start within 0.5 s")
        }
        assert measured.run is None
    assert len(read_results(path).cells) == 4
    assert sweep(("measure",), save=path, resume=True).cells[0].status == "ok"


def cells(*statuses):
    return tuple(Cell("bench", {}, status, reason="because") for status in statuses)


TABLE = Table("bench", "bench: tiny", (Column("size", "size"),), [{"size": "tiny"}])


def report(measured, capsys, **options):
    # The last was not asked for.
    pictures = [*((Path("p.png"), draw) for draw in options.pop("pictures", ())), (None, pytest.fail)]
    with pytest.raises(typer.Exit) as ended:
        measured.report(lambda cells, run: [TABLE], OutputOptions(**options), *pictures)
    return ended.value.exit_code, *capsys.readouterr()


def test_no_table_is_printed_of_no_cell(capsys):
    assert report(Sweep((), None, INTERRUPTED), capsys) == (130, "", "")


def test_no_picture_is_drawn_of_cells_that_were_not_measured(capsys):
    """An empty one was written over the last that showed something."""
    drawn = []
    code, _, err = report(Sweep(cells("oom"), None), capsys, pictures=[lambda *_: drawn.append("picture")])
    assert (code, drawn) == (1, [])
    assert err == "no cell was measured: no picture is drawn\n"


def test_tables_are_printed_before_a_file_that_cannot_be_written(capsys):
    """In this order: the table, then a sentence for each of them; pictures after the first that fails are drawn."""
    drawn = []

    def fail(*_):
        raise OutputError("cannot write --plot p.png: No space left on device")

    measured = Sweep(
        cells("ok"), None, faults=(OutputError("cannot write results to r.jsonl: No space left on device"),)
    )
    code, out, err = report(measured, capsys, pictures=[fail, lambda *_: drawn.append("second")])
    assert (code, out) == (1, render([TABLE], "markdown"))
    assert err == (
        "error: cannot write results to r.jsonl: No space left on device\n"
        "error: cannot write --plot p.png: No space left on device\n"
    )
    assert drawn == ["second"]


@pytest.fixture
def fake_worker(monkeypatch):
    monkeypatch.setattr("cs336sys.run.cells.Worker", FakeWorker)


def test_a_line_for_every_finished_cell_where_there_is_no_terminal(fake_worker, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("cs336sys.run.sweep.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    saved = tmp_path / "r.jsonl"
    sweep(("measure",), save=saved)
    capsys.readouterr()
    configurations = [
        {"size": "tiny", "action": "measure"},
        {"size": "tiny", "action": "out of memory", "reason": "no room"},
        {"size": "small", "action": "measure"},
    ]
    run_sweep("bench", "fake:cells", configurations)
    assert capsys.readouterr().err.splitlines() == [
        "bench: 1 of 3: ok: size tiny, action measure: 3.0 s, about 6.0 s left",
        "bench: 2 of 3: oom (no room): size tiny, action out of memory: 3.0 s, about 3.0 s left",
        "bench: 3 of 3: ok: size small, action measure: 3.0 s",
    ]
    sweep(("measure",), save=saved, resume_any=True)
    assert capsys.readouterr().err.endswith("bench: 1 of 1: ok: from the file\n")


def test_a_cell_that_takes_long_says_what_it_has_come_to(monkeypatch, capsys):
    """A command in a batch job was as silent about a cell that hung as about one that was measured."""
    threads, waits_s = [], []
    monkeypatch.setattr(
        progress_module.threading, "Thread", lambda **settings: threads.append(settings) or Mock(**settings)
    )

    def wait(event, wait_s):
        """Let a cell end while its third report is waited for."""
        waits_s.append(wait_s)
        if len(waits_s) == 3:
            progress.cell_done(Cell("bench", {}, "ok"), 1.0)
        return event.is_set()

    monkeypatch.setattr(progress_module.threading.Event, "wait", wait)
    with showing_progress("bench", [{}, {}], is_shown=True, measured_here=True) as progress:
        progress.at_stage("building")
        progress.at_stage("timing steps")
        threads[0]["target"](*threads[0]["args"])
        progress.at_stage("quick")
    for thread in threads:  # Neither says anything of a cell that has ended.
        thread["target"](*thread["args"])
    assert waits_s == [30.0, 30.0, 60.0, 30.0, 30.0]
    assert [thread["daemon"] for thread in threads] == [True, True]
    assert capsys.readouterr().err.splitlines() == [
        "bench: 1 of 2: timing steps, after 30 s",
        "bench: 1 of 2: timing steps, after 1 min 00 s",
        "bench: 1 of 2: ok: 1.0 s, about 1.0 s left",
    ]


def test_a_process_that_measures_itself_does_not_read_its_own_standard_error(monkeypatch):
    """Native code that filled the pipe while it kept Python's lock would have waited for its reader for ever."""
    stderr, is_same = os.fstat(2), []

    def measure(configuration, progress):
        is_same.append(os.path.samestat(stderr, os.fstat(2)))
        return Outcome("ok")

    monkeypatch.setitem(sys.modules, "cells_here", types.SimpleNamespace(measure=measure))
    monkeypatch.setattr("cs336sys.run.cells.use_private_caches", lambda: None)
    # A model that was passed as an object cannot be found by a worker process.
    assert run_sweep("bench", "cells_here:measure", [{"model": name_object(measure)}]).cells[0].status == "ok"
    assert is_same == [True]


@pytest.mark.parametrize(
    ("number", "handler", "interruption"),
    [(signal.SIGINT, signal.default_int_handler, INTERRUPTED), (signal.SIGTERM, faults._terminate, TERMINATED)],
)
def test_a_cell_is_saved_and_shown_though_an_interruption_comes_meanwhile(
    fake_worker, monkeypatch, tmp_path, capsys, number, handler, interruption
):
    append = ResultsFile.append

    def interrupted(file, record):
        signal.raise_signal(number)
        append(file, record)

    monkeypatch.setattr(ResultsFile, "append", interrupted)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(number, handler)
    try:
        ended = sweep(("measure", "measure"), save=tmp_path / "r.jsonl")
        assert signal.getsignal(signal.SIGINT) in (before[signal.SIGINT], handler)
    finally:
        for each, old in before.items():
            signal.signal(each, old)
    assert ended.interruption == interruption
    assert read_results(tmp_path / "r.jsonl").cells == ended.cells
    assert [cell.status for cell in ended.cells] == ["ok"]
    assert capsys.readouterr().err.endswith(": 1 of 2 cells measured\n")


def test_an_interruption_is_told_before_processes_are_ended(fake_worker, monkeypatch, capsys):
    """Those of the 8B step took longer to end than their time limit had left: nothing was said at all."""
    told_before = []
    monkeypatch.setattr(FakeWorker, "close", lambda worker: told_before.append(capsys.readouterr().err))
    ended = sweep(("measure", "terminate", "measure"))
    assert ([cell.status for cell in ended.cells], ended.interruption) == (["ok"], TERMINATED)
    assert told_before[-1].endswith("terminated: 1 of 3 cells measured\n")
    assert "terminated" not in capsys.readouterr().err


def test_a_full_disk_costs_only_what_it_had_no_room_for(fake_worker, tmp_path, monkeypatch, capsys):
    """The disk is full during the second of three cells: that one is written with the third."""
    path = tmp_path / "r.jsonl"
    append, truncate = ResultsFile.append, []

    def fill(file, record):
        full = isinstance(record, Cell) and record.configuration["action"] == "full"
        with monkeypatch.context() as patched:
            if full:
                patched.setattr(file, "_stream", FullDisk(file._stream, truncate))
            append(file, record)
        if full:
            # Nothing but whole records.
            assert [cell.configuration["action"] for cell in read_results(path).cells] == ["measure"]

    monkeypatch.setattr(ResultsFile, "append", fill)
    ended = sweep(("measure", "full", "measure again"), save=path)
    assert truncate
    assert ended.faults == ()
    assert [cell.configuration["action"] for cell in read_results(path).cells] == ["measure", "full", "measure again"]
    warning = f"warning: cannot write results to {path}: No space left on device; it is tried again after every cell\n"
    assert warning in capsys.readouterr().err


def test_a_results_file_that_is_removed_between_cells_is_written_again(fake_worker, tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.jsonl"
    append = ResultsFile.append

    def remove(file, record):
        append(file, record)
        if isinstance(record, Cell) and record.configuration["action"] != "measure":
            path.unlink()

    monkeypatch.setattr(ResultsFile, "append", remove)
    actions = ("measure", "remove", "measure again")
    ended = sweep(actions, save=path)
    assert ended.faults == ()
    assert [cell.configuration["action"] for cell in read_results(path).cells] == [*actions]
    warning = f"warning: {path} was removed while cells were appended to it: it is written again\n"
    assert capsys.readouterr().err.count(warning) == 2, "before the next cell, and at the end"


def test_a_disk_that_stays_full_fails_the_sweep(fake_worker, tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    sweep(("measure",), save=path)
    before = path.read_bytes()
    open_file = ResultsFile.__init__

    def open_on_full_disk(file, path):
        open_file(file, path)
        file._stream = FullDisk(file._stream, [])

    monkeypatch.setattr(ResultsFile, "__init__", open_on_full_disk)
    ended = sweep(("measure again",), save=path)
    assert [str(fault) for fault in ended.faults] == [f"cannot write results to {path}: No space left on device"]
    assert path.read_bytes() == before


class FullDisk:
    """A file on a disk that has room for ten more bytes."""

    def __init__(self, stream, truncated):
        self._stream, self._truncated, self._room = stream, truncated, 10

    def write(self, data):
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._stream.write(data[: self._room])
        self._room -= written
        return written

    def truncate(self, size):
        self._truncated.append(size)
        return self._stream.truncate(size)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def on_a_terminal(script):
    """What a Python program leaves on a terminal as wide as this: its lines, without what moves the cursor."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    # The end of a terminal is an error on Linux and no bytes elsewhere.
    with contextlib.suppress(OSError):
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    assert process.wait() == 0
    # What is written after a line was erased (2K) does not stand behind what was there.
    ends = re.sub(r"\x1b\[2K", "\n", shown.decode())
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", ends))


def test_output_of_workers_stands_above_the_bar():
    lines = on_a_terminal(
        "import os, subprocess\n"
        "from cs336sys.run.progress import showing_progress\n"
        "with showing_progress('bench', [{'size': 'tiny'}], is_shown=True) as progress:\n"
        "    progress.at_stage('forward')\n"
        "    subprocess.run('echo USDT:2026 profiler_start >&2; echo a warning of torch >&2', shell=True)\n"
        "os.write(2, b'the end')\n"
    )
    assert "a warning of torch" in lines
    assert any(line.startswith("bench ") and "0/1" in line and line.endswith("forward") for line in lines)
    assert lines[-1].endswith("the end")
    assert not any("USDT" in line for line in lines)


def test_a_log_has_what_workers_write_without_what_torch_tells_tracers(tmp_path):
    """In its order, to the last byte, also while the process that writes lives on."""
    script = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from cs336sys.run.progress import showing_progress\n"
        "from cs336sys.results.model import Cell\n"
        "with showing_progress('bench', [{'size': 'tiny'}], is_shown=True) as progress:\n"
        "    subprocess.run('echo USDT:2026 profiler_start >&2; echo a warning >&2', shell=True)\n"
        "    waiting = subprocess.Popen('read x; echo later >&2', shell=True, stdin=subprocess.PIPE)\n"
        "    progress.cell_done(Cell('bench', {}, 'ok'), 1.0)\n"
        "    os.write(2, b'no end of line')\n"
        "os.write(2, b', the end\\n')\n"
        "waiting.communicate(b'go')\n"
        "while 'later' not in Path(sys.argv[1]).read_text(): time.sleep(0.01)\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        subprocess.run([sys.executable, "-c", script, log], stderr=stderr, check=True, timeout=60)
    assert log.read_text() == "a warning\nbench: 1 of 1: ok: 1.0 s\nno end of line, the end\nlater\n"


def test_all_of_a_log_is_passed_on_before_what_follows_it():
    """On busy cores the thread that passes it on may wait longer than a second for its turn."""
    written = []

    def write(line):
        time.sleep(1.1)
        written.append(line)

    with progress_module._stderr_by_lines(write):
        os.write(2, b"a warning\n")
    assert written == [b"a warning\n"]


def test_a_log_on_a_full_disk_stops_nobody():
    script = (
        "import subprocess\n"
        "from cs336sys.run.progress import showing_progress\n"
        "with showing_progress('bench', [{}], is_shown=True):\n"
        "    subprocess.run('yes | head -c 300000 >&2', shell=True, check=True, timeout=60)\n"
    )
    with open("/dev/full", "wb") as stderr:
        assert subprocess.run([sys.executable, "-c", script], stderr=stderr, timeout=120).returncode == 0


def test_a_column_that_there_is_not_costs_no_measurement(capsys):
    """The whole table is printed, the pictures are drawn, then comes the sentence."""
    drawn = []
    code, out, err = report(Sweep(cells("ok"), None), capsys, columns=["siez"], pictures=[lambda *_: drawn.append(1)])
    assert (code, drawn) == (2, [1])
    assert "tiny" in out
    assert err == "error: --columns 'siez': choose from size; did you mean size?\n"


def test_cool_down_is_between_measured_cells(fake_worker, tmp_path, monkeypatch):
    """Not before the first one, not for cells that are known, not between those that are measured in turn."""
    slept = []
    clock = types.SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr("cs336sys.run.sweep.time", clock)
    path = tmp_path / "r.jsonl"
    sweep(("measure",), save=path, cool_down=7.0)
    assert slept == []
    sweep(("measure", "print", "unsupported"), save=path, resume=True, cool_down=7.0)
    assert slept == [7.0]
    turns = [
        {"action": action, "interleave": "action", "pair": pair} for pair in (1, 2) for action in ("measure", "print")
    ]
    run_sweep("bench", "fake_cells:measure", turns, SweepOptions(cool_down=3.0))
    assert slept == [7.0, 3.0]


@pytest.mark.parametrize("command", ["bench", "attn", "losses", "memprof", "nsys", "ddp", "shard", "flash", "kernels"])
def test_columns_are_refused_before_anything_is_measured(command, monkeypatch, tmp_path):
    def measure(*arguments, **options):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("cs336sys.run.cells.Worker", measure)
    needs = {"losses": ["--text", str(Path(__file__))], "nsys": ["--profiler", "torch"]}.get(command, [])
    arguments = [command, *needs, "--device", "cpu"]
    for option, name, hint in (
        ("--columns", "status,sttaus", "--columns 'sttaus': choose from "),
        ("--sort", "-sttaus", "--sort 'sttaus': choose from "),
        ("--table", "sped", "--table 'sped': choose from "),
    ):
        result = CliRunner().invoke(app, [*arguments, option, name])
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert f"error: {hint}" in result.stderr
    for name in ("seed,driver,run_id", "status"):
        result = CliRunner().invoke(app, [*arguments, "--columns", name])
        assert str(result.exception) == "a worker was started", result.output


def test_programs_get_all_settings_and_the_machine_of_each_cell():
    sizes = {"a": choose_size("tiny", context=16), "b": choose_size("tiny", context=32)}
    cells_of_runs = [
        Cell("bench", Workload(size).configuration(), "oom", run_id=name, reason="too large")
        for name, size in sizes.items()
    ]
    runs = {name: Run(name, f"day {name}", (), {"gpu": f"GPU {name}"}, {}) for name in sizes}
    rows = with_origin(cells_of_runs, runs)
    table = tidy("bench", bench_tables(rows, None), rows)[0]
    first, second = csv.DictReader(io.StringIO(render([table], "csv")))
    columns = ("context", "gpu_name", "date", "reason", "seed")
    assert [first[name] for name in columns] == ["16", "GPU a", "day a", "too large", "0"]
    assert [second[name] for name in columns] == ["32", "GPU b", "day b", "too large", "0"]
    # The same columns, whatever the cells are.
    (alone,) = csv.DictReader(io.StringIO(render(tidy("bench", bench_tables(rows[:1], None), rows[:1]), "csv")))
    of_none = csv.DictReader(io.StringIO(render(tidy("bench", bench_tables([], None)), "csv")))
    assert list(alone) == list(first) == of_none.fieldnames
    assert not {"gpu_name", "run_id"} & set(cells_of_runs[0].configuration)
