"""``flash`` and ``attn`` as a user runs them, on the CPU."""

import json
import math
from dataclasses import replace

import pytest
from run_commands import invoke, tables

from cs336sys.accounting.activations import attention_memory
from cs336sys.commands.attention.tables import attn_tables, flash_tables, plot_flash, pool_flash_rounds
from cs336sys.machine.system import Capacity
from cs336sys.results.model import Cell, Run, Samples, read_results
from cs336sys.run.cells import Worker

pytestmark = pytest.mark.usefixtures("kept_workers")

FLASH = "flash --device cpu --context 32 --num-heads 2 --head-dim 16 --dtype fp32"
ATTN = "attn --device cpu --batch-size 2 --head-dim 8 --context 16 --steps 2"


def test_dry_run_lists_the_cells_with_the_memory_of_plain_attention(monkeypatch):
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: Capacity("H100", 80.0))
    shape = "--context 1024,65536 --head-dim 64 --dry-run --format json"
    plan = tables(invoke("attn", shape))["plan"]
    expected = [(1024, "eager"), (1024, "compiled"), (65536, "eager"), (65536, "compiled")]
    assert [(row["context"], row["implementation"]) for row in plan["rows"]] == expected
    n, s = 4 * 8 * 1024 * 64, 4 * 8 * 1024**2
    assert plan["rows"][0]["predicted_held_gib"] == (5 * n + s) / 2**30
    assert "2 of 4 need more than the 80.0 GiB of H100" in plan["notes"]
    batches = tables(invoke("attn --implementation eager --batch-size 1,2", shape))["plan"]
    assert [row["batch_size"] for row in batches["rows"]] == [1, 1, 2, 2]
    assert batches["title"].endswith("(nothing was run): heads 1, head dim 64, dtype fp32, causal False")
    plan = tables(invoke("flash --implementation auto,eager", shape))["plan"]
    assert [row["predicted_peak_gib"] is None for row in plan["rows"]] == [True, False] * 2


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
    assert measured == [
        (context, number, name) for context in (32, 64) for number in (1, 2) for name in ("tiled", "eager")
    ]
    assert "causal True, rounds 2" in table["title"]
    cells = read_results(path).cells
    assert len(cells) == 8
    assert drawn == pool_flash_rounds(cells)
    assert [row["forward_ms"] for row in table["rows"]] == [
        pytest.approx(cell.samples["forward"].median) for cell in pool_flash_rounds(cells)
    ]


def test_one_round_is_neither_saved_nor_shown(tmp_path):
    path = tmp_path / "flash.jsonl"
    arguments = ("--implementation eager --repetition-ms 1 --save", path, "--format json")
    title = tables(invoke(FLASH, arguments))["flash"]["title"]
    assert title.startswith("flash: batch 1, heads 2, context 32, head dim 16, dtype fp32, causal True, ")
    assert "rounds" not in title
    (cell,) = read_results(path).cells
    assert set(cell.configuration) == {
        *("implementation", "batch_size", "heads", "kv_heads", "context", "head_dim", "window", "dtype", "causal"),
        *("device", "seed", "warmup_ms", "repetition_ms"),
    }
    assert pool_flash_rounds([cell]) == [cell]


def test_heads_of_keys_and_windows_are_swept_and_shown():
    arguments = "--implementation eager,sdpa-flash --kv-heads 1,2 --window 5 --repetition-ms 1"
    table = tables(invoke(FLASH, arguments, "--baseline eager --format json"))["flash"]
    assert [(row["kv_heads"], row["implementation"], row["status"]) for row in table["rows"]] == [
        (1, "eager", "ok"),
        (1, "sdpa-flash", "unsupported"),
        (2, "eager", "ok"),
        (2, "sdpa-flash", "unsupported"),
    ]
    assert "causal True, window 5" in table["title"]
    assert (
        "sdpa-flash unsupported: implementation 'sdpa-flash' has no sliding window: choose flex or fa4"
        in table["notes"]
    )
    row = table["rows"][0]
    # 2 heads of 32 queries that see 5 keys, the first of them fewer.
    flops = 4 * 2 * 16 * (32**2 - 27**2) // 2
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9)


def test_settings_are_kept_of_triton_alone_and_before_others_of_a_shape_are_measured():
    names = "--implementation eager,triton --context 32,64"
    plan = tables(invoke(FLASH, "--keep-settings", names, "--dry-run --format json"))["plan"]
    assert [row["implementation"] for row in plan["rows"]] == ["triton", "eager"] * 2


def test_no_settings_are_kept_where_no_gpu_runs_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = "--implementation triton --num-heads 1 --repetition-ms 1 --warmup-ms 0"
    refused = invoke(FLASH, names, "--keep-settings")
    assert refused.exit_code == 3
    assert "--keep-settings needs kernels that run on a GPU, got cpu: leave it out" in refused.stderr
    assert not (tmp_path / "cs336sys").exists()


def test_flash_says_that_kept_settings_were_there_and_compares_cells_that_kept_them():
    cells = [flash_cell("triton", 1.0), flash_cell("eager", 4.0)]
    cells[0] = replace(cells[0], configuration=cells[0].configuration | {"keep_settings": True})
    kept = Run(
        "1", "2026-11-29T08:00:00+00:00", ("flash",), {"gpu": "H200"}, {"attention_settings": "0123456789abcdef"}
    )
    (table,) = flash_tables(cells, kept, "eager")
    assert table.rows[0]["forward_speedup"].estimate == 4.0
    note = "our Triton kernels had settings kept by --keep-settings (where: cs336sys doctor)"
    assert note in table.notes
    (table,) = flash_tables(cells, replace(kept, environment={}), "eager")
    assert note not in table.notes


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


def attn_cell(context, status, held_gib=None):
    shape = {"batch_size": 8, "heads": 1, "context": context, "head_dim": 64, "dtype": "fp32", "causal": True}
    configuration = {"implementation": "eager", **shape, "device": "cuda", "seed": 0, "warmup": 1, "steps": 2}
    samples = {"forward": Samples("ms", "cuda events", (1.0, 2.0))} if status == "ok" else {}
    return Cell("attn", configuration, status, samples, {"held_gib": held_gib, "peak_gib": held_gib} if samples else {})


def test_smallest_shape_out_of_memory_is_worked_through():
    cells = [attn_cell(4096, "ok", 1.0), attn_cell(65536, "oom"), attn_cell(32768, "oom")]
    accounting = next(table for table in attn_tables(cells, None) if table.name == "accounting")
    assert accounting.title == "attn: the smallest shape out of memory, 8 x 32768 x 64 fp32"
    units = {"MiB": 2**-10, "GiB": 1}
    parts = {row["quantity"]: row["value"] * units[row["unit"]] for row in accounting.rows}
    assert parts["probabilities"] == 8 * 32768**2 * 4 / 2**30 == 32.0
    assert parts["causal mask"] == 1.0
    held = ("query, key, value", "scaled query", "causal mask", "probabilities", "output")
    assert parts["held before the backward pass"] == pytest.approx(sum(parts[part] for part in held))
    assert parts["peak"] > 96
    derivations = {row["quantity"]: row["derivation"] for row in accounting.rows}
    widest = "more where the backward pass is widest"
    # What is not held and is needed at once: two tensors as large as the output, three as large as the scores.
    assert derivations[widest] == ("more = 2 x 4 B S d + 3 x 4 B S^2 = 2 x 4 x 8 x 32,768 x 64 + 3 x 4 x 8 x 32,768^2")
    assert parts[widest] == (2 * 4 * 8 * 32768 * 64 + 3 * 4 * 8 * 32768**2) / 2**30


def test_growth_of_held_memory_is_set_against_the_context():
    cells = [attn_cell(1024, "ok", 0.5), attn_cell(4096, "ok", 7.5), attn_cell(8192, "oom")]
    growth = next(table for table in attn_tables(cells, None) if table.name == "growth")
    assert [(row["contexts"], row["context_ratio"], row["held_ratio"]) for row in growth.rows] == [
        ("1024 to 4096", 4.0, 15.0)
    ]


def flash_cell(name, milliseconds, context=1024, status="ok"):
    shape = {"batch_size": 1, "heads": 16, "context": context, "head_dim": 64, "dtype": "bf16", "causal": True}
    parts = {"forward": milliseconds, "backward": 2 * milliseconds, "end_to_end": 3 * milliseconds}
    ok = status == "ok"
    return Cell(
        "flash",
        {"implementation": name, **shape, "device": "cuda", "seed": 0},
        status,
        {part: Samples("ms", "triton do_bench", (ms, ms, 9 * ms)) for part, ms in parts.items()} if ok else {},
        {f"{part}_tflops": 1 / ms for part, ms in parts.items()} | {"out_error": 1e-3} if ok else {"out_error": 0.5},
        None if ok else "relative error over 0.02: out by 5.0e-01",
    )


def test_speedups_are_of_medians_and_only_against_a_measured_baseline():
    cells = [
        flash_cell("triton", 1.0),
        flash_cell("eager", 4.0),
        flash_cell("triton", 2.0, context=2048),
        flash_cell("eager", 1.0, context=2048, status="wrong"),
    ]
    rows = flash_tables(cells, None, "eager")[0].rows
    assert [row["forward_speedup"].estimate for row in rows[:2]] == [4.0, 1.0]
    assert not any("forward_speedup" in row for row in rows[2:])
    assert [row.get("forward_ms") for row in rows] == [1.0, 4.0, 2.0, None]
    assert rows[3]["out_error"] == "5.0e-01"


def in_rounds(*cells):
    return [
        replace(cell, configuration=cell.configuration | {"round": number})
        for number, cell in enumerate(cells, start=1)
    ]


def test_rounds_are_pooled_and_speedups_are_of_pooled_medians():
    ours = in_rounds(flash_cell("triton", 1.0), flash_cell("triton", 2.0), flash_cell("triton", 3.0))
    theirs = in_rounds(flash_cell("eager", 8.0), flash_cell("eager", 9.0), flash_cell("eager", 12.0))
    cells = [cell for both in zip(ours, theirs, strict=True) for cell in both]
    cells[0] = replace(cells[0], derived=cells[0].derived | {"out_error": 3e-3, "peak_gib": 0.5})
    cells[2] = replace(cells[2], derived=cells[2].derived | {"dq_error": 2e-3, "peak_gib": 0.7})
    pooled = pool_flash_rounds(cells)
    assert [cell.configuration["implementation"] for cell in pooled] == ["triton", "eager"]
    assert pooled[0].samples["forward"] == Samples(
        "ms", "triton do_bench", (1.0, 1.0, 9.0, 2.0, 2.0, 18.0, 3.0, 3.0, 27.0)
    )
    (table,) = flash_tables(pooled, None, "eager")
    assert table.title == "flash: batch 1, heads 16, context 1024, head dim 64, dtype bf16, causal True, rounds 3"
    triton = table.rows[0]
    assert (triton["forward_ms"], triton["forward_speedup"].estimate, triton["status"]) == (3.0, 4.0, "ok")
    # Sorted, the end-to-end samples are 3, 3, 6, 6, 9, 9, 27, 54, 81.
    assert (triton["end_to_end_p20_ms"], triton["end_to_end_p80_ms"]) == pytest.approx((4.8, 37.8))
    # 4 B H S^2 D / 2 in 3 ms.
    assert triton["forward_tflops"] == pytest.approx(2 * 16 * 1024**2 * 64 / 3e-3 / 1e12)
    assert (triton["out_error"], triton["dq_error"], triton["peak_gib"]) == ("3.0e-03", "2.0e-03", 0.7)


def test_limit_is_the_peak_at_the_clock_of_all_rounds():
    slow, fast, fp32 = (flash_cell("triton", 1.0) for _ in range(3))
    slow.derived["sm_clock_mhz"], fast.derived["sm_clock_mhz"], fp32.derived["sm_clock_mhz"] = 1500, 1600, 1500
    fp32.configuration["dtype"] = "fp32"
    run = Run("a", "", (), {"gpu": "NVIDIA H200"}, {})
    bf16_row, fp32_row = flash_tables(pool_flash_rounds([*in_rounds(slow, fast), *in_rounds(fp32)]), run, "eager")[
        0
    ].rows
    # 132 multiprocessors, 4,096 FLOPs each in a clock, at 1,550 MHz.
    assert bf16_row["limit_tflops"] == pytest.approx(132 * 4096 * 1550 / 1e6, rel=1e-4)
    assert (bf16_row["sm_clock_mhz"], fp32_row["sm_clock_mhz"], "limit_tflops" in fp32_row) == (1550, 1500, False)


def test_warmup_samples_stay_apart_when_rounds_are_pooled():
    cell = flash_cell("eager", 1.0)
    samples = {part: replace(series, warmup=(7.0,)) for part, series in cell.samples.items()}
    (pooled,) = pool_flash_rounds(in_rounds(*[replace(cell, samples=samples)] * 2))
    assert pooled.samples["backward"].warmup == (7.0, 7.0)
    assert len(pooled.samples["backward"].measured) == 6


def test_row_is_ok_only_if_every_round_is():
    timeout = replace(flash_cell("triton", 1.0, status="timeout"), derived={}, reason="not done after 5 s")
    not_a_number = flash_cell("triton", 1.0, status="wrong")
    not_a_number = replace(not_a_number, derived={"out_error": math.nan}, reason="out by nan")
    rounds = in_rounds(flash_cell("triton", 1.0), not_a_number, timeout, flash_cell("triton", 1.0))
    (table,) = flash_tables(pool_flash_rounds(rounds), None, "triton")
    (row,) = table.rows
    assert (row["status"], row["out_error"]) == ("wrong", "nan")
    assert not any(name.endswith(("_ms", "_tflops", "_speedup")) for name in row)
    assert table.notes[1:] == ("triton wrong: out by nan",)


def test_plot_survives_a_sweep_without_a_measured_cell(tmp_path):
    plot_flash([flash_cell("eager", 1.0, status="wrong")], tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()
