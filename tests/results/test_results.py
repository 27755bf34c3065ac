import ast
import gzip
import os
import random
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
def test_every_record_is_on_disk_before_the_next_is_measured(tmp_path, name):
    path = tmp_path / name
    file = ResultsFile(path)
    file.append(RUN)
    file.append(CELL)
    assert read_results(path).cells == (CELL,)
    file.close()


def test_a_comma_stands_between_files_unless_one_is_called_so(tmp_path):
    first, second, both = (tmp_path / f"{name}.jsonl.gz" for name in ("a", "b", "a,b"))
    write(first, RUN, CELL)
    write(second, replace(RUN, run_id="r2"), replace(OTHER, run_id="r2"))
    results = read_several(f"{first},{second}")
    assert [cell.run_id for cell in results.cells] == list(results.runs) == ["r1", "r2"]
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert read_several(str(both)) == results
    with pytest.raises(UsageError, match="cannot read results from"):
        read_several(f"{first},{tmp_path / 'c.jsonl'}")


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


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(
    ("written", "instead", "fault"),
    [
        ('"derived": {', '"derived": [], "other": {', "derived is no dict"),
        ('"measured": [1.0, 2.5]', f'"measured": [{10**400}]', "an integer has more than 64 bits"),
        ('"size": "tiny"', f'"size": {DEEP}', "values are nested more than 32 deep"),
        ('"size": "tiny"', f'"size": {"[" * 200}', "line 2 is cut, or no record of results"),
        ('"size": "tiny"', f'"size": {"[" * 100_000}{"]" * 100_000}', "line 2 is cut, or no record of results"),
        ('"size": "tiny"', f'"size": [{"[]," * 200_000}1]', "line 2 is larger than any record of results"),
        ('"machine": {', '"machine": null, "other": {', "line 1 is no run of this schema: machine is no dict"),
    ],
)
def test_a_record_of_another_shape_costs_only_its_line(tmp_path, written, instead, fault):
    path = tmp_path / "r.jsonl"
    write(path, RUN, CELL, FAILED)
    assert written in path.read_text()
    path.write_text(path.read_text().replace(written, instead, 1))
    results = read_results(path)
    assert FAILED in results.cells
    assert len(results.runs) + len(results.cells) == 2
    (said,) = results.passed_over
    assert re.search(fault, said)


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
    locks = Path("/proc/locks").read_text() if Path("/proc/locks").exists() else ""
    writer = rf"process {os.getpid()} \(.*\)" if f" {os.getpid()} " in locks else "another process"
    with pytest.raises(UsageError, match=rf"cannot write results to .*: {writer} is writing"):
        ResultsFile(path)
    first.close()
    ResultsFile(path).close()


OTHER = replace(CELL, configuration={"size": "small"})


@pytest.mark.parametrize("change", ["move", "empty", "remove with folder"])
def test_nothing_is_lost_of_a_file_that_others_change_meanwhile(path, change):
    earlier = replace(RUN, run_id="r0"), replace(OTHER, run_id="r0")
    path = path.parent / "folder" / path.name
    write(path, *earlier)
    file = ResultsFile(path)
    file.append(RUN)
    file.append(CELL)
    match change:
        case "empty":
            path.write_bytes(b"")
        case "move":
            path.rename(path.parents[1] / path.name)
        case "remove with folder":
            path.unlink()
            path.parent.rmdir()
    file.append(FAILED)
    file.close()
    (notice,) = file.notices
    done = "rewritten" if change == "empty" else "removed"
    assert notice.startswith(f"{path} was {done} while cells were appended to it: ")
    assert file.fault is None
    kept = read_results(path)
    assert kept.cells == ((CELL, FAILED) if change == "empty" else (earlier[1], CELL, FAILED))
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


CELLS = [replace(CELL, configuration={"size": "tiny", "warmup": number}) for number in range(3)]


@pytest.fixture
def path(tmp_path):
    """A compressed file: whole after every record, mended after a killed run, read whoever compressed it."""
    return tmp_path / "r.jsonl.gz"


def test_other_programs_read_what_is_written_and_the_other_way_round(path):
    write(path, RUN, *CELLS[:2])
    plain = path.with_suffix("")
    write(plain, RUN, *CELLS[:2])
    assert gzip.decompress(path.read_bytes()) == plain.read_bytes()
    path.write_bytes(gzip.compress(plain.read_bytes()))
    write(path, CELLS[2])
    assert read_results(path).cells == tuple(CELLS)


def test_a_file_cut_anywhere_in_its_last_record_loses_only_that_and_is_appended_to(path):
    write(path, RUN, CELLS[0])
    before = path.stat().st_size
    write(path, CELLS[1])
    content = path.read_bytes()
    for size in range(before, len(content)):
        path.write_bytes(content[:size])
        whole = read_results(path)
        assert whole.cells[:1] == (CELLS[0],)
        # The record may be complete where only its member's end is missing.
        assert len(whole.cells) + len(whole.passed_over) == (1 if size == before else 2)
        write(path, CELLS[2])
        assert read_results(path).cells == (*whole.cells, CELLS[2])
        assert gzip.decompress(path.read_bytes()).endswith(b"\n"), "other programs read it, too"


def test_a_whole_file_compressed_at_once_and_cut_keeps_its_whole_lines(path):
    noise = random.Random(0)
    cells = [replace(CELLS[0], derived={"tokens_per_s": noise.random()}) for _ in range(400)]
    plain = path.with_suffix("")
    write(plain, RUN, *cells)
    content = gzip.compress(plain.read_bytes())
    path.write_bytes(content[: len(content) * 2 // 3])
    kept = read_results(path).cells
    assert 200 < len(kept) < 400
    write(path, CELLS[2])
    assert read_results(path).cells == (*kept, CELLS[2])


def test_a_damaged_record_costs_only_itself_and_the_file_is_not_appended_to(path):
    write(path, RUN, *CELLS)
    content = path.read_bytes()
    starts = [found.start() for found in re.finditer(b"\x1f\x8b\x08", content)]
    start, end = starts[2], starts[3]
    # The last 8 bytes are the record's checksum and length; the first 10 are its header.
    for place, fault in ((end - 8, "incorrect data check"), (end - 1, "incorrect length check"), (start + 14, "")):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        results = read_results(path)
        assert results.cells == (CELLS[0], CELLS[2])
        (said,) = results.passed_over
        assert said.startswith(f"the compressed data from byte {start} on is damaged (")
        assert fault in said
    path.write_bytes(gzip.compress(gzip.decompress(content))[:-5] + bytes(5))
    with pytest.raises(
        UsageError, match=r"holds no results: .*; the compressed data from byte 0 on is damaged \(incorrect"
    ):
        read_results(path)
    with pytest.raises(UsageError, match=r"it holds something else; give another file$"):
        ResultsFile(path)
