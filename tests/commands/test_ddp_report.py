"""The tables and pictures of ``ddp``, from cells that were never measured."""

import math
from dataclasses import replace

import pytest

from cs336sys.commands.ddp.tables import bucket_sweeps, ddp_plan, ddp_tables, plot_buckets, pool_ddp_rounds
from cs336sys.commands.rank_training.tables import plot_timelines
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.render import render
from cs336sys.tables.table import with_rows

TIMELINE = {
    "compute": [(0.0, 50.0), (60.0, 70.0)],
    "communicate": [(40.0, 60.0)],
    "phases": {"forward": 20.0, "backward": 50.0, "synchronize": 60.0, "optimizer": 70.0},
    "compute_ms": 60.0,
    "communication_ms": 20.0,
    "overlap_ms": 10.0,
}


def samples(*values):
    return Samples("ms", "cuda events, maximum over ranks", values)


def cell(strategy, step_ms, bucket_mb=None, precision="bf16", status="ok", reason=None, buckets=1, **derived):
    workload = ParallelWorkload(Workload(choose_size("xl"), precision=precision), strategy, bucket_mb=bucket_mb)
    if status != "ok":
        return Cell("ddp", workload.configuration(), status, derived=derived, reason=reason)
    steps = (step_ms - 2, step_ms, step_ms, step_ms, step_ms + 1)
    times = {"step": samples(*steps), "unsynchronized": samples(*[80.0] * 5)}
    phases = {name: samples(1.0, 1.0, 1.0) for name in ("forward", "backward", "optimizer", "wall", "communication")}
    derived = {
        "exposed_ms": step_ms - 80,
        "exposed_percent": 100 * (step_ms - 80) / step_ms,
        "hidden_percent": 60.0,
        "overlap_percent": 50.0,
        "calls": buckets + 1,
        "gradient_calls": buckets,
        "communicated_bytes": 8_000_000_000,
        "peak_gib": 50.0,
        "tokens_per_s": 20_000.0,
        "largest_difference": 1.5e-7,
        "relative_difference_percent": 0.5,
        "checked_layers": 48,
        "timeline": TIMELINE,
        "link_latency_s": 20e-6,
        "link_bytes_per_s": 320e9,
    } | derived
    return Cell("ddp", workload.configuration(), "ok", times | phases, derived)


CELLS = [
    cell("naive", 120.0, buckets=435),
    cell("bucketed", 96.0, bucket_mb=1000.0, buckets=8),
    cell("bucketed", 90.0, bucket_mb=100.0, buckets=80),
    cell("flat", 0.0, status="wrong", reason="flat: off", largest_difference=0.3, relative_difference_percent=80.0),
    cell("naive", 240.0, precision="fp32", checked_layers=24),
    cell("torch", 0.0, precision="fp32", status="oom", reason="out of memory"),
]


def rows_of(tables, name):
    return next(table.rows for table in tables if table.name == name)


def test_speedup_is_over_naive_in_the_same_precision():
    rows = rows_of(ddp_tables(CELLS, None), "ddp")
    speedups = [row["speedup"].estimate if "speedup" in row else None for row in rows]
    assert speedups == [1.0, 120 / 96, 120 / 90, None, 1.0, None]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "wrong", "ok", "oom"]
    assert "step_ms" not in rows[3]
    assert rows[3]["largest_difference"] == 0.3, "how wrong it is stands in the table"


def test_hidden_time_is_at_most_what_ran():
    """436 all-reduces took 61 ms alone, 35 of 86 ms in a graph, beside nothing: 43 % of them were "hidden"."""
    timeline = TIMELINE | {"communication_ms": 34.9, "overlap_ms": 0.0}
    naive = cell("naive", 116.0, timeline=timeline)
    naive = replace(naive, samples=naive.samples | {"communication": samples(61.5, 61.5, 61.5)})
    (row,) = rows_of(ddp_tables([naive], None), "ddp")
    assert (row["exposed_ms"].estimate, row["running_ms"]) == (36.0, 34.9)
    assert row["hidden_percent"].estimate == 0.0 <= row["hidden_percent"].high < 10
    alone = replace(naive, derived=naive.derived | {"timeline": None})
    (row,) = rows_of(ddp_tables([alone], None), "ddp")
    assert row["hidden_percent"].estimate == pytest.approx(100 * (1 - 36.0 / 61.5))


def test_rounds_are_one_row_and_what_follows_from_the_samples_is_made_anew():
    def of_round(number, one):
        return replace(one, configuration=one.configuration | {"round": number})

    rounds = [
        *(of_round(1, one) for one in (cell("naive", 120.0), cell("flat", 100.0, peak_gib=49.0))),
        *(of_round(2, one) for one in (cell("flat", 90.0, peak_gib=51.0), cell("naive", 130.0))),
    ]
    found = ddp_tables(pool_ddp_rounds(rounds), None)[0]
    naive, flat = found.rows
    assert (naive["rounds"], flat["rounds"]) == (2, 2)
    # Medians of ten steps: 118, 120 (three), 121, 128, 130 (three), 131 and 88, 90, 91, 98, 100, 101, over one of 80.
    assert naive["step_ms"].median == 124.5
    assert flat["exposed_ms"].estimate == 94.5 - 80
    assert flat["speedup"].estimate == pytest.approx(124.5 / 94.5)
    # Communication alone takes 1 ms, none of which is hidden.
    assert (flat["hidden_percent"].estimate, flat["peak_gib"]) == (0.0, 51.0)
    mean_s = (118 + 3 * 120 + 121 + 128 + 3 * 130 + 131) / 10e3
    assert naive["tokens_per_s"] == pytest.approx(4 * 512 / mean_s)
    assert any(note.startswith("rounds: to and fro") for note in found.notes)


def test_notes_say_what_went_wrong_and_what_was_not_compared():
    (table, *_) = ddp_tables(CELLS, None)
    assert "wrong: flat: off" in table.notes
    assert "oom: out of memory" in table.notes
    assert "xl: weights compared with 24 of 48 layers, for want of memory" in table.notes
    asked = cell("naive", 240.0, checked_layers=2)
    asked.configuration["check_layers"] = 2
    assert "xl: weights compared with 2 of 48 layers, as asked" in ddp_tables([asked], None)[0].notes
    assert table.title.startswith("ddp: ranks 2, batch 4, vocabulary 10000, context 512, attention reference")


def test_the_call_without_gradients_is_explained_where_there_is_one():
    def notes(*cells):
        return " ".join(ddp_tables(cells, None)[0].notes)

    assert "which parameters have any" in notes(*CELLS)
    assert "which parameters have any" not in notes(cell("torch", 90.0, buckets=3, calls=3), CELLS[3])


def test_bucket_table_predicts_from_the_number_of_buckets():
    tables = ddp_tables(CELLS, None)
    rows = rows_of(tables, "buckets")
    assert [row["bucket_mb"] for row in rows] == [100.0, 1000.0]
    # 8 GB / (80 x 320 GB/s) + 80 x 20 us, and 8 GB / (8 x 320 GB/s) + 8 x 20 us
    assert [row["predicted_ms"] for row in rows] == pytest.approx([0.3125 + 1.6, 3.125 + 0.16])
    assert [row["exposed_ms"].estimate for row in rows] == [10.0, 16.0]
    notes = next(table.notes for table in tables if table.name == "buckets")
    # sqrt(8e9 x 320e9 x 20e-6) = 226 MB, 2 sqrt(8e9 x 20e-6 / 320e9) = 1.414 ms
    assert any("least overhead, 1.414 ms, predicted for buckets of 226.3 MB" in note for note in notes)
    free = [cell("bucketed", 90.0, bucket_mb=100.0, link_latency_s=0.0)]
    assert "calls look free" in next(table.notes for table in ddp_tables(free, None) if table.name == "buckets")[1]


def test_nothing_is_predicted_where_noise_hides_the_bandwidth(tmp_path):
    cells = [cell("bucketed", 90.0, bucket_mb=100.0, link_bytes_per_s=math.inf)]
    table = next(table for table in ddp_tables(cells, None) if table.name == "buckets")
    assert table.rows[0]["predicted_ms"] is None
    assert table.notes[1].startswith("w not found: of the all-reduces just measured larger ones took no longer")
    assert "inf" not in render([table], "markdown")
    plot_buckets(cells, tmp_path / "b.svg")
    assert "model" not in (tmp_path / "b.svg").read_text()


def test_sweeps_of_different_settings_stay_apart():
    other = cell("bucketed", 200.0, bucket_mb=10.0, precision="fp32")
    sweeps = bucket_sweeps([*CELLS, other])
    assert [[found.configuration["bucket_mb"] for found in sweep] for sweep in sweeps] == [[100.0, 1000.0], [10.0]]
    notes = next(table.notes for table in ddp_tables([*CELLS, other], None) if table.name == "buckets")
    assert [note.partition(": w ")[0] for note in notes[1:]] == ["precision bf16", "precision fp32"]


def test_nothing_measured_is_a_table_too(tmp_path):
    assert "nothing measured" in render(ddp_tables([], None), "markdown")
    only_wrong = ddp_tables(CELLS[3:4], None)
    assert [table.name for table in with_rows(*only_wrong)] == ["ddp"]
    plot_timelines(CELLS[3:4], tmp_path / "t.png")
    plot_buckets(CELLS[3:4], tmp_path / "b.png")
    assert (tmp_path / "t.png").exists()
    assert (tmp_path / "b.png").exists()


def test_timelines_show_every_measured_cell(tmp_path):
    noisy = cell("flat", 80.5)
    plot_timelines([*CELLS, noisy, cell("overlap", 90.0, timeline=None)], tmp_path / "t.svg")
    plot_buckets(CELLS, tmp_path / "b.svg")
    # matplotlib writes text as outlines, with the text itself in a comment.
    text = (tmp_path / "t.svg").read_text()
    assert text.count("of which 10.0 ms overlapped with computing") == 5
    assert "flat xl bf16: communication 20.0 ms, of which 10.0 ms overlapped with computing; exposed &lt; " in text
    assert "naive xl fp32: communication 20.0 ms, of which 10.0 ms overlapped with computing; exposed 160.0 ms" in text
    assert "bucketed 100 MB xl bf16: communication 20.0 ms" in text
    assert "model: s / (n w) + n o" in (tmp_path / "b.svg").read_text()


def test_plan_shows_what_ranks_hold():
    workload = ParallelWorkload(Workload(choose_size("xl")), "bucketed", bucket_mb=25.0)
    (row,) = ddp_plan([workload]).rows
    assert row["share"] == 2
    assert row["state_gib"] == 4 * row["gradients_gib"]
