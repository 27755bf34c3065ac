"""Captures that are not whole: each damage is counted and said, and no verdict follows from what is missing."""

import json
import random
import re
import zipfile

import pytest
from profile_files import ChromeTrace, NsysReport

from cs336sys.capture.reading import open_capture, read_captures
from cs336sys.capture.summary import summarize
from cs336sys.commands.trace.tables import verdict
from cs336sys.errors import UsageError

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


def pause(events):
    begin = next(event["ts"] for event in events if event["name"] == "ProfilerStep#5")
    change([event for event in events if event.get("ts", 0) > begin], ts=lambda ts: ts + 4e5)
    change([event for event in events if event.get("ts", 0) == begin], dur=lambda dur: dur + 4e5)


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
    "numbers lost": (lambda e: renumber(sampled(kernels(e)), lambda n: None), "9 of 192 launches have no kernel"),
    "recorded twice": (lambda e: e.extend([dict(k) for k in kernels(e)[:50]]), "50 of 242 kernels and copies are rec"),
    "before launches": (lambda e: change(kernels(e), ts=lambda ts: ts - 5000), "192 of 192 kernels and copies begin"),
    "one before its launch": (
        lambda e: change(kernels(e)[70:71], ts=lambda ts: ts - 2e4),
        "1 of 192 kernels and copies b",
    ),
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
    for analysis in truth.values():
        assert (analysis.damage, analysis.is_idle_known) == ((), True)
        assert len(analysis.step_ms) == STEPS
        assert analysis.share("computing") > 0.97


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


def test_a_zipped_trace_is_read(tmp_path):
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.json", json.dumps({"traceEvents": whole_events()}))
    assert len(read_captures([path]).analyses[0].step_ms) == STEPS
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other.json", "{}")
    with pytest.raises(UsageError, match="is a zip archive of 2 files"):
        open_capture(path)


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
        "4 of 10 launches have no kernel: the profiler lost them.",
    )
    assert not profile.is_idle_known
    assert "Idle time cannot be told" in verdict(read_captures([path]).analyses)[-1]
