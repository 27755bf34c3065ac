"""Whose kernel is it: rows are given to phases by launch, process and thread, in reports of nsys and in traces."""

import gzip
import json

import pytest
from profile_files import ChromeTrace, NsysReport, train_step

from cs336sys.capture import chrome_trace, nsys
from cs336sys.capture.range_names import run_name
from cs336sys.capture.reading import open_capture
from cs336sys.capture.summary import Profile, summarize
from cs336sys.errors import UsageError
from cs336sys.results.foreign import MIB


@pytest.fixture
def report(tmp_path):
    return NsysReport(tmp_path / "report.sqlite")


@pytest.fixture
def trace(tmp_path):
    return ChromeTrace(tmp_path / "trace.json")


def summary_of(recorder, *chosen) -> Profile:
    return summarize(open_capture(recorder.write()), chosen)


def test_the_report_is_not_written_to(report):
    train_step(report)
    path = report.write()
    before = path.read_bytes()
    path.chmod(0o444)
    summarize(open_capture(path)).to_json()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_commands_that_ran_stand_in_the_report(report):
    train_step(report)
    configuration = {"size": "tiny", "context": 16, "tf32": False, "seed": None}
    report.range(run_name(configuration), 0, 1000)
    profile = summary_of(report)
    assert profile.configuration == configuration
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"', "operations of the CPU; 1 of its events cannot be read"),
        (b'{"traceEvents": [' + b"[" * 100_000, "cannot be read as a trace of torch.profiler"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1e999}]', "1 of its events cannot be read"),
        (
            b'[{"ph": "X", "cat": "kernel", "ts": 1, "args": {"correlation": %d}}]' % 10**30,
            "1 of its events cannot be read",
        ),
        (b'[{"ph": "X", "ts": 1, "name": "' + b"x" * 2**25, "holds an event of more than 16,777,216 characters"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, content, sentence):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence) as error:
        open_capture(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"{},", b" ", b'{"ph": "X", "cat": "cpu_op", "name": "add", "ts": 1, "dur": 1},'])
def test_a_gzip_bomb_is_refused_before_anything_in_it_is_decoded(content, tmp_path, monkeypatch):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b'{"traceEvents": [')
        for _ in range(70):
            stream.write(content * (MIB // len(content)))
        stream.write(b"{}]}")
    monkeypatch.setattr(chrome_trace, "_Events", None)
    with pytest.raises(UsageError, match=r"bomb\.json\.gz has 0\.\d MiB and holds more than 64 MiB, which is the most"):
        open_capture(path)


@pytest.mark.parametrize("kind", [NsysReport, ChromeTrace])
def test_a_capture_that_takes_too_long_is_refused(kind, tmp_path, monkeypatch):
    recorder = kind(tmp_path / "file")
    train_step(recorder)
    for module in (chrome_trace, nsys):
        monkeypatch.setattr(module, "READING_S", -1)
    monkeypatch.setattr(nsys, "_STATEMENTS_BETWEEN_CHECKS", 1)
    with pytest.raises(UsageError, match="is not read within 600 s of CPU time: profile fewer steps"):
        open_capture(recorder.write())


def test_an_event_of_many_chunks_is_decoded_a_few_times(tmp_path, monkeypatch):
    """It was decoded anew with each chunk: a file of large events took a time quadratic in their size."""
    trace = ChromeTrace(tmp_path / "t.json")
    train_step(trace)
    trace.operation("x" * 1_000_000, 0, 1)
    monkeypatch.setattr(chrome_trace, "_CHUNK_CHARACTERS", 1000)
    reads = []
    read = chrome_trace._Events._read
    monkeypatch.setattr(chrome_trace._Events, "_read", lambda self, size: reads.append(size) or read(self, size))
    open_capture(trace.write())
    assert len(reads) < 100
