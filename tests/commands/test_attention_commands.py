"""``flash`` and ``attn`` as a user runs them, on the CPU."""

import json
from itertools import product

import pytest
from run_commands import invoke, tables

from cs336sys.accounting.activations import attention_memory
from cs336sys.commands.attention.tables import _shape_label, pool_flash_rounds
from cs336sys.results.model import read_results
from cs336sys.run.cells import Worker

pytestmark = pytest.mark.usefixtures("kept_workers")

FLASH = "flash --device cpu --context 32 --num-heads 2 --head-dim 16 --dtype fp32"
ATTN = "attn --device cpu --batch-size 2 --head-dim 8 --context 16 --steps 2"


def test_flash_shows_what_the_machine_has_and_says_what_it_lacks(tmp_path):
    picture, saved = tmp_path / "flash.png", tmp_path / "flash.jsonl"
    arguments = ("--implementation tiled,eager,sdpa-flash,sdpa-cudnn --plot", picture, "--save", saved)
    result = invoke(FLASH, arguments, "--format json")
    assert invoke("show", saved, "--format json").stdout == result.stdout
    table = tables(result)["flash"]
    statuses = {row["implementation"]: row["status"] for row in table["rows"]}
    assert statuses == {"tiled": "ok", "eager": "ok", "sdpa-flash": "ok", "sdpa-cudnn": "unsupported"}
    assert any(note.startswith("sdpa-cudnn unsupported: ") for note in table["notes"])
    eager = next(row for row in table["rows"] if row["implementation"] == "eager")
    assert eager["end_to_end_speedup"] == 1.0
    assert float(eager["dq_error"]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not any("round" in cell.configuration for cell in read_results(saved).cells), "of one round none is named"


def test_rounds_interrupted_in_the_second_one_go_on_there(tmp_path, monkeypatch):
    path = tmp_path / "flash.jsonl"
    arguments = "--implementation tiled,eager --context 64 --repetition-ms 1 --rounds 2"
    arguments = (FLASH, arguments, "--save", path, "--format json")
    measured = []

    def measure(worker, configuration, **options):
        if len(measured) == stop:
            raise KeyboardInterrupt
        measured.append(tuple(configuration[name] for name in ("context", "round", "implementation")))
        return real_measure(worker, configuration, **options)

    real_measure, stop = Worker.measure, 3
    monkeypatch.setattr(Worker, "measure", measure)
    interrupted = invoke(arguments)
    assert interrupted.exit_code == 130
    table = json.loads(interrupted.stdout)["tables"][0]
    assert [(row["implementation"], row["rounds"]) for row in table["rows"]] == [("tiled", 2), ("eager", 1)]
    assert table["rows"][0]["end_to_end_speedup"] is not None

    stop, drawn = None, []
    monkeypatch.setattr("cs336sys.commands.attention.tables.plot_flash", lambda cells, path: drawn.extend(cells))
    table = tables(invoke(arguments, "--resume --plot", tmp_path / "flash.png"))["flash"]
    assert measured == list(product((32, 64), (1, 2), ("tiled", "eager")))
    assert "causal True, rounds 2" in table["title"]
    assert drawn == pool_flash_rounds(read_results(path).cells)
    medians = [pytest.approx(cell.samples["forward"].median) for cell in drawn]
    assert [row["forward_ms"] for row in table["rows"]] == medians


def test_heads_of_keys_and_windows_are_swept_and_shown(tmp_path):
    arguments = "--implementation eager,sdpa-flash --kv-heads 1,2 --window 5 --repetition-ms 1"
    table = tables(invoke(FLASH, arguments, "--baseline eager --format json --save", tmp_path / "f.jsonl"))["flash"]
    rows = [(row["kv_heads"], row["implementation"], row["status"]) for row in table["rows"]]
    assert rows == [(heads, *row) for heads in (1, 2) for row in (("eager", "ok"), ("sdpa-flash", "unsupported"))]
    assert "causal True, window 5" in table["title"]
    labels = {_shape_label(cell) for cell in read_results(tmp_path / "f.jsonl").cells}  # Of what is drawn in one line.
    assert labels == {f"1 x 2 x S x 16, fp32, causal\nKV heads {heads}, window 5" for heads in (1, 2)}
    # 2 heads of 32 queries that see 5 keys, the first of them fewer.
    flops, row = 4 * 2 * 16 * (32**2 - 27**2) // 2, table["rows"][0]
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9)


def test_no_settings_are_kept_where_no_gpu_runs_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = "--implementation triton --num-heads 1 --repetition-ms 1 --warmup-ms 0"
    refused = invoke(FLASH, names, "--keep-settings")
    assert refused.exit_code == 3
    assert "--keep-settings needs kernels that run on a GPU, got cpu: leave it out" in refused.stderr
    assert not (tmp_path / "cs336sys").exists()


def test_attn_measures_eager_and_the_models_own(tmp_path):
    picture = tmp_path / "attn.svg"
    names = "--implementation eager,model"
    rows = tables(invoke(ATTN, names, "--format json --plot", picture))["attn"]["rows"]
    assert "<svg" in picture.read_text()
    assert [(row["implementation"], row["status"]) for row in rows] == [("eager", "ok"), ("model", "ok")]
    # The formulas are those of torch's own softmax.
    assert rows[1]["predicted_held_gib"] is None
    memory = attention_memory(2, 16, 8, "fp32", causal=False, implementation="eager")
    assert rows[0]["predicted_held_gib"] == pytest.approx(memory.held / 2**30)
