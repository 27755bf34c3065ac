import ast
import gzip
import json
import math
import os
import re
import subprocess
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import cs336sys
from cs336sys.errors import UsageError
from cs336sys.results import foreign
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, Samples, json_text, read_results, read_several

RUN = Run("r1", "2026-01-01T00:00:00+00:00", ("bench",), {"device": "NVIDIA H200"}, {"seed": 0})
CELL = Cell(
    "bench",
    {"size": "tiny", "steps": 2},
    "ok",
    {"step": Samples("ms", "cuda events", (1.0, 2.5), warmup=(9.0,))},
    {"tokens_per_s": 10.0, "mfu_percent": None},
    run_id="r1",
)
FAILED = Cell("bench", {"size": "10b"}, "oom", reason="out of memory", run_id="r1")


def write(path, *records):
    file = ResultsFile(path)
    for record in records:
        file.append(record)
    file.close()


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_written_data_is_read_back(tmp_path, name):
    path = tmp_path / "new folder" / name
    write(path, RUN, CELL, FAILED)
    results = read_results(path)
    assert results.runs == {"r1": RUN}
    assert results.cells == (CELL, FAILED)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_every_record_is_on_disk_before_the_next_is_measured(tmp_path, name):
    path = tmp_path / name
    file = ResultsFile(path)
    file.append(RUN)
    file.append(CELL)
    assert read_results(path).cells == (CELL,)
    file.close()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_files_can_be_concatenated(tmp_path, ending):
    first, second, both = (tmp_path / f"{name}.{ending}" for name in ("a", "b", "ab"))
    write(first, RUN, CELL)
    other = Run("r2", RUN.time, (), {"device": "cpu"}, {})
    write(second, other, Cell("bench", {"size": "small"}, "ok", run_id="r2"))
    both.write_bytes(first.read_bytes() + second.read_bytes())
    results = read_results(both)
    assert set(results.runs) == {"r1", "r2"}
    assert [results.runs[cell.run_id].machine for cell in results.cells] == [
        {"device": "NVIDIA H200"},
        {"device": "cpu"},
    ]
    assert read_several(f"{first},{second}") == results
    both.rename(tmp_path / f"a,b.{ending}")
    assert read_several(str(tmp_path / f"a,b.{ending}")) == results
    with pytest.raises(UsageError, match="cannot read results from"):
        read_several(f"{first},{both}")


def no_bare_name(name):
    raise AssertionError(f"{name} is no JSON")


def test_a_file_is_json_whatever_was_measured_and_reads_back(tmp_path):
    path = tmp_path / "r.jsonl"
    not_finite = Samples("nats", "of every step", (1.0, math.nan, math.inf), warmup=(-math.inf,))
    cell = replace(CELL, samples={"step": not_finite}, derived={"tokens_per_s": math.inf, "table": [{"x": math.nan}]})
    write(path, RUN, cell, CELL)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=no_bare_name)
    assert '"measured": [1.0, "NaN", "Infinity"], "warmup": ["-Infinity"]' in path.read_text()
    first, second = read_results(path).cells
    assert repr(first) == repr(cell)
    assert second == CELL


def test_nothing_writes_json_that_is_none():
    """Every call of json.dump and json.dumps in the package says allow_nan=False."""
    calls = [
        (path.name, node.lineno, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
        for path in Path(cs336sys.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump")
    ]
    assert len(calls) > 5
    assert [call for call in calls if call[2].get("allow_nan") != "False"] == []


@pytest.mark.parametrize(
    ("argument", "saved"),
    [
        ("/home/me/mine.py:build", "~/mine.py:build"),
        ("--save=/home/me/r.jsonl", "--save=~/r.jsonl"),
        ("/data/me", "~"),
        ("a.pickle,/data/me/b.pickle", "a.pickle,~/b.pickle"),
        ("../../home/me/x", "../..~/x"),
        ("/home/me2/x", "/home/me2/x"),
        ("/home/me-old/x", "/home/me-old/x"),
        ("/backup/home/me/x", "/backup/home/me/x"),
        ("~/x", "~/x"),
    ],
)
def test_the_command_line_names_no_home_folder(argument, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me/")
    monkeypatch.setattr(os.path, "realpath", lambda path: path.replace("/home/me", "/data/me"))
    run = Run("id", "now", ("bench", argument), {}, {})
    assert run.arguments == ("bench", saved)
    monkeypatch.undo()
    monkeypatch.setenv("HOME", "/")
    assert Run("id", "now", ("/x", "/"), {}, {}).arguments == ("/x", "/")


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(
    ("written", "instead", "fault"),
    [
        ('"configuration": {', '"configuration": 1, "other": {', "configuration is no dict"),
        ('"derived": {', '"derived": [], "other": {', "derived is no dict"),
        ('"measured": [1.0, 2.5]', '"measured": [1.0, {}]', "a sample of step is no number"),
        ('"measured": [1.0, 2.5]', f'"measured": [{10**400}]', "an integer has more than 64 bits"),
        ('"unit": "ms"', '"unit": 1', "unit is no str"),
        ('"size": "tiny"', f'"size": {DEEP}', "values are nested more than 32 deep"),
        ('"size": "tiny"', f'"size": {"[" * 200}', "line 2 is cut, or no record of results"),
        ('"size": "tiny"', f'"size": {"[" * 100_000}{"]" * 100_000}', "line 2 is cut, or no record of results"),
        ('"size": "tiny"', f'"size": [{"[]," * 200_000}1]', "line 2 is larger than any record of results"),
        ('"machine": {', '"machine": null, "other": {', "line 1 is no run of this schema: machine is no dict"),
    ],
)
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_record_of_another_shape_costs_only_its_line(tmp_path, name, written, instead, fault):
    path = tmp_path / "r.jsonl"
    write(path, RUN, CELL, FAILED)
    assert written in path.read_text()
    text = path.read_text().replace(written, instead, 1)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    results = read_results(path)
    assert FAILED in results.cells
    assert len(results.runs) + len(results.cells) == 2
    (said,) = results.passed_over
    assert re.search(fault, said)


def test_control_characters_of_strangers_are_spelled_out(tmp_path):
    path = tmp_path / "r.jsonl"
    hostile = "\x1b]0;title\x07\x9b31m\u202egnp.exe\ud800 tab\t line\r\nüñ"
    write(path, RUN, replace(CELL, configuration={hostile: [hostile]}, reason=hostile))
    (cell,) = read_results(path).cells
    spelled = r"\x1b]0;title\x07\x9b31m\u202egnp.exe\ud800 tab" + "\t line\nüñ"
    assert (cell.configuration, cell.reason) == ({spelled: [spelled]}, spelled)


@pytest.mark.parametrize("kind", ["zeros", "cells"])
def test_a_bomb_is_refused_within_a_gibibyte(tmp_path, kind):
    """1 MB that becomes 1 GB, read by a process that may not take more than 1 GiB."""
    path = tmp_path / "bomb.jsonl.gz"
    line = json_text({"schema_version": 1, "kind": "cell"} | asdict(CELL)).encode() + b"\n"
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = deflate.compress(b"") + deflate.flush(zlib.Z_FULL_FLUSH)
    # After a full flush what is compressed can be repeated.
    block = deflate.compress(bytes(2**24) if kind == "zeros" else line * (2**24 // len(line)))
    block += deflate.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(head + block * 64)
    assert path.stat().st_size < 5 * 2**20
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); from pathlib import Path;"
        "from cs336sys.results.model import read_results; read_results(Path(sys.argv[1]))"
    )
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert result.stderr.endswith(
        "bomb.jsonl.gz holds more than 512 MiB when decompressed, which is the most that is read\n"
    )


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_devices_and_pipes_without_a_writer_are_refused(tmp_path, monkeypatch):
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(UsageError, match=f"^{device} is a device, not a file: give a file, or a pipe"):
            read_results(Path(device))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(foreign, "_WRITER_S", 0.0)
    with pytest.raises(UsageError, match="pipe is a pipe that no program writes to"):
        read_results(pipe)


def test_a_pipe_is_read_and_may_be_compressed(tmp_path):
    path, pipe = tmp_path / "r.jsonl.gz", tmp_path / "pipe"
    write(path, RUN, CELL, FAILED)
    os.mkfifo(pipe)
    for program in ("cat", "zcat"):
        # It writes late, and in two parts.
        line = 'exec > "$1"; sleep 0.2; $0 "$2" | head -c 99; sleep 0.2; $0 "$2" | tail -c +100'
        writer = subprocess.Popen(["bash", "-c", line, program, str(pipe), str(path)])
        results = read_results(pipe)
        assert writer.wait() == 0
        assert (results.cells, results.passed_over) == ((CELL, FAILED), ())


def test_a_pipe_without_end_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        subprocess.Popen(["bash", "-c", 'exec cat /dev/zero > "$0"', str(pipe)], stderr=subprocess.DEVNULL),
        pytest.raises(UsageError, match="pipe holds more than 512 MiB, which is the most that is read"),
    ):
        read_results(pipe)


def test_an_unwritable_file_is_found_when_it_is_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write results to"):
        ResultsFile(tmp_path / "file" / "r.jsonl")
    with pytest.raises(UsageError, match="cannot write results to"):
        ResultsFile(tmp_path)


def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    path = tmp_path / "r.jsonl"
    first = ResultsFile(path)
    with pytest.raises(
        UsageError, match=r"cannot write results to .*: (process \d+ \(.*\)|another process) is writing"
    ):
        ResultsFile(path)
    first.close()
    ResultsFile(path).close()


OTHER = replace(CELL, configuration={"size": "small"})


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
@pytest.mark.parametrize("change", ["remove", "move", "replace", "rewrite", "empty", "remove with folder"])
def test_nothing_is_lost_of_a_file_that_others_change_meanwhile(tmp_path, name, change):
    """An editor saves what it read before the second cell was appended."""
    path = tmp_path / "folder" / name
    earlier = replace(RUN, run_id="r0"), replace(OTHER, run_id="r0")
    write(path, *earlier)
    file = ResultsFile(path)
    file.append(RUN)
    file.append(CELL)
    read = path.read_bytes()
    file.append(FAILED)
    match change:
        case "remove" | "empty":
            path.unlink() if change == "remove" else path.write_bytes(b"")
        case "move":
            path.rename(tmp_path / name)
        case "replace":
            (tmp_path / "new").write_bytes(read)
            (tmp_path / "new").replace(path)
        case "rewrite":
            path.write_bytes(read)
        case "remove with folder":
            path.unlink()
            path.parent.rmdir()
    file.append(OTHER)
    (notice,) = file.notices
    done = {"empty": "rewritten", "rewrite": "rewritten", "replace": "replaced"}.get(change, "removed")
    assert notice.startswith(f"{path} was {done} while cells were appended to it: ")
    file.close()
    assert file.fault is None
    kept = read_results(path)
    assert kept.cells == ((CELL, FAILED, OTHER) if change == "empty" else (earlier[1], CELL, FAILED, OTHER))
    assert kept.runs["r1"] == RUN


def test_a_file_that_was_replaced_by_something_else_is_a_fault_until_it_is_gone(tmp_path):
    path = tmp_path / "r.jsonl"
    file = ResultsFile(path)
    file.append(RUN)
    path.unlink()
    path.write_text("notes of today\n")
    file.append(CELL)
    assert str(file.fault) == f"cannot write results to {path}: it holds something else; give another file"
    assert path.read_text() == "notes of today\n"
    path.unlink()
    file.close()
    assert file.fault is None
    assert read_results(path).cells == (CELL,)


def test_others_may_append_too(tmp_path):
    """Where there are no locks."""
    path = tmp_path / "r.jsonl"
    file = ResultsFile(path)
    file.append(RUN)
    write(tmp_path / "other.jsonl", replace(RUN, run_id="r0"), OTHER)
    with path.open("ab") as stream:
        stream.write((tmp_path / "other.jsonl").read_bytes())
    file.append(CELL)
    file.close()
    assert file.notices == []
    assert read_results(path).cells == (OTHER, CELL)
