"""Differences that the noise may have made are not shown as if they were known."""

import json
from pathlib import Path

import pytest

from cs336sys.commands.bench.tables import bench_tables
from cs336sys.results.model import Cell, Samples, read_results
from cs336sys.results.statistics import Interval
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import format_value
from cs336sys.tables.render import render
from cs336sys.tables.table import Column, Table

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


def ms(*values):
    return Samples("ms", "cpu clock", values)


TABLE = Table(
    "t",
    "T",
    (Column("step_ms", "step", "ms"), Column("over", "over", "ratio")),
    [{"step_ms": ms(1.0, 3.0), "over": Interval(1.1, 0.5, 2.0, 1.0, to_decide=40)}, {"over": 1.0}],
    steadier="more --steps",
)


def test_marks_are_explained_with_what_to_do():
    for format in ("table", "markdown", "latex", "typst", "json"):
        text = render([TABLE], format)
        assert text.count("steadier: more --steps, and nothing else running") in (1, 2), format
        assert "about 40 samples of each would decide all ratios" in text
    quiet = Table("t", "T", TABLE.columns, [{"step_ms": ms(1.0, 1.1), "over": 1.5}], steadier="more --steps")
    assert "noise" not in render([quiet], "markdown")


def test_programs_get_the_interval():
    (row, other) = json.loads(render([TABLE], "json"))["tables"][0]["rows"]
    assert (row["over"], row["over_low"], row["over_high"]) == (1.1, 0.5, 2.0)
    assert (other["over"], other["over_low"]) == (1.0, None)
    assert (
        render([TABLE], "csv").splitlines()[0]
        == "table,step_ms_mean,step_ms_std,step_ms_median,over,over_low,over_high"
    )


def bench_cell(attention, *step_ms):
    workload = Workload(choose_size("tiny"), mode="forward", attention=attention)
    derived = {"tflops": 1.0, "mfu_percent": None, "tokens_per_s": 1.0, "peak_gib": None, "gpu_busy_ms": None}
    samples = {"forward": ms(*step_ms), "step": ms(*step_ms), "wall": ms(*step_ms)}
    return Cell("bench", workload.configuration(), "ok", samples, derived)


def test_bench_on_a_busy_machine_tells_no_speed_up():
    """What was seen: 0.038x, with a standard deviation of 381 ms of 506."""
    cells = [bench_cell("reference", 18.0, 19.0, 20.0), bench_cell("sdpa", 19.0, 500.0, 1000.0)]
    times, speedups = bench_tables(cells, None)
    assert speedups.rows[0]["step_speedup"].is_noise
    text = render([times, speedups], "markdown")
    assert "undecided" in text
    assert "about 4 samples of each would decide all ratios" in text
    assert "506 ± 491 !" in text
    assert "--interleave SETTING, --rounds 5 or more --steps" in text


def test_speedups_of_a_saved_sweep_on_an_h200_are_decided():
    """It printed 0.328x for three times faster, and "within the noise" of 1.84 ms against 7.1."""
    cells = read_results(RESULTS / "bench-graph-h200.jsonl.gz").cells
    speedups = bench_tables(cells, None)[1]
    assert {(row["cuda_graph"], row["over"]) for row in speedups.rows} == {("on", "off")}
    intervals = {(row["size"], key): row[key] for row in speedups.rows for key in row if key.endswith("_speedup")}
    assert all(interval.low > 1 for interval in intervals.values())
    assert format_value(intervals["small", "forward_speedup"], "ratio") == "at least 3.819x"
    assert format_value(intervals["small", "step_speedup"], "ratio") == "3.046x (2.969 to 3.128)"
    (launched, *_) = bench_tables(cells, None, baseline="cuda-graph=on")[1].rows
    assert (launched["cuda_graph"], launched["over"]) == ("off", "on")
    assert launched["step_speedup"].estimate == pytest.approx(1 / intervals["small", "step_speedup"].estimate)
