"""``bench`` as a user runs it: sweeps, statuses, formats, interruption and bad input."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from run_commands import invoke, shown, tables

from cs336sys.results.model import read_results
from cs336sys.run import cells as cells_module

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = "--size tiny --device cpu --batch-size 2 --context 24 --steps 2"


def bench(*options):
    return invoke("bench", TINY, *options)


def rows_of(*options):
    return tables(bench(*options, "--format", "json"))["bench"]["rows"]


def plan_of(*options):
    return tables(invoke("bench", *options, "--dry-run", "--format", "json"))["plan"]


def test_sweep_reports_every_cell_and_ends_well(tmp_path, kept_workers):
    """Two precisions, and a batch that no process can address, whatever memory its system promises."""
    # A worker that has trained already would hold before it what it held at its peak.
    kept_workers.end()
    path = tmp_path / "r.jsonl"
    files = ("--save", path, "--plot", path.with_name("bench.png"))
    result = bench("--warmup 1 --precision fp32,bf16 --batch-size 1000000000000 --force --format json", files)
    found = tables(result)
    rows = found["bench"]["rows"]
    statuses = [(row["batch_size"], row["precision"], row["status"]) for row in rows]
    huge = 1_000_000_000_000
    assert statuses == [(2, "fp32", "ok"), (2, "bf16", "ok"), (huge, "fp32", "oom"), (huge, "bf16", "oom")]
    assert all(row["parameters"] == 3_084_928 for row in rows)
    assert all(row["tokens_per_s"] == pytest.approx(48e3 / row["step_ms_mean"]) for row in rows[:2])
    assert all(row["step_ms_mean"] is None for row in rows[2:]), "a cell out of memory has no number"
    # The model's training state is 16 bytes a parameter, 0.05 GiB; a process that has imported torch holds 0.2 or more.
    before_gib = [cell.derived["resident_before_gib"] for cell in read_results(path).cells[:2]]
    assert rows[0]["peak_resident_gib"] > before_gib[0] + 0.02
    assert rows[1]["peak_resident_gib"] >= before_gib[1]  # Its worker has trained: the allocator may keep that memory.
    assert all(0.1 < before < 4 for before in before_gib)
    (note,) = [note for note in found["bench"]["notes"] if note.startswith("peak resident: ")]
    held = " to ".join(sorted({f"{gib:.2f}" for gib in before_gib}))
    assert f"held {held} GiB of it before the model was built" in note
    assert any(note.startswith("oom: out of memory at building the model: ") for note in found["bench"]["notes"])
    speedups = found["speedup"]["rows"]
    assert [(row["precision"], row["over"]) for row in speedups] == [("bf16", "fp32")]
    cells = read_results(path).cells
    assert [cell.status for cell in cells] == ["ok", "ok", "oom", "oom"]
    fp32, bf16 = (cell.samples["step"].median for cell in cells[:2])
    assert speedups[0]["step_speedup"] == pytest.approx(fp32 / bf16)
    assert shown(path) == result.stdout
    assert path.with_name("bench.png").read_bytes().startswith(b"\x89PNG")


def in_order(path):
    return [
        (cell.configuration["warmup"], cell.configuration["attention"], cell.configuration.get("round"))
        for cell in read_results(path).cells
    ]


def test_rounds_go_through_the_sweep_again_and_resume_measures_the_one_that_is_missing(tmp_path):
    path = tmp_path / "r.jsonl"
    arguments = ("--warmup 1 --attention reference,sdpa --rounds 2 --format json --save", path)
    found = tables(bench(*arguments))
    assert in_order(path) == [(1, "reference", 1), (1, "sdpa", 1), (1, "reference", 2), (1, "sdpa", 2)]
    assert ", rounds 2, " in found["bench"]["title"]
    assert tables(invoke("show", path, "--format", "json")) == found
    # How rounds are pooled is in test_rounds.py.
    expected = [("reference", "ok"), ("sdpa", "ok")]
    assert [(row["attention"], row["status"]) for row in found["bench"]["rows"]] == expected

    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["kind"] for line in lines] == ["run", "cell", "cell", "cell", "cell"]
    path.write_text("".join(lines[:2] + lines[3:]))
    again = tables(bench(*arguments, "--resume"))
    assert in_order(path) == [(1, "reference", 1), (1, "reference", 2), (1, "sdpa", 2), (1, "sdpa", 1)]
    assert again["bench"]["rows"][0] == found["bench"]["rows"][0]
    assert again["bench"]["rows"][1]["step_ms_mean"] != found["bench"]["rows"][1]["step_ms_mean"]


@pytest.mark.usefixtures("fresh_workers")
def test_every_round_of_a_warmup_study_is_a_fresh_process_and_its_first_step_is_shown(tmp_path, monkeypatch):
    started = []
    start = cells_module.call_guarded
    monkeypatch.setattr(cells_module, "call_guarded", lambda *how: started.append(how) or start(*how))
    path = tmp_path / "r.jsonl"
    rows = rows_of("--warmup 0,2 --mode forward --rounds 2 --save", path)
    assert len(started) == 4
    assert in_order(path) == [(0, "reference", 1), (2, "reference", 1), (0, "reference", 2), (2, "reference", 2)]
    assert [row["warmup"] for row in rows] == [0, 2]
    first_round = [cell.samples["step"].measured[0] for cell in read_results(path).cells[:2]]
    assert [row["first_measured_ms"] for row in rows] == first_round


def test_interleaved_cells_are_compared_turn_by_turn_with_their_own_partners(tmp_path):
    path = tmp_path / "r.jsonl"
    options = "--precision bf16,fp32 --attention reference,sdpa --interleave precision --warmup 1 --steps 3"
    arguments = (options, "--format json --save", path)
    found = tables(bench(*arguments))
    cells = read_results(path).cells
    # Side by side in the file and in the table, although attention is the inner list.
    order = [("reference", "bf16"), ("reference", "fp32"), ("sdpa", "bf16"), ("sdpa", "fp32")]
    assert [(cell.configuration["attention"], cell.configuration["precision"]) for cell in cells] == order
    assert [(row["attention"], row["precision"]) for row in found["bench"]["rows"]] == order
    note = "interleaved: a step of each precision of bf16,fp32 alternately, all held in memory"
    assert note in found["bench"]["notes"]
    speedups = found["speedup"]["rows"]
    expected = [("reference", "bf16", "fp32"), ("sdpa", "bf16", "fp32")]
    assert [(row["attention"], row["precision"], row["over"]) for row in speedups] == expected
    for row, cell, baseline in zip(speedups, cells[::2], cells[1::2], strict=True):
        for name in ("forward", "step"):
            turns = zip(baseline.samples[name].measured, cell.samples[name].measured, strict=True)
            assert row[f"{name}_speedup"] == pytest.approx(statistics.median(a / b for a, b in turns))

    # Where one is missing both are measured again, in turn.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    again = tables(bench(*arguments, "--resume"))
    assert [row["status"] for row in again["bench"]["rows"]] == ["ok"] * 4
    assert note in again["bench"]["notes"]
    first, second = again["speedup"]["rows"]
    assert first == speedups[0]
    cell, baseline = read_results(path).cells[-2:]
    turns = zip(baseline.samples["step"].measured, cell.samples["step"].measured, strict=True)
    assert second["step_speedup"] == pytest.approx(statistics.median(a / b for a, b in turns))
    assert second["step_speedup"] != speedups[1]["step_speedup"]


def test_speedups_are_over_the_default_or_a_chosen_baseline():
    """It was the first value: README's command printed 0.33x for "three times faster"."""
    arguments = ("--attention", "sdpa,reference", "--warmup", "0", "--mode", "forward", "--format", "json")
    for more, over in (((), "reference"), (("--baseline", "attention=sdpa"), "sdpa")):
        (row,) = tables(bench(*arguments, *more))["speedup"]["rows"]
        assert {row["attention"], row["over"]} == {"reference", "sdpa"}
        assert row["over"] == over


@pytest.mark.parametrize("more", [(), ("--interleave", "attention")])
def test_attention_that_no_setting_changes_is_measured_once(more):
    """A model with its own attention was timed three times, and had speed-ups between equal steps."""
    model = f"{Path(__file__).parents[1] / 'user_models.py'}:causal_by_products"
    arguments = ("--model", model, "--attention", "sdpa,flash,reference", "--mode", "forward", "--warmup", "1", *more)
    result = bench(*arguments, "--format", "json")
    rows = tables(result)["bench"]["rows"]
    assert (rows[0]["attention"], rows[0]["status"]) == ("the model's own", "ok")
    assert [row["status"] for row in rows[1:]] == (["unsupported"] * 2 if more else [])
    assert "speedup" not in tables(result)
    if not more:
        assert "--attention flash and sdpa are the model's own here: measured once" in result.stderr


def test_a_sweep_that_cannot_serve_a_gate_says_so_at_once(tmp_path):
    result = bench("--warmup", "0", "--mode", "forward", "--save", tmp_path / "r.jsonl")
    assert (
        "warning: 1 of 1 cells cannot serve compare --fail-above 5%: too few or too noisy samples; --steps 4 would do"
        in result.stderr
    )
    assert "too few" not in bench("--warmup", "0", "--mode", "forward").stderr


def test_percentiles_on_request():
    (row,) = rows_of("--steps", "3", "--percentiles", "0,50,100")
    assert row["step_ms_p0"] <= row["step_ms_p50"] == row["step_ms_median"] <= row["step_ms_p100"]


def test_graphs_on_a_cpu_are_a_row_that_says_why_and_the_sweep_goes_on():
    found = tables(bench("--warmup 1 --cuda-graph on,off --mode forward --format json"))
    statuses = [(row["cuda_graph"], row["status"]) for row in found["bench"]["rows"]]
    assert statuses == [("on", "unsupported"), ("off", "ok")]
    reason = "unsupported: CUDA graphs need a GPU, and device 'cpu' is not one: launch the step"
    assert reason in found["bench"]["notes"]
    assert "speedup" not in found


COURSE_PACKAGE = {
    "__init__": "",
    "nn_utils": """
from torch.nn.functional import cross_entropy as of_torch
def cross_entropy(inputs, targets):
    return of_torch(inputs.flatten(0, 1), targets.flatten())
""",
    "optimizer": "from torch.optim import SGD as AdamW",
    "model": """
import sys
from torch.nn import Embedding, Linear, Module, RMSNorm, Sequential
print("another model", file=sys.stderr)
def scaled_dot_product_attention(Q, K, V, mask=None):
    return V
class TransformerBlock(Module):
    pass
class BasicsTransformerLM(Sequential):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__(Embedding(vocab_size, d_model), Linear(d_model, vocab_size))
""",
}


def test_anybodys_own_cs336_basics_takes_the_place_of_ours(tmp_path):
    """A package of the same names that is found first is the one that is timed."""
    package = tmp_path / "cs336_basics"
    package.mkdir()
    for name, source in COURSE_PACKAGE.items():
        (package / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "cs336sys", "bench", *TINY.split(), "--format", "json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "another model" in done.stderr
    assert json.loads(done.stdout)["tables"][0]["rows"][0]["status"] == "ok"


FAILING = """
from torch import nn
def build(size):
    if size.context > 24:
        raise ValueError("too long")
    return nn.Sequential(nn.Embedding(size.vocab_size, 8), nn.Linear(8, size.vocab_size))
"""


def test_a_sweep_goes_on_after_a_model_that_fails_and_measures_an_edited_one_again(tmp_path):
    mine, saved = tmp_path / "mine.py", tmp_path / "r.jsonl"
    mine.write_text(FAILING)
    arguments = ["--context", "32", "--warmup", "1", "--model", f"{mine}:build", "--format", "json"]
    arguments += ["--save", saved, "--resume"]
    result = bench(*arguments)
    assert result.exit_code == 1
    (table, *_) = json.loads(result.stdout)["tables"]
    assert [(row["context"], row["status"]) for row in table["rows"]] == [(24, "ok"), (32, "error")]
    assert table["rows"][0]["parameters"] == 8 * 10_000 + 8 * 10_000 + 10_000
    # The gradients of the embedding are no product.
    assert table["rows"][0]["tflops"] == pytest.approx(6e-9 * 48 * 80_000 / table["rows"][0]["step_ms_mean"])
    assert f"model {mine}:build, code " in table["title"]
    assert "error: mine.py, line 5: ValueError: too long" in table["notes"]
    assert "Traceback" not in result.stderr
    bench(*arguments)
    assert len(read_results(saved).cells) == 3, "the one that failed is tried again"
    mine.write_text(mine.read_text() + "# edited\n")
    bench(*arguments)
    assert len(read_results(saved).cells) == 5
