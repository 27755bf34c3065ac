"""Compressed results files: whole after every record, mended after a killed run, read whoever compressed them."""

import gzip
import random
import re
from dataclasses import replace

import pytest

from cs336sys.errors import UsageError
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, read_results

RUN = Run("r1", "2026-01-01T00:00:00+00:00", ("bench",), {"gpu": "NVIDIA H200"}, {})
CELLS = [Cell("bench", {"size": "tiny", "warmup": number}, "ok", run_id="r1") for number in range(3)]


def write(path, *records):
    file = ResultsFile(path)
    for record in records:
        file.append(record)
    file.close()


@pytest.fixture
def path(tmp_path):
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
