"""Cost that grows with the number of runs and cells: four times as many may take four times as many calls, not 16."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from cs336sys.allocations.timeline import RECOMPUTATION, Event, Gradient, Region, build_timeline
from cs336sys.commands.registry import invocations
from cs336sys.errors import UsageError
from cs336sys.results import foreign
from cs336sys.results.comparison import match_cells, nearest_difference
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Results, Run, Samples, distinguishing_settings, read_results
from cs336sys.tables.table import Column, Table, select_in_groups

COUNT = 60


def calls(run: Callable[[], object]) -> int:
    """Count the calls of Python and C functions, which does not depend on the clock; comparisons of lists are none."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def require_linear(make: Callable[[int], Callable[[], object]]) -> None:
    few, many = (calls(make(count)) for count in (COUNT, 4 * COUNT))
    assert many < 5 * few, f"{few} calls for {COUNT}, {many} for {4 * COUNT}"


def saved(count: int, *arguments: str, **settings: int) -> Results:
    """Results of ``count`` runs, each of other code, with a cell of the same configuration but for ``settings``."""
    runs = {
        f"run {number}": Run(f"run {number}", "", ("bench", *arguments), {"cpu": "x"}, {"source_digest": str(number)})
        for number in range(count)
    }
    cells = [
        Cell(
            "bench",
            {"size": "tiny"} | {name: number + start for name, start in settings.items()},
            "ok",
            {"step": Samples("ms", "cpu clock", (1.0 + number, 2.0))},
            run_id=run_id,
        )
        for number, run_id in enumerate(runs)
    ]
    return Results(runs, tuple(cells))


def of_one_code(results: Results) -> Results:
    runs = {run_id: replace(run, environment={"source_digest": "0"}) for run_id, run in results.runs.items()}
    return replace(results, runs=runs)


TABLE = Table("times", "times", (Column("step_ms", "step", "ms"),), [{"step_ms": 1.0}])
# What is done with so many runs, settings or tables.
WORK = {
    "invocations": lambda count: lambda results=saved(count): invocations([results]),
    "invocations that resume": lambda count: lambda results=saved(count, "--resume"): invocations([results]),
    "invocations that resume any": lambda count: lambda results=saved(count, "--resume-any"): invocations([results]),
    "matching": lambda count: lambda results=saved(count): match_cells(results, results),
    "matching of one code": lambda count: lambda results=of_one_code(saved(count)): match_cells(results, results),
    "settings": lambda count: (
        lambda settings=dict.fromkeys(map(str, range(count)), 1): distinguishing_settings(
            [settings | {"seed": seed} for seed in range(3)]
        )
    ),
    "tables": lambda count: lambda: select_in_groups([[TABLE]] * count, ["times"], ["step_ms"], "step_ms"),
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_with_the_number_of_runs_settings_and_tables(name):
    require_linear(WORK[name])


def test_nearest_difference_is_bounded():
    def make(count: int) -> Callable[[], object]:
        matched = match_cells(saved(4 * count, context=0), saved(4 * count, context=10_000))
        return lambda: nearest_difference(matched)

    few, many = (calls(make(count)) for count in (COUNT, 4 * COUNT))
    assert many == few


def test_categories_of_a_checkpointed_step_are_linear_in_blocks():
    def make(count):
        inputs = [Event(block, 1) for block in range(count)]
        # A block is computed again, its gradient takes the memory of the one before, and both are freed.
        again = [Event(-1, 1), Event(-2, 1), Event(-1, -1), Event(-2, -1)]
        regions = [Region("forward", 0, count), Region("backward", count, 5 * count)]
        starts = range(count, 5 * count, 4)
        regions += [Region(RECOMPUTATION, start, start + 1) for start in starts]
        gradients = [Gradient(start + 2, -2, "weight") for start in starts]
        return lambda: build_timeline([*inputs, *again * count], regions=regions, gradients=gradients)

    require_linear(make)
    timeline = make(3)()
    assert sum(allocation.category == "gradients" for allocation in timeline.allocations) == 3
    assert sum(allocation.category == "activations" for allocation in timeline.allocations) == 6


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_save_warns_before_a_file_is_too_large_to_be_read(tmp_path, monkeypatch, ending):
    path = tmp_path / f"r.{ending}"
    results = saved(20, context=0)
    monkeypatch.setattr(foreign, "FILE_MEMORY_BYTES", 20_000)
    file = ResultsFile(path)
    written = 0
    for cell in results.cells:
        file.append(cell)
        written += 1
        if file.notices:
            break
    assert file.notices == [f"{path} holds 80 % of what can be read again: give another file next time"]
    assert 5 < written < 20
    file.close()
    assert len(read_results(path).cells) == written
    file = ResultsFile(path)
    for cell in results.cells[written:]:
        file.append(cell)
    assert len(file.notices) <= 1
    for cell in results.cells:
        file.append(cell)
    file.close()
    with pytest.raises(UsageError, match="it holds as much as can be read; give another file"):
        ResultsFile(path)
    with pytest.raises(UsageError, match="the most that is read: split it"):
        read_results(path)
