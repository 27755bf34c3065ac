"""Which cells are compared with which, and what the samples of a pair are called."""

from cs336sys.results.comparison import Measured, Pair, Side, match_cells, shared_series
from cs336sys.results.model import Cell, Results, Run, Samples


def samples(*measured, unit="ms"):
    return Samples(unit, "cuda events", measured)


def cell(measured=None, run_id="", **configuration):
    return Cell("bench", configuration, "ok", measured or {}, run_id=run_id)


def side(*measured):
    """One run of one round for each cell."""
    return Side(tuple((cell(of_cell),) for of_cell in measured))


def test_rounds_and_runs_are_told_apart():
    """Two sweeps of two rounds in one file, the second interrupted and resumed by another process."""
    runs = {name: Run(name, "", (), {"gpu": "H200"}, {"seed": name}) for name in ("first", "second", "resumed")}
    cells = (
        cell(run_id="first", size="small", round=1),
        cell(run_id="first", size="small", round=2),
        cell(run_id="second", size="small", round=1),
        cell(run_id="resumed", size="small", round=2, steps=20),
    )
    others = Results({}, (cell(size="small"), cell(size="small", seed=1)))
    (pair,) = match_cells(Results(runs, cells), others).pairs
    assert pair.a.runs == (cells[:2], cells[2:])
    assert [len(run) for run in pair.b.runs] == [1, 1], "without rounds every cell is a run"
    assert pair.a.left_out == 0


def test_series_are_called_by_name_and_unit():
    measured = {"step": samples(1), "forward_ms": samples(2), "bus": samples(3, unit="gbps"), "empty": samples()}
    assert list(side(measured).series()) == ["step_ms", "forward_ms", "bus_gbps"]
    assert side(measured, {"step": samples(4)}).series() == {"step_ms": Measured(((samples(1),), (samples(4),)))}


def test_default_metric_is_the_step_or_else_every_time():
    step = {"forward": samples(1), "step": samples(3), "bus": samples(2, unit="gbps")}
    parts = {"forward": samples(1), "backward": samples(2), "bus": samples(2, unit="gbps")}
    assert shared_series(Pair(side(step), side(parts))) == ["forward_ms"]
    assert shared_series(Pair(side(parts), side(parts))) == ["forward_ms", "backward_ms"]
    assert shared_series(Pair(side(step), side(step)), ["bus", "forward_ms"]) == ["forward_ms", "bus_gbps"]
