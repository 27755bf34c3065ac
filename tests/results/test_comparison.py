"""Which cells are compared with which, and what the samples of a pair are called."""

import math

import pytest

from cs336sys.results.comparison import (
    Measured,
    Pair,
    Side,
    compare_pairs,
    compare_samples,
    machine_differences,
    match_cells,
    shared_series,
    significance_level,
)
from cs336sys.results.model import Cell, Results, Run, Samples

AROUND_100 = (99.0, 101.0, 100.0, 99.5, 100.5, 100.0)
AROUND_120 = (119.0, 121.0, 120.0, 119.5, 120.5, 120.0)


def samples(*measured, unit="ms", method="cuda events"):
    return Samples(unit, method, measured)


def series(*measured, unit="ms", method="cuda events"):
    """One run of one round."""
    return Measured(((samples(*measured, unit=unit, method=method),),))


def cell(status="ok", command="bench", run_id="", reason=None, measured=None, **configuration):
    return Cell(command, configuration, status, measured or {}, {}, reason, run_id)


def side(*cells):
    """One run of one round for each cell."""
    return Side(tuple((one,) for one in cells))


def pair_of(a, b):
    return Pair(side(a), side(b))


def results(*cells, runs=()):
    return Results({run.run_id: run for run in runs}, cells)


def run(run_id, machine, **environment):
    return Run(run_id, "2026-01-01T00:00:00+00:00", (), machine, environment)


def test_verdict_ratio_and_interval_are_of_one_statistic():
    comparison = compare_samples(series(*AROUND_100), series(*AROUND_120))
    difference = comparison.difference
    assert (difference.median_a, difference.median_b, difference.ratio) == (100, 120, 1.2)
    assert 1 < difference.ratio_low < 1.2 < difference.ratio_high
    assert (comparison.verdict, comparison.reason) == ("slower", None)
    assert comparison.slower_percent == pytest.approx(20)
    assert comparison.slower_percent_at_most == pytest.approx(100 * (difference.ratio_high - 1))
    back = compare_samples(series(*AROUND_120), series(*AROUND_100))
    assert back.verdict == "faster"
    assert back.slower_percent < 0
    assert compare_samples(series(*AROUND_100), series(*AROUND_100[::-1])).verdict == "same"


def test_confidence_sets_the_significance():
    a, b = series(*AROUND_100), series(*(value + 1.5 for value in AROUND_100))
    assert compare_samples(a, b).verdict == "slower"
    assert compare_samples(a, b, confidence_percent=99.5).verdict == "same"
    assert compare_samples(a, b, confidence_percent=99.9).verdict == "undecided"
    assert significance_level(95.0) == 0.05


def test_samples_that_drift_decide_where_they_do_not_overlap():
    apart = compare_samples(series(*range(20, 30)), series(*range(10, 20)))
    assert (apart.verdict, apart.verdict_text, apart.reason) == ("faster", "differs: faster", None)
    assert (apart.difference.ratio_low, apart.difference.ratio_high) == pytest.approx((10 / 29, 19 / 20))
    overlapping = compare_samples(series(*range(20, 30)), series(*range(15, 25)))
    assert (overlapping.verdict, overlapping.verdict_text, overlapping.reason) == ("undecided", "undecided", None)
    assert (overlapping.difference.ratio_low, overlapping.difference.ratio_high) == pytest.approx((15 / 29, 24 / 20))
    assert overlapping.difference.to_decide > 10


def test_same_is_said_with_a_percentage_and_of_the_same_samples_with_none():
    close = compare_samples(series(*AROUND_100), series(*AROUND_100[::-1]))
    percent = 100 * (max(close.difference.ratio_high, 1 / close.difference.ratio_low) - 1)
    assert (close.verdict, close.verdict_text) == ("same", f"same within {percent:.2g} %")
    noisy = compare_samples(series(*range(1, 9)), series(*range(1, 9)[::-1]))
    assert noisy.verdict == "undecided"
    for values in ((1, 2, 3), range(1, 9), (0, 1, 0, 1, 0)):
        identical = compare_samples(series(*values, unit="gib"), series(*values, unit="gib"))
        assert (identical.verdict_text, identical.slower_percent_at_most) == ("same within 0 %", 0.0)


def test_stalls_are_what_means_know_and_medians_do_not():
    stalled = (*AROUND_100[:5], 200.0)
    comparison = compare_samples(series(*AROUND_100), series(*stalled))
    assert comparison.stalls == pytest.approx((sum(stalled) / 6 / 100) / comparison.difference.ratio)
    assert compare_samples(series(*AROUND_100), series(*AROUND_120)).stalls == pytest.approx(1)


def test_samples_that_are_not_positive_have_no_ratio_and_a_verdict_only_where_nothing_is_possible():
    none, some = series(0, 0, -1, 0, 0, unit="gib"), series(1, 2, 1, 2, 1, unit="gib")
    comparison = compare_samples(none, some)
    assert (comparison.difference.ratio, comparison.verdict, comparison.slower_percent) == (None, "slower", math.inf)
    assert compare_samples(some, none).slower_percent == 0.0
    for unit in ("ms", "tokens_per_s"):
        comparison = compare_samples(series(1, 2, 1, 2, 1, unit=unit), series(0, 0, 0, 0, 0, unit=unit))
        assert comparison.verdict == "undecided"
        assert comparison.reason == f"medians of 1 and 0 {unit}: nothing takes no time"


def test_rounds_and_runs_are_told_apart():
    """Two sweeps of two rounds in one file, the second interrupted and resumed by another process."""
    alike = {"gpu": "H200"}
    runs = [run(name, alike, seed=number) for number, name in enumerate(("first", "second", "resumed"))]
    cells = [
        cell(run_id="first", size="small", round=1),
        cell(run_id="first", size="small", round=2),
        cell(run_id="second", size="small", round=1),
        cell(run_id="resumed", size="small", round=2, steps=20),
    ]
    (pair,) = match_cells(results(*cells, runs=runs), results(cell(size="small"), cell(size="small", seed=1))).pairs
    assert pair.a.runs == (tuple(cells[:2]), tuple(cells[2:]))
    assert [len(run) for run in pair.b.runs] == [1, 1], "without rounds every cell is a run"
    assert pair.a.left_out == 0


def test_only_what_was_measured_like_the_last_cell_is_part_of_a_side():
    conditions = {"gpu": "H200"}
    runs = [
        run("other machine", {"gpu": "A100"}, source_digest="2"),
        run("other threads", conditions, source_digest="2", OMP_NUM_THREADS="4"),
        run("other code", conditions, source_digest="1"),
        run("unknown code", conditions),
        run("last", conditions, source_digest="2"),
    ]
    cells = [cell(run_id=one.run_id, size="small") for one in runs]
    (pair,) = match_cells(results(*cells, runs=runs), results(*cells, runs=runs)).pairs
    assert pair.a == Side(((cells[3],), (cells[4],)), left_out=3)


def test_the_same_cell_twice_is_one_run():
    cells = (cell(size="small", measured={"step": samples(1, 2)}), cell(size="small", measured={"step": samples(1, 3)}))
    (pair,) = match_cells(results(*cells, *cells), results(*cells)).pairs
    assert pair.a.runs == pair.b.runs == ((cells[0],), (cells[1],))


def test_a_round_that_failed_and_was_measured_again_is_ok():
    failed = cell("timeout", size="small", round=1, reason="not done after 60 s")
    again = cell(size="small", round=1)
    other = cell(size="small", round=2)
    (pair,) = match_cells(results(failed, other, again), results(again, other, failed)).pairs
    assert (pair.a.status, pair.a.runs) == ("ok", ((other, again),))
    assert (pair.b.status, pair.b.representative, pair.is_broken) == ("timeout", failed, True)


def test_cells_match_by_command_and_configuration():
    a = results(
        cell(size="small", context=128, steps=10, seed=0),
        cell(size="medium", context=128),
        cell(size="small", context=128, command="attn"),
        cell(size="small", context=128, warmup=5),
    )
    b = results(
        cell(size="large", context=128),
        cell(context=128, size="small", seed=1, steps=5),
        cell(size="small", context=128, warmup=0),
    )
    matched = match_cells(a, b)
    assert matched.pairs == (Pair(side(a.cells[0]), side(b.cells[1])),)
    assert matched.only_a == tuple(map(side, a.cells[1:]))
    assert matched.only_b == (side(b.cells[0]), side(b.cells[2]))


def test_series_are_called_by_name_and_unit():
    measured = {"step": samples(1), "forward_ms": samples(2), "bus": samples(3, unit="gbps"), "empty": samples()}
    assert list(side(cell(measured=measured)).series()) == ["step_ms", "forward_ms", "bus_gbps"]
    both = side(cell(measured=measured), cell(measured={"step": samples(4)})).series()
    assert both == {"step_ms": Measured(((samples(1),), (samples(4),)))}


def test_default_metric_is_the_step_or_else_every_time():
    step = {"forward": samples(1), "step": samples(3), "bus": samples(2, unit="gbps")}
    parts = {"forward": samples(1), "backward": samples(2), "bus": samples(2, unit="gbps")}
    rates = {"bus": samples(2, unit="gbps")}
    assert shared_series(pair_of(cell(measured=step), cell(measured=step))) == ["step_ms"]
    assert shared_series(pair_of(cell(measured=step), cell(measured=parts))) == ["forward_ms"]
    assert shared_series(pair_of(cell(measured=parts), cell(measured=parts))) == ["forward_ms", "backward_ms"]
    assert shared_series(pair_of(cell(measured=rates), cell(measured=rates))) == []
    assert shared_series(pair_of(cell(measured=step), cell(measured=step)), ["bus", "forward_ms"]) == [
        "forward_ms",
        "bus_gbps",
    ]


def test_series_in_different_units_are_not_shared():
    pair = pair_of(cell(measured={"step": samples(1)}), cell(measured={"step": samples(1, unit="us")}))
    assert shared_series(pair) == []


def test_only_measured_pairs_are_compared():
    measured = {"step": samples(*AROUND_100), "forward": samples(1, 2)}
    pairs = [pair_of(cell(measured=measured), cell("oom")), pair_of(cell(measured=measured), cell(measured=measured))]
    compared = compare_pairs(pairs)
    assert {metric: [pair for pair, _ in rows] for metric, rows in compared.items()} == {"step_ms": [pairs[1]]}
    assert [pair.is_broken for pair in pairs] == [True, False]
    assert not pair_of(cell("oom"), cell(measured=measured)).is_broken
    assert compare_pairs(pairs[:1], ["foo"]) == {}


def test_differences_are_of_what_timings_depend_on():
    a = results(
        cell(size="small", run_id="a"),
        runs=[run("a", {"gpu": "H200", "torch": "2.11"}, git_commit="1", gpu0_sm_clock_mhz=1980, torch_threads=2)],
    )
    b = results(
        cell(size="small", run_id="b"),
        runs=[run("b", {"gpu": "A100", "torch": "2.11"}, git_commit="2", gpu0_sm_clock_mhz=1410, OMP_NUM_THREADS="1")],
    )
    pairs = match_cells(a, b).pairs
    differences = machine_differences(pairs, a, b)
    assert differences == {"gpu": ("H200", "A100"), "torch_threads": (2, None), "OMP_NUM_THREADS": (None, "1")}
    assert machine_differences(match_cells(a, a).pairs, a, a) == {}


def test_unknown_machine_is_a_difference():
    a = results(cell(size="small", run_id="a"), runs=[run("a", {"gpu": "H200"})])
    b = results(cell(size="small", run_id="lost"))
    differences = machine_differences(match_cells(a, b).pairs, a, b)
    assert differences == {"gpu": ("H200", None), "machine": (None, "not recorded")}
