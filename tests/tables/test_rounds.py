"""The rounds of ``bench``, pooled from made-up cells, and differences that noise may have made."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.commands.bench.tables import bench_tables, pool_bench_rounds
from cs336sys.results.model import Cell, Samples, read_results
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import format_value
from cs336sys.tables.render import render
from cs336sys.tables.table import with_rows
from cs336sys.tables.titles import largest_known

# Of a step at size tiny, batch 4, context 512, by hand: 3 passes' worth of 2 layers' projections (4 x 2 x 2048 x 128^2)
# and attention (4 x 4 x 4 x 512^2 x 32 / 2) and feed-forward (3 x 2 x 2048 x 128 x 512), and of the output head.
TINY_TFLOP = 3 * (2 * (268_435_456 + 268_435_456 + 805_306_368) + 5_242_880_000) / 1e12


def cell(number, step_ms, *, status="ok", reason=None, peak_gib=0.5, gpu_busy_ms=5.0, mfu_percent=50.0, **settings):
    """A cell of round ``number`` on a GPU with a peak of 4 TFLOP/s (unless it is unknown)."""
    configuration = Workload(
        SIZES["tiny"], device="cuda", warmup=1, steps=len(step_ms) or 1, **settings
    ).configuration()
    configuration |= {} if number is None else {"round": number}
    if status != "ok":
        return Cell("bench", configuration, status, reason=reason)
    samples = {
        name: Samples(
            "ms", "cuda events", tuple(share * ms for ms in step_ms), warmup=(share * 1000.0 * (number or 1),)
        )
        for name, share in {"forward": 0.25, "backward": 0.5, "optimizer": 0.25, "step": 1.0, "wall": 2.0}.items()
    }
    derived = {
        "parameters": 3_084_928,
        "first_step_s": 10.0 * (number or 1),
        "peak_gib": peak_gib,
        # Other than what follows from the samples, so that columns which are not made anew stand out.
        "tokens_per_s": 1.0,
        "tflops": 2.0,
        "mfu_percent": mfu_percent,
        "gpu_busy_ms": gpu_busy_ms,
    }
    return Cell("bench", configuration, "ok", samples, derived)


def test_samples_are_joined_and_what_follows_from_them_is_made_anew():
    rounds = [
        cell(1, (10.0, 20.0), peak_gib=0.5, gpu_busy_ms=5.0),
        cell(2, (30.0, 60.0), peak_gib=0.7, gpu_busy_ms=21.0),
        cell(3, (40.0, 20.0), peak_gib=0.6, gpu_busy_ms=20.0),
    ]
    for one, gib, clock in zip(rounds, (0.7, 0.9, 0.8), (1980, 1500, 1900), strict=True):
        one.derived.update(peak_resident_gib=gib, gpu_readings={"time_s": [0.1], "sm_clock_mhz": [clock]})
    (pooled,) = pool_bench_rounds(rounds)
    assert pooled.configuration == cell(None, (10.0, 20.0)).configuration | {"rounds": 3}
    assert pooled.samples["step"] == Samples(
        "ms", "cuda events", (10.0, 20.0, 30.0, 60.0, 40.0, 20.0), warmup=(1000.0, 2000.0, 3000.0)
    )
    assert pooled.samples["forward"].measured == (2.5, 5.0, 7.5, 15.0, 10.0, 5.0)
    assert pooled.samples["wall"].warmup == (2000.0, 4000.0, 6000.0)
    # The mean step is 30 ms.
    assert pooled.derived == {
        "parameters": 3_084_928,
        "first_step_s": 10.0,
        "peak_gib": 0.7,
        "tokens_per_s": pytest.approx(4 * 512 / 30e-3),
        "tflops": pytest.approx(TINY_TFLOP / 30e-3),
        "mfu_percent": pytest.approx(100 * TINY_TFLOP / 30e-3 / 4.0),
        "gpu_busy_ms": 20.0,
        "peak_resident_gib": 0.9,
        "gpu_readings": {"time_s": [0.1] * 3, "sm_clock_mhz": [1980, 1500, 1900]},
    }


def test_unknown_values_stay_unknown():
    """On a CPU there is no peak memory and no busy time, and of an unknown GPU no MFU."""
    unknown = {"peak_gib": None, "gpu_busy_ms": None, "mfu_percent": None}
    (pooled,) = pool_bench_rounds([cell(1, (10.0,), **unknown), cell(2, (30.0,), **unknown)])
    assert {name: pooled.derived[name] for name in unknown} == unknown
    assert pooled.derived["tokens_per_s"] == pytest.approx(4 * 512 / 20e-3)


def test_table_has_a_row_for_each_configuration_and_names_the_rounds():
    cells = [
        cell(number, (number * ms, number * ms), attention=attention, gpu_busy_ms=17.0)
        for number in (1, 2, 3)
        for attention, ms in (("reference", 30.0), ("sdpa", 10.0), ("flash", 20.0))
    ]
    table, speedups = bench_tables(pool_bench_rounds(cells), None, percentiles=(50, 100))
    assert table.title.endswith("optimizer course, CUDA graph off, warm-up 1, rounds 3")
    assert table.notes == (
        "mean ± standard deviation of 2 steps after 1 warm-up, by cuda events",
        "rounds: the whole sweep so many times over, the steps of all rounds together",
    )
    shown = [(row["attention"], row["step_ms_p50"], row["step_ms_p100"], row["launch_bound"]) for row in table.rows]
    assert shown == [("reference", 60.0, 90.0, "yes"), ("sdpa", 20.0, 30.0, "no"), ("flash", 40.0, 60.0, "yes")]
    assert [row["step_ms"].mean for row in table.rows] == [60.0, 20.0, 40.0]
    assert [(row["attention"], row["step_speedup"].estimate) for row in speedups.rows] == [
        ("sdpa", 3.0),
        ("flash", 1.5),
    ]


def test_interrupted_rounds_get_a_column_and_are_compared_all_the_same():
    cells = [
        cell(1, (30.0,), attention="reference"),
        cell(1, (10.0,), attention="sdpa"),
        cell(2, (50.0,), attention="reference"),
    ]
    table, speedups = bench_tables(pool_bench_rounds(cells), None)
    assert "rounds" not in table.title
    assert [(row["attention"], row["rounds"]) for row in table.rows] == [("reference", 2), ("sdpa", 1)]
    assert "rounds" in [column.key for column in table.columns]
    assert [(row["attention"], row["step_speedup"].estimate) for row in speedups.rows] == [("sdpa", 4.0)]


def test_row_is_ok_only_if_every_round_is():
    cells = [
        cell(1, (10.0,)),
        cell(2, (), status="timeout", reason="not done after 5 s"),
        cell(3, (), status="oom", reason="out of memory at step 1/1"),
        cell(4, (10.0,)),
    ]
    (pooled,) = pool_bench_rounds(cells)
    assert (pooled.status, pooled.reason) == ("timeout", "not done after 5 s")
    assert (pooled.samples, pooled.derived) == ({}, {})
    (table,) = with_rows(*bench_tables([pooled], None))
    (row,) = table.rows
    assert (row["status"], row["parameters"]) == ("timeout", 3_084_928)
    assert not any(name.endswith(("_ms", "_per_s")) for name in row)
    assert table.notes[0] == "timeout: not done after 5 s"


def test_not_a_number_is_the_largest():
    derived = [{"out_error": 0.5}, {"out_error": math.nan}, {"out_error": None}, {}, {"out_error": 0.7}]
    cells = [replace(cell(number, (1.0,)), derived=values) for number, values in enumerate(derived, 1)]
    assert math.isnan(largest_known(cells, "out_error"))
    assert largest_known([cells[0], *cells[2:]], "out_error") == 0.7
    assert largest_known(cells[2:4], "out_error") is None


def test_no_second_time_by_the_cpu_where_the_step_is_timed_by_it():
    def headers(method):
        (one,) = pool_bench_rounds([cell(1, (10.0, 20.0))])
        one = replace(one, samples={name: replace(series, method=method) for name, series in one.samples.items()})
        return [column.key for column in bench_tables([one], None)[0].shown_columns]

    assert "wall_ms" in headers("cuda events")
    assert "wall_ms" not in headers("cpu clock")


def test_bench_on_a_busy_machine_tells_no_speed_up():
    """What was seen: 0.038x, with a standard deviation of 381 ms of 506."""
    cells = [cell(None, (18.0, 19.0, 20.0)), cell(None, (19.0, 500.0, 1000.0), attention="sdpa")]
    times, speedups = bench_tables(cells, None)
    assert speedups.rows[0]["step_speedup"].is_noise
    text = render([times, speedups], "markdown")
    assert "undecided" in text
    assert "about 4 samples of each would decide all ratios" in text
    assert "506 ± 491 !" in text
    assert "--interleave SETTING, --rounds 5 or more --steps" in text


def test_speedups_of_a_saved_sweep_on_an_h200_are_decided():
    """It printed 0.328x for three times faster, and "within the noise" of 1.84 ms against 7.1."""
    cells = read_results(Path(__file__).parents[2] / "docs" / "results" / "bench-graph-h200.jsonl.gz").cells
    speedups = bench_tables(cells, None)[1]
    assert {(row["cuda_graph"], row["over"]) for row in speedups.rows} == {("on", "off")}
    intervals = {(row["size"], key): row[key] for row in speedups.rows for key in row if key.endswith("_speedup")}
    assert all(interval.low > 1 for interval in intervals.values())
    assert format_value(intervals["small", "forward_speedup"], "ratio") == "at least 3.819x"
    assert format_value(intervals["small", "step_speedup"], "ratio") == "3.046x (2.969 to 3.128)"
    (launched, *_) = bench_tables(cells, None, baseline="cuda-graph=on")[1].rows
    assert (launched["cuda_graph"], launched["over"]) == ("off", "on")
    assert launched["step_speedup"].estimate == pytest.approx(1 / intervals["small", "step_speedup"].estimate)
