"""``ddp`` as a user runs it, on the CPU."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.results.model import read_results
from cs336sys.run.sweep import Sweep

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = ["--size", "tiny", "--device", "cpu", "--world-size", "2", "--context", "16", "--vocab-size", "500"]
TINY += ["--warmup", "1", "--steps", "3"]


def invoke(*arguments, env=None):
    return CliRunner().invoke(app, ["ddp", *arguments], env={"OMP_NUM_THREADS": "1"} | (env or {}))


def tables(result):
    assert result.exit_code == 0, result.output
    return {table["name"]: table for table in json.loads(result.stdout)["tables"]}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Every mode, and two bucket sizes."""
    folder = tmp_path_factory.mktemp("ddp")
    arguments = [*TINY, "--bucket-mb", "1,1000", "--save", str(folder / "r.jsonl")]
    pictures = ["--plot", str(folder / "t.png"), "--plot-buckets", str(folder / "b.svg")]
    return invoke(*arguments, *pictures, "--format", "json"), folder, arguments


def test_every_mode_is_checked_and_timed(sweep):
    result, folder, _ = sweep
    found = tables(result)
    rows = found["ddp"]["rows"]
    assert [(row["strategy"], row["bucket_mb"], row["status"]) for row in rows] == [
        ("naive", None, "ok"),
        ("flat", None, "ok"),
        ("overlap", None, "ok"),
        ("bucketed", 1.0, "ok"),
        ("bucketed", 1000.0, "ok"),
        ("torch", None, "ok"),
    ]
    naive = rows[0]["step_ms_median"]
    for row in rows:
        assert row["parameters"] == 652_928
        assert row["relative_difference_percent"] < 0.1
        assert 0 < row["largest_difference"] < 1e-5
        assert row["exposed_ms"] == pytest.approx(row["step_ms_median"] - row["unsynchronized_ms_median"])
        assert row["exposed_percent"] == pytest.approx(100 * row["exposed_ms"] / row["step_ms_median"])
        assert row["speedup"] == pytest.approx(naive / row["step_ms_median"])
    assert len({row["unsynchronized_ms_median"] for row in rows}) == 1, "one baseline serves all"
    assert [row["calls"] for row in rows[:3]] == [22, 2, 22]
    assert [row["communicated_bytes"] for row in rows[:3]] == 3 * [4 * 652_928 + 21]
    synchronize = [row["synchronize_ms_mean"] for row in found["phases"]["rows"]]
    assert all(value is not None for value in synchronize[:5])
    assert synchronize[5:] == [None], "torch's DDP has no phase of its own"
    buckets = found["buckets"]["rows"]
    assert [(row["bucket_mb"], row["buckets"]) for row in buckets] == [(1.0, 4), (1000.0, 1)]
    predicted_ms = [row["predicted_ms"] for row in buckets]
    assert all(ms is None or ms > 0 for ms in predicted_ms)
    # On a busy machine all-reduces of more bytes may take no longer.
    told = ("w not found",) if None in predicted_ms else ("least overhead", "calls look free")
    assert any(words in note for note in found["buckets"]["notes"] for words in told)
    assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "b.svg").read_bytes()


def test_resume_measures_nothing_again_and_shows_the_same(sweep):
    result, folder, arguments = sweep
    before = (folder / "r.jsonl").read_bytes()
    again = invoke(*arguments, "--resume", "--format", "json")
    assert tables(again) == tables(result)
    assert (folder / "r.jsonl").read_bytes() == before
    # How long ranks would have waited makes no other cells.
    text = invoke(*arguments, "--resume", "--timeout", "300", "--format", "csv").stdout
    assert (folder / "r.jsonl").read_bytes() == before
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["strategy"] for row in rows] == ["naive", "flat", "overlap", "bucketed", "bucketed", "torch"]


def test_show_prints_the_saved_cells_as_they_were_printed(sweep):
    result, folder, _ = sweep
    shown = CliRunner().invoke(app, ["show", str(folder / "r.jsonl"), "--format", "json"])
    assert (shown.exit_code, shown.stdout) == (0, result.stdout)


def test_rounds_go_to_and_fro(monkeypatch):
    given = []

    def not_measured(command, measure, configurations, *arguments, **settings):
        given.extend((one.get("round"), one["strategy"]) for one in configurations)
        return Sweep((), None)

    monkeypatch.setattr("cs336sys.commands.ddp.options.run_sweep", not_measured)
    assert invoke(*TINY, "--mode", "naive,flat", "--rounds", "3").exit_code == 0
    to = ["naive", "flat"]
    assert given == [*((1, name) for name in to), *((2, name) for name in reversed(to)), *((3, name) for name in to)]
    given.clear()
    assert invoke(*TINY, "--mode", "naive,flat").exit_code == 0
    assert given == [(None, "naive"), (None, "flat")]


def test_cells_keep_their_samples_and_timelines(sweep):
    _, folder, _ = sweep
    for cell in read_results(folder / "r.jsonl").cells:
        assert {len(samples.measured) for samples in cell.samples.values()} == {3}
        timeline = cell.derived["timeline"]
        assert timeline["compute"]
        assert timeline["communicate"]
        assert 0 <= timeline["overlap_ms"] <= timeline["communication_ms"]


def test_the_shortest_command_line_works_without_a_gpu():
    """Made smaller by variables, so that nothing stands on the line but what the design promises."""
    small = {"CONTEXT": "16", "WARMUP": "0", "STEPS": "1", "SIZE": "tiny", "DEVICE": "cpu"}
    result = CliRunner().invoke(
        app,
        ["ddp", "--mode", "bucketed", "--bucket-mb", "100"],
        env={f"CS336SYS_DDP_{name}": value for name, value in small.items()} | {"OMP_NUM_THREADS": "1"},
        auto_envvar_prefix="CS336SYS",
    )
    assert result.exit_code == 0, result.output
    assert "| tiny" in result.stdout
    assert "bucketed" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_gpus_are_one_sentence():
    result = invoke("--size", "tiny", "--device", "cuda", "--mode", "flat")
    assert result.exit_code == 3
    assert result.stderr.strip().splitlines()[-1].startswith("error: device 'cuda': torch sees no CUDA GPU here")


def test_dry_run_lists_the_cells():
    arguments = ("--size", "xl", "--mode", "naive,bucketed", "--bucket-mb", "1,10", "--precision", "fp32,bf16")
    rows = tables(invoke(*arguments, "--dry-run", "--format", "json"))["plan"]["rows"]
    assert [(row["precision"], row["strategy"], row["bucket_mb"], row["share"]) for row in rows] == [
        (precision, strategy, bucket, 2)
        for precision in ("fp32", "bf16")
        for strategy, bucket in (("naive", None), ("bucketed", 1.0), ("bucketed", 10.0))
    ]
    for row in rows:
        assert row["state_gib"] == pytest.approx(16 * row["parameters"] / 2**30)


def test_help_is_fast_and_needs_no_torch():
    script = "import sys; from cs336sys.commands import ddp; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
