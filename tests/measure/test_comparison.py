import math
import sys

import pytest

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.measure.comparison import (
    Pair,
    compare_pairs,
    compare_samples,
    machine_differences,
    match_cells,
    series,
    shared_metrics,
    significance_level,
    smallest_p,
)
from cs336sys.results import Cell, Results, Run, Samples


def samples(*measured, unit="ms", method="cuda events"):
    return Samples(unit, method, measured)


def cell(status="ok", command="bench", run_id="", reason=None, measured=None, **configuration):
    return Cell(command, configuration, status, measured or {}, {}, reason, run_id)


def results(*cells, runs=()):
    return Results({run.run_id: run for run in runs}, cells)


def run(run_id, machine, **environment):
    return Run(run_id, "2026-01-01T00:00:00+00:00", (), machine, environment)


def test_separated_samples_are_significant():
    comparison = compare_samples(samples(10, 11, 12, 13, 14), samples(20, 21, 22, 23, 24))
    assert comparison.ratio == 22 / 12
    assert comparison.p_value == pytest.approx(2 / math.comb(10, 5))
    assert comparison.verdict == "slower"
    assert comparison.slower_percent == pytest.approx(100 * (22 / 12 - 1))
    assert 20 / 14 <= comparison.ratio_low < comparison.ratio < comparison.ratio_high <= 24 / 10
    back = compare_samples(samples(20, 21, 22, 23, 24), samples(10, 11, 12, 13, 14))
    assert (back.verdict, back.ratio) == ("faster", 12 / 22)
    assert back.slower_percent < 0


def test_overlapping_samples_are_not_significant():
    # Mann and Whitney's U is 9 of 25 here, p = 0.548 in their exact table.
    comparison = compare_samples(samples(1, 3, 5, 7, 9), samples(2, 4, 6, 11, 12))
    assert comparison.p_value == pytest.approx(0.5476, abs=1e-4)
    assert comparison.verdict == "~"


@pytest.mark.parametrize(
    ("confidence_percent", "low", "high"),
    # The median of three draws from 1, 2, 3 is 1 in 7 of 27 cases, 2 in 13, 3 in 7: quantiles change at 26 % and 74 %.
    [(95.0, 1.0, 3.0), (60.0, 1.0, 3.0), (40.0, 2.0, 2.0)],
)
def test_interval_holds_the_quantiles_of_the_resampled_ratio(confidence_percent, low, high):
    comparison = compare_samples(samples(5, 5, 5), samples(5, 10, 15), confidence_percent=confidence_percent)
    assert (comparison.ratio_low, comparison.ratio_high) == (low, high)


def test_interval_resamples_both_sides():
    comparison = compare_samples(samples(5, 10, 15), samples(30, 30, 30), confidence_percent=60.0)
    assert (comparison.ratio_low, comparison.ratio, comparison.ratio_high) == (2.0, 3.0, 6.0)


def test_interval_is_the_same_every_time():
    a, b = samples(*range(10, 20)), samples(*range(12, 22))
    assert compare_samples(a, b) == compare_samples(a, b)


def test_constant_samples_have_a_point_for_an_interval():
    comparison = compare_samples(samples(2, 2, 2, 2, 2), samples(2, 2, 2, 2, 2))
    assert (comparison.ratio, comparison.ratio_low, comparison.ratio_high) == (1.0, 1.0, 1.0)
    assert (comparison.p_value, comparison.verdict) == (1.0, "~")


def test_three_against_three_are_never_significant():
    assert smallest_p(3, 3) == pytest.approx(0.1)
    assert smallest_p(1, 1) == 1.0
    assert compare_samples(samples(1, 2, 3), samples(10, 20, 30)).verdict == "~"
    # Ties make scipy fall back on the normal approximation, whose 0.047 no ranking of 3 against 3 can reach.
    tied = compare_samples(samples(1, 1, 1), samples(2, 2, 2))
    assert (tied.p_value, tied.verdict) == (pytest.approx(0.1), "~")


def test_confidence_sets_the_significance():
    a, b = samples(1, 2, 3, 4), samples(11, 12, 13, 14)
    assert compare_samples(a, b).verdict == "slower"
    assert compare_samples(a, b, confidence_percent=99.0).verdict == "~"
    assert significance_level(95.0) == 0.05


def test_single_sample_has_a_ratio_and_no_interval():
    comparison = compare_samples(samples(10), samples(20, 21, 22))
    assert (comparison.ratio, comparison.ratio_low, comparison.ratio_high) == (2.1, None, None)
    assert comparison.verdict == "~"


def test_samples_that_are_not_positive_have_no_ratio():
    comparison = compare_samples(samples(0, 0, -1, 0, 0), samples(1, 2, 3, 4, 5))
    assert (comparison.ratio, comparison.ratio_low, comparison.verdict) == (None, None, "slower")
    assert comparison.slower_percent == math.inf
    assert compare_samples(samples(1, 2, 3, 4, 5), samples(0, 0, 0, 0, 0)).slower_percent == 0.0


def test_of_rates_more_is_faster():
    a, b = samples(100, 101, 102, 103, 104, unit="gbps"), samples(50, 51, 51, 51, 52, unit="gbps")
    slower = compare_samples(a, b)
    assert (slower.verdict, slower.ratio) == ("slower", 0.5)
    assert slower.slower_percent == pytest.approx(100.0)
    assert compare_samples(b, a).verdict == "faster"


def test_without_scipy_the_mend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(CapabilityError, match=r'pip install "cs336sys\[compare\]"'):
        compare_samples(samples(1, 2), samples(1, 2))


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
    assert matched.pairs == (Pair(a.cells[0], b.cells[1]),)
    assert (matched.only_a, matched.only_b, matched.repeated_a, matched.repeated_b) == (3, 2, 0, 0)


def test_last_run_of_a_configuration_counts():
    a = results(cell(size="small", reason="first"), cell(size="small", reason="second"), cell(size="small"))
    b = results(cell(size="small"))
    matched = match_cells(a, b)
    assert matched.pairs == (Pair(a.cells[2], b.cells[0]),)
    assert (matched.repeated_a, matched.repeated_b) == (2, 0)


def test_series_are_called_by_name_and_unit():
    measured = {"step": samples(1), "forward_ms": samples(2), "bus": samples(3, unit="gbps"), "empty": samples()}
    assert list(series(cell(measured=measured))) == ["step_ms", "forward_ms", "bus_gbps"]


def test_default_metric_is_the_step_or_else_every_time():
    step = {"forward": samples(1), "step": samples(3), "bus": samples(2, unit="gbps")}
    parts = {"forward": samples(1), "backward": samples(2), "bus": samples(2, unit="gbps")}
    rates = {"bus": samples(2, unit="gbps")}
    assert shared_metrics(Pair(cell(measured=step), cell(measured=step))) == ["step_ms"]
    assert shared_metrics(Pair(cell(measured=step), cell(measured=parts))) == ["forward_ms"]
    assert shared_metrics(Pair(cell(measured=parts), cell(measured=parts))) == ["forward_ms", "backward_ms"]
    assert shared_metrics(Pair(cell(measured=rates), cell(measured=rates))) == []
    assert shared_metrics(Pair(cell(measured=step), cell(measured=step)), ["bus", "forward_ms"]) == [
        "forward_ms",
        "bus_gbps",
    ]


def test_series_in_different_units_are_not_shared():
    pair = Pair(cell(measured={"step": samples(1)}), cell(measured={"step": samples(1, unit="us")}))
    assert shared_metrics(pair) == []


def test_only_measured_pairs_are_compared():
    measured = {"step": samples(1, 2), "forward": samples(1, 2)}
    pairs = [Pair(cell(measured=measured), cell("oom")), Pair(cell(measured=measured), cell(measured=measured))]
    compared = compare_pairs(pairs)
    assert {metric: [pair for pair, _ in rows] for metric, rows in compared.items()} == {"step_ms": [pairs[1]]}
    assert [pair.is_broken for pair in pairs] == [True, False]
    assert not Pair(cell("oom"), cell(measured=measured)).is_broken
    assert compare_pairs(pairs[:1], ["foo"]) == {}


def test_unknown_metric_names_the_choices():
    pair = Pair(*[cell(measured={"step": samples(1, 2), "forward": samples(1, 2)})] * 2)
    with pytest.raises(
        UsageError, match=r"^no cell has samples of foo in both files: choose --metric from step_ms, fo"
    ):
        compare_pairs([pair], ["step", "foo"])
    rate = Pair(*[cell(measured={"bus": samples(1, unit="gbps")})] * 2)
    with pytest.raises(
        UsageError, match=r"^no cell has samples of a time in both files: choose --metric from bus_gbps"
    ):
        compare_pairs([rate])
    with pytest.raises(UsageError, match=r"the files share no measured series$"):
        compare_pairs([Pair(cell(), cell())])


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
