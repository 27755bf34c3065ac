"""``trace`` as a user runs it: one rank and several, against another capture, as a page, saved, and bad files."""

import json
import re
from functools import partial

import pytest
import run_commands
from agents_page import missing_fields
from profile_files import ChromeTrace, NsysReport, train_step
from rank_captures import write_ranks
from run_commands import imported_by, invoke, shown

from cs336sys.accounting.hardware import Ceilings
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run

HOSTILE = "</script><img src=x onerror=alert(1)>"
trace = partial(invoke, "trace")


def tables(*words):
    return run_commands.tables(trace(words, "--format json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two captures of four ranks, with a straggler in the later one and a hostile kernel in both."""
    folder = tmp_path_factory.mktemp("runs")
    for name, straggler in (("before", None), ("after", 2)):
        (folder / name).mkdir()
        for path in write_ranks(folder / name, ranks=4, straggler=straggler, excess=0.03, seed=len(name)):
            path.write_text(path.read_text().replace("gemm_2", HOSTILE))
    return folder


def test_verdict_names_the_straggler_and_what_to_try(runs):
    printed = trace(runs / "after", "--format json")
    assert missing_fields("Who is late?", printed.stdout) == []
    one_rank = trace(runs / "after" / "trace_0.json", "--format json").stdout
    assert missing_fields("Where does a step go?", one_rank) == []
    found = run_commands.tables(printed)
    sentences = [row["verdict"] for row in found["verdict"]["rows"]]
    assert re.match(r"Rank 2 \(trace_2.json\) holds the others up by [23]\.\d % of a step .*: computing", sentences[0])
    assert re.match(r"On rank \d \(.*\) the GPU computes [\d.]+ % of the step, which takes 6\.\d+ ms\.", sentences[1])
    assert [row["gpu"] for row in found["ranks"]["rows"]] == [f"rank {rank}" for rank in range(4)]
    parts = [row for row in found["parts"]["rows"] if row["part"] != "step"]
    assert sum(row["share_percent"] for row in parts) == pytest.approx(100)
    equal = tables(runs / "before")["verdict"]["rows"]
    assert equal[0]["verdict"].startswith("No rank of 4 holds the others up: none computes or idles 0.")


def test_a_comparison_of_two_steps_begins_with_undecided(tmp_path):
    paths = [write_ranks(tmp_path, ranks=1, steps=2, seed=seed)[0].rename(tmp_path / f"{seed}.json") for seed in (1, 2)]
    (row,) = tables(paths[0], "--against", paths[1])["verdict"]["rows"]
    assert row["verdict"].startswith("Undecided: the captures hold too few steps to tell a change from noise")


def test_a_step_is_not_faster_where_only_a_slower_kernel_is_no_noise(tmp_path):
    """Other kernels are shorter in most steps of the later capture, by less than their noise."""
    paths = []
    for name, slower, others in (("before", 100, (1000, 2000)), ("after", 130, (900, 1990))):
        trace = ChromeTrace(tmp_path / f"{name}.json")
        for step in range(8):
            start = 10_000_000 * step
            trace.range(f"ProfilerStep#{step}", start, start + 5_000_000)
            stop = start + 1000 * (slower + step % 2)
            trace.kernel("gemm", start, start, stop)
            trace.kernel("softmax", start + 10, stop, stop + 1000 * others[step % 2])
        paths.append(trace.write())
    sentences = [row["verdict"] for row in tables(paths[0], "--against", paths[1])["verdict"]["rows"]]
    assert sentences[0].startswith("Undecided whether a step takes longer or less: ")
    assert sentences[0].endswith("; the changes that are no noise add up to +0.0300 ms.")
    assert sentences[1] == "Most: gemm (slower, +0.0300 ms)."


def test_collectives_stand_beside_what_allreduce_measured_on_such_gpus(runs, tmp_path_factory):
    tmp_path, saved = (tmp_path_factory.mktemp(name) for name in ("named", "saved"))
    gpu = "NVIDIA H200"
    for path in (runs / "before").iterdir():
        named = json.dumps([{"id": 0, "name": gpu}])
        (tmp_path / path.name).write_text(path.read_text().replace("{", f'{{"deviceProperties": {named}, ', 1))
    found = tables(tmp_path)["collectives"]["rows"]
    assert all(row.get("alone_busbw_gbps") is None for row in found)
    row = next(row for row in found if row["busbw_gbps"])
    sizes = {row["bytes"] // 2: 100.0, row["bytes"] * 2: 400.0}
    written = write_allreduce(saved / "a.jsonl", gpu, row["collective"], row["ranks"], sizes)
    save = saved / "t.jsonl"
    beside = tables(tmp_path, "--allreduce", written, "--save", save)["collectives"]["rows"]
    same = next(one for one in beside if (one["collective"], one["bytes"]) == (row["collective"], row["bytes"]))
    assert same["alone_busbw_gbps"] == pytest.approx(200.0)
    assert same["of_alone_percent"] == pytest.approx(row["busbw_gbps"] / 2)
    assert run_commands.tables(invoke("show", save, "--format json"))["collectives"]["rows"] == beside
    other = write_allreduce(saved / "b.jsonl", "another GPU", row["collective"], row["ranks"], sizes)
    refused = trace(tmp_path, "--allreduce", other)
    assert refused.exit_code == 2
    assert f"holds no collectives of NCCL on {gpu}" in refused.stderr
    both = trace(tmp_path, "--allreduce", written, "--against", tmp_path)
    assert both.exit_code == 2
    assert "choose one of the two" in both.stderr


def write_allreduce(path, gpu, collective, ranks, sizes):
    results = ResultsFile(path)
    results.append(Run("r", "2026-11-27T00:00:00+00:00", ("allreduce",), {"gpu": gpu}, {"cs336sys": "0"}))
    for size, rate in sizes.items():
        settings = {"backend": "nccl", "collective": collective, "world_size": ranks, "message_bytes": size}
        derived = {"size_bytes": size, "back_to_back_busbw_gbps": rate}
        results.append(Cell("allreduce", settings, "ok", {}, derived, run_id="r"))
    results.close()
    return path


def test_changes_add_up_to_the_difference(runs):
    found = tables(runs / "before", "--against", runs / "after", "--top 50")
    rows = found["changes"]["rows"]
    sides = [tables(runs / side / "trace_0.json") for side in ("before", "after")]
    before_ms, after_ms = (side["parts"]["rows"][-1]["ms_mean"] for side in sides)
    assert sum(row["delta_ms"] for row in rows) == pytest.approx(after_ms - before_ms)
    assert found["verdict"]["rows"][0]["verdict"].startswith("A step takes 0.")
    assert "of several ranks, the first of each side is compared" in found["verdict"]["notes"]


def test_a_page_takes_no_option_of_tables_away(runs):
    shown = trace(runs / "before", "--html", runs / "page.html", "--columns verdict --format csv")
    assert shown.stdout.startswith("table,verdict\n")
    for option in ("--columns", "--sort"):
        assert "choose from" in trace(runs / "before", "--html", runs / "page.html", option, "nothing").stderr


def test_the_page_loads_nothing_and_shows_hostile_names_as_text(runs):
    page = runs / "page.html"
    result = trace(runs / "before", "--against", runs / "after", "--html", page)
    assert result.exit_code == 0, result.output
    assert "explained" in result.stdout
    text = page.read_text()
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text
    assert "<img" not in text
    assert text.count("</script>") == 1
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", text.replace("src=x", ""))
    assert "default-src 'none'" in text
    assert text.count("<rect") == 2 * 4 * 12
    for format in ("markdown", "csv", "latex", "typst", "table"):
        shown = trace(runs / "before", "--format", format)
        assert shown.exit_code == 0
        assert "\x1b]" not in shown.stdout


def test_saved_captures_are_shown_again(runs):
    saved = runs / "r.jsonl"
    result = trace(runs / "before", "--against", runs / "after", "--save", saved, "--format", "json")
    assert shown(saved) == result.stdout


def test_nsys_and_torch_profiler_are_compared_by_kernels(tmp_path):
    report, trace = NsysReport(tmp_path / "report.sqlite"), ChromeTrace(tmp_path / "trace.json")
    for recorder in (report, trace):
        for start in range(0, 10_000, 2000):
            train_step(recorder, start)
    found = tables(report.write(), "--against", trace.write())
    verdicts = {row["verdict"] for row in found["changes"]["rows"]}
    assert verdicts == {"same within 0 % of a step"}
    assert any("two profilers" in note for note in found["verdict"]["notes"])


def test_no_torch_is_imported(runs):
    assert "torch" not in imported_by(f"trace {runs / 'before'}")


def test_a_bad_file_is_one_sentence(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"traceEvents": []}')
    result = trace(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {path} holds neither GPU kernels nor operations of the CPU\n"


def test_measured_ceilings_are_those_of_the_capture_s_gpu(tmp_path):
    recorder = ChromeTrace(tmp_path / "trace.json")
    for start in range(0, 10_000, 2000):
        train_step(recorder, start)
    path = recorder.write()
    events = json.loads(path.read_text())
    events["deviceProperties"] = [{"id": 0, "name": "NVIDIA H200"}]
    path.write_text(json.dumps(events))
    ceilings = tmp_path / "c.json"
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        Ceilings(gpu, {"fp32": 50.0, "bf16": 766.0}, 4260.0, 4.5).write(ceilings)
        saved = tmp_path / f"{gpu[-4:].strip()}.jsonl"
        result = trace(path, "--ceilings", ceilings, "--save", saved, "--format", "json")
        if gpu != "NVIDIA H200":
            assert result.exit_code == 2
            assert "are those of NVIDIA H100 80GB HBM3" in result.output
            continue
        assert shown(saved) == result.stdout
        derived = json.loads(saved.read_text().splitlines()[1])["derived"]
        assert derived["ceilings"]["tflops"]["bf16"] == 766.0
