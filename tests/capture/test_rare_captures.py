"""Captures that are not whole, files that are refused, and what else no row of figures.txt has."""

import gzip
import json
import random
import re
import zipfile
from pathlib import Path

import pytest
from profile_files import ChromeTrace, NsysReport, train_step
from test_capture_figures import read

from cs336sys.capture import capture as captures
from cs336sys.capture import chrome_trace, nsys, reading
from cs336sys.capture.range_names import run_name
from cs336sys.capture.reading import open_capture, read_captures
from cs336sys.capture.summary import Profile, summarize
from cs336sys.capture.taxonomy import Category, category_of
from cs336sys.commands.trace.tables import verdict
from cs336sys.errors import UsageError
from cs336sys.results.foreign import MIB


def test_kernels_beyond_the_most_are_one_group(monkeypatch):
    """Of 250 ns, 60 and 30 in the first step, and 7 in the second."""
    monkeypatch.setattr("cs336sys.capture.analysis._MOST_GROUPS", 1)
    kernels = (
        "kernel long 10 20 270 | kernel middle 280 300 360 | kernel short 380 400 430 | kernel short 1010 1020 1027"
    )
    (of_gpu,) = read(f"range step 0 1000 | range step 1000 2000 | {kernels}").analyses
    longest, others = of_gpu.kernels
    assert (longest.name, longest.count, longest.ms) == ("long", (1, 0), (250e-6, 0))
    assert (others.name, others.kind, others.module, others.operator) == ("(others)", "unclassified", "", "")
    assert (others.count, others.ms, others.own_ms) == ((2, 1), *[pytest.approx((90e-6, 7e-6))] * 2)


def test_a_report_is_exported_and_read_under_its_own_name(tmp_path, monkeypatch):
    report, exported = tmp_path / "mine.nsys-rep", []
    report.write_bytes(b"a report")

    def export(profiler, path, database):
        exported.append((profiler, path, database.name))
        written = NsysReport(database)
        written.ran("gemm", 20, 30, written.call(10))
        written.write()

    monkeypatch.setattr(reading, "find_nsys", lambda: "nsys 2025.3")
    monkeypatch.setattr(reading, "export", export)
    capture = open_capture(report)
    assert exported == [("nsys 2025.3", report, "report.sqlite")]
    assert capture.work.start.tolist() == [20]
    monkeypatch.setattr(reading, "export", lambda profiler, path, database: database.write_bytes(b"no database"))
    with pytest.raises(UsageError, match=r"mine\.nsys-rep"):
        open_capture(report)


def test_ranges_without_text_are_refused(tmp_path):
    report = NsysReport(tmp_path / "report.sqlite")
    report.ran("gemm", 20, 30, report.call(10))
    report.database.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid)")
    with pytest.raises(UsageError, match=r"^has no column text in its table NVTX_EVENTS: "):
        nsys.load_export(report.write())


def test_reports_of_nsys_give_the_same_parts(tmp_path):
    analyses = []
    for recorder in (NsysReport(tmp_path / "report.sqlite"), ChromeTrace(tmp_path / "trace.json")):
        recorder.range("step", 0, 1000)
        recorder.kernel("gemm", 10, 100, 300)
        recorder.kernel("gemm", 20, 310, 400)
        recorder.kernel("elementwise", 500, 520, 1000)
        analyses += read_captures([recorder.write()]).analyses
    of_report, of_trace = analyses
    assert (of_report.parts, of_report.kernels) == (of_trace.parts, of_trace.kernels)


def test_commands_that_ran_stand_in_the_report_which_is_not_written_to(tmp_path):
    report = NsysReport(tmp_path / "report.sqlite")
    train_step(report)
    configuration = {"size": "tiny", "context": 16, "tf32": False, "seed": None}
    report.range(run_name(configuration), 0, 1000)
    path = report.write()
    before = path.read_bytes()
    path.chmod(0o444)
    profile = summarize(open_capture(path))
    assert profile.configuration == configuration
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"', "operations of the CPU; 1 of its events cannot be read"),
        (b'{"traceEvents": [' + b"[" * 100_000, "cannot be read as a trace of torch.profiler"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1e999}]', "1 of its events cannot be read"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1, "args": {"correlation": %d}}]' % 10**30, "1 of its events cannot"),
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
    monkeypatch.setattr(captures, "READING_S", -1)
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


# What runs on an H200 left: `nsys --size tiny --context 128 --batch-size 1 --steps 1 --warmup 2`, and a graph. Tables
# of exports that nobody reads here, and their strings, were taken out.
DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["step.sqlite", "step.trace.json.gz"])
def test_a_training_step(name):
    profile = summarize(open_capture(DATA / name))
    kernels = {row.name: row.kernels for row in profile.phases}
    assert list(kernels) == ["forward", "loss", "backward", "optimizer"]
    assert kernels["backward"] > kernels["forward"] > 0
    assert profile.attributed_percent > 99
    assert sum(row.kernel_ns for row in profile.phases) == pytest.approx(profile.step.kernel_ns, rel=0.01)
    kinds = {category_of(kernel.kernel) for kernel in profile.kernels}
    assert Category.MATMUL in kinds
    assert Category.UNCLASSIFIED not in kinds
    assert profile.configuration["size"] == "tiny"


def test_kernels_of_a_graph_that_was_traced_by_node():
    profile = summarize(open_capture(DATA / "graph-node.sqlite"))
    (phase,) = profile.phases
    # Two replays of a matrix product, ReLU and a sum.
    assert (phase.name, phase.count, phase.kernels) == ("forward", 2, 8)
    assert profile.attributed_percent == 100


def test_a_graph_that_was_traced_as_a_whole_is_refused():
    with pytest.raises(UsageError, match="--cuda-graph-trace=node"):
        summarize(open_capture(DATA / "graph-whole.sqlite"))


KERNELS = ("sm90_gemm", "vectorized_elementwise_kernel<4>", "softmax", "reduce_kernel<512>", "triton_poi", "adam")
STEPS = 8


def whole_events(*, waits: bool = True) -> list[dict]:
    """Steps of 24 kernels of 60 us that follow each other, launched in 3 us each."""
    source = random.Random(0)
    trace = ChromeTrace(None)
    cpu = gpu = 90_000_000_000
    for step in range(STEPS):
        begin = cpu
        for number in range(4 * len(KERNELS)):
            start, length = max(gpu + 1000, cpu + 5000), round(60_000 * source.gauss(1, 0.02))
            trace.kernel(KERNELS[number % len(KERNELS)], cpu, start, start + length)
            trace.events[-2]["name"] = "cudaLaunchKernel"
            gpu, cpu = start + length, cpu + 3000
        end = cpu
        if waits:
            trace.event("cuda_runtime", "cudaDeviceSynchronize", cpu, gpu + 3000, 1)
            cpu = end = gpu + 4000
        trace.range(f"ProfilerStep#{step}", begin - 1000, end - 500)
        cpu += 2000
    return trace.events


def kernels(events):
    return [event for event in events if event.get("cat") == "kernel"]


def launches(events):
    return [event for event in events if event["name"] == "cudaLaunchKernel"]


def sampled(rows, share=0.05):
    return random.Random(1).sample(rows, max(1, int(share * len(rows))))


def drop(events, rows):
    gone = set(map(id, rows))
    events[:] = [event for event in events if id(event) not in gone]


def change(rows, **values):
    for row in rows:
        row.update({name: value(row[name]) if callable(value) else value for name, value in values.items()})


def renumber(rows, number):
    for row in rows:
        row["args"]["correlation"] = number(row["args"]["correlation"])


def pause(events, us=4e5, step=5):
    begin = next(event["ts"] for event in events if event["name"] == f"ProfilerStep#{step}")
    change([event for event in events if event.get("ts", 0) > begin], ts=lambda ts: ts + us)
    change([event for event in events if event.get("ts", 0) == begin], dur=lambda dur: dur + us)


# What is done to a whole capture, and how its verdict begins.
DAMAGE = {
    "kernels lost": (lambda e: drop(e, sampled(kernels(e))), "9 of 192 launches have no kernel: the profiler lost"),
    "kernels lost everywhere": (lambda e: drop(e, kernels(e)[::9]), "22 of 192 launches have no kernel"),
    "launches lost": (lambda e: drop(e, launches(e)[30:50]), "20 of 192 kernels and copies have no launch"),
    "half at 0": (lambda e: change(e[len(e) // 2 :], ts=0.0, dur=0.0), "201 of 400 events are at times"),
    "overrun": (lambda e: change(kernels(e)[70:71], dur=1.6e6), "1 of 192 kernels and copies end after a call"),
    "overlap": (lambda e: change(kernels(e)[70:71], dur=lambda dur: 4 * dur), "1 of 192 kernels and copies overlap"),
    "text": (lambda e: change(kernels(e)[70:71], ts="now"), "1 event left out"),
    "numbers wrap": (lambda e: renumber(kernels(e) + launches(e), lambda n: n % 24), "Launch numbers are not unique"),
    "numbers lost": (lambda e: renumber(sampled(kernels(e)), lambda n: None), "Launch numbers are missing: 9 of 192 k"),
    "recorded twice": (lambda e: e.extend([dict(k) for k in kernels(e)[:50]]), "50 of 242 kernels and copies are rec"),
    "before launches": (lambda e: change(kernels(e), ts=lambda ts: ts - 5000), "192 of 192 kernels and copies begin"),
    "one before its launch": (lambda e: change(kernels(e)[70:71], ts=lambda ts: ts - 2e4), "1 of 192 kernels and c"),
    "clock late": (lambda e: change(kernels(e), ts=lambda ts: ts + 5000), "192 of 192 kernels and copies end after a"),
    "pause": (pause, "Step 5 takes 401.5 ms, 273 times the median"),
    "step lost": (lambda e: drop(e, [r for r in e if r["name"] == "ProfilerStep#3"]), "The GPU computes"),
    "step without work": (
        lambda e: drop(e, kernels(e)[48:72] + launches(e)[48:72]),
        "1 of 8 steps are left out, for their idle time cannot be told: 3.",
    ),
}


def read_events(path, events):
    path.write_text(json.dumps({"traceEvents": events}))
    (analysis,) = read_captures([path]).analyses
    return analysis, verdict([analysis])


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return {waits: read_events(folder / "whole.json", whole_events(waits=waits))[0] for waits in (True, False)}


def test_a_whole_capture_is_whole(truth):
    for of_gpu in truth.values():
        assert (of_gpu.damage, of_gpu.is_idle_known) == ((), True)
        assert len(of_gpu.step_ms) == STEPS
        assert of_gpu.share("computing") > 0.97


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_said_first_and_decides_nothing(tmp_path, truth, name):
    damage, beginning = DAMAGE[name]
    events = whole_events()
    damage(events)
    analysis, sentences = read_events(tmp_path / "damaged.json", events)
    assert sentences[0].startswith(beginning)
    if analysis.is_idle_known:
        assert analysis.median_step_ms == pytest.approx(truth[True].median_step_ms, rel=0.05)
        assert analysis.share("computing") == pytest.approx(truth[True].share("computing"), abs=0.02)
        assert not re.search(r"waits for the GPU|for the CPU|between kernels", " ".join(sentences))
    else:
        assert "Idle time cannot be told" in sentences[-1]


@pytest.mark.parametrize(
    ("pauses", "clause"),
    [
        ({2: 7e4}, r"takes 1\.4\d\d ms \(step 2: 71\.4\d ms, 49 times as long\)\."),
        ({2: 7e4, 5: 2e4}, r"\(step 2: 71\.4\d ms, 49 times as long; step 5: 21\.4\d ms, 15 times as long\)\."),
        ({2: 7e3}, r"takes 1\.4\d\d ms\."),
        (dict.fromkeys(range(5), 7e4), r"takes 71\.4\d ms\."),
    ],
)
def test_a_step_that_is_far_longer_is_named(tmp_path, pauses, clause):
    events = whole_events()
    for step, us in pauses.items():
        pause(events, us, step)
    analysis, (sentence, *_) = read_events(tmp_path / "t.json", events)
    assert len(analysis.step_ms) == STEPS
    assert re.search(clause, sentence)


def test_a_zipped_trace_is_read(tmp_path):
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.json", json.dumps({"traceEvents": whole_events()}))
    assert len(read_captures([path]).analyses[0].step_ms) == STEPS
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other.json", "{}")
    with pytest.raises(UsageError, match="is a zip archive of 2 files"):
        open_capture(path)


@pytest.mark.parametrize(
    ("document", "share", "lacks"),
    [
        ({"traceEvents": whole_events()}, 0.5, ["The file ends within its events", "1 event left out"]),
        (whole_events(), 0.5, ["The file ends within its events", "1 event left out"]),
        ({"traceEvents": whole_events()}, 0.9999, []),  # Of the stream's own last bytes.
    ],
)
def test_a_cut_compressed_trace_is_read_as_a_cut_plain_one(tmp_path, document, share, lacks):
    path, content = tmp_path / "t.json.gz", gzip.compress(json.dumps(document).encode())
    path.write_bytes(content[: int(share * len(content))])
    (analysis,) = read_captures([path]).analyses
    assert [sentence[: len(start)] for sentence, start in zip(analysis.damage, lacks, strict=False)] == lacks
    assert not re.search("the profiler lost", " ".join(analysis.damage))  # What lies behind the cut is not its fault.
    assert len(analysis.step_ms) == (STEPS if not lacks else pytest.approx(STEPS * share, abs=1))


def test_an_export_of_nsys_is_checked_alike(tmp_path):
    report = NsysReport(tmp_path / "r.sqlite")
    report.range("forward", 0, 2000)
    for number in range(10):
        report.kernel("gemm", 10 * number, 100 + 100 * number, 190 + 100 * number)
    report.database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = -1 WHERE rowid = 3")
    report.database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = {-(2**63)}, end = {2**62} WHERE rowid = 8")
    report.database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid > 8")
    path = report.write()
    profile = summarize(open_capture(path))
    assert profile.damage == (
        "2 events left out: no JSON, or without a time that can be.",
        "4 of 10 launches have no kernel: the profiler lost them, or they are among the events left out.",
    )
    assert not profile.is_idle_known
    assert "Idle time cannot be told" in verdict(read_captures([path]).analyses)[-1]


def test_an_export_without_launch_numbers_lost_no_kernels(tmp_path):
    report = NsysReport(tmp_path / "r.sqlite")
    for number in range(10):
        report.kernel("gemm", 10 * number, 100 + 100 * number, 190 + 100 * number)
    report.database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL")
    (analysis,) = read_captures([report.write()]).analyses
    assert not analysis.is_idle_known
    assert analysis.damage == (
        "Launch numbers are missing: 10 of 10 kernels and copies do not say what launched them.",
    )


def test_a_foreign_file_in_a_folder_is_passed_over(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 1}')
    (tmp_path / "losses.json").write_text('[{"loss": 1}, {"loss": 2}]')
    with pytest.raises(UsageError, match=r"config\.json is no trace of torch\.profiler: it has no list of traceEvents"):
        read_captures([tmp_path])
    for rank in (0, 1):
        document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": whole_events()}
        (tmp_path / f"t{rank}.json").write_text(json.dumps(document))
    captures_of_folder = read_captures([tmp_path])
    assert [analysis.label for analysis in captures_of_folder.analyses] == ["rank 0", "rank 1"]
    for note, name in zip(captures_of_folder.notes, ("config", "losses"), strict=False):
        assert note.startswith(f"passed over: {tmp_path}/{name}.json ")
    with pytest.raises(UsageError, match=r"config\.json is no trace"):
        read_captures([tmp_path, tmp_path / "config.json"])


@pytest.mark.parametrize("copy", ["rank1 (copy).json", "rank1.json.gz"])
def test_a_copy_of_a_file_is_no_rank(tmp_path, copy):
    for name in ("rank0.json", "rank1.json", "rank2.json", copy):
        content = json.dumps({"traceName": name[:5], "traceEvents": whole_events()}).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UsageError, match=r"/rank1\S* \S*.* are copies of one file"):
        read_captures([tmp_path])
