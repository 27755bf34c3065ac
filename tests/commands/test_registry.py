"""Which saved cells were one invocation, and what is said of cells that cannot be shown."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.commands.registry import invocations, saved_tables, shown_cells
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, Run
from cs336sys.tables.saved import Presentation

H200 = {"gpu": "NVIDIA H200", "cpu": "x", "torch": "2.11"}


def run(name, *arguments, machine=H200, **environment):
    return Run(name, f"time of {name}", ("flash", *arguments), machine, {"source_digest": "1"} | environment)


def cell(run_id, context, status="ok", command="flash"):
    return Cell(command, {"context": context}, status, run_id=run_id)


def found(runs, *cells):
    results = Results({run.run_id: run for run in runs}, cells)
    return [
        (
            [run.run_id for run in one.runs],
            [(cell.configuration["context"], cell.status) for cell in one.cells.values()],
        )
        for one in invocations([results, results])
    ]


def test_runs_stand_alone_and_a_file_given_twice_is_shown_once():
    cells = (cell("a", 1), cell("b", 1), cell("b", 2))
    assert found([run("a"), run("b")], *cells) == [(["a"], [(1, "ok")]), (["b"], [(1, "ok"), (2, "ok")])]


def test_a_resumed_run_goes_on_with_the_cells_that_it_took_and_replaces_what_it_measured_again():
    cells = (cell("a", 1, "error"), cell("a", 2), cell("b", 1), cell("b", 3))
    runs = [run("a"), run("b", "--resume")]
    assert found(runs, *cells) == [(["a", "b"], [(1, "ok"), (2, "ok"), (3, "ok")])]
    third = [*runs, run("c", "--resume")]
    assert found(third, *cells, cell("c", 4))[0][0] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "resumed",
    [run("b", "--resume", machine=H200 | {"torch": "2.12"}), run("b", "--resume", source_digest="2")],
    ids=["another machine", "other code"],
)
def test_a_resumed_run_measures_by_other_conditions_what_another_has_left(resumed):
    assert found([run("a"), resumed], cell("a", 1), cell("b", 1)) == [(["a"], [(1, "ok")]), (["b"], [(1, "ok")])]
    forced = replace(resumed, arguments=("flash", "--resume-any"))
    assert found([run("a"), forced], cell("a", 1), cell("b", 2)) == [(["a", "b"], [(1, "ok"), (2, "ok")])]


def test_no_machine_is_named_for_cells_of_several():
    runs = [run("a", machine=H200 | {"gpu": "NVIDIA B200"}), run("b", "--resume-any")]
    (one,) = invocations([Results({run.run_id: run for run in runs}, (cell("a", 1), cell("b", 2)))])
    assert one.run is None
    (one,) = invocations([Results({"b": runs[1]}, (cell("b", 2),))])
    assert one.run is runs[1]


def test_commands_and_runs_that_are_not_recorded_stay_apart():
    one, other = invocations([Results({}, (cell("", 1), cell("", 1, command="attn")))])
    assert (one.command, other.command) == ("flash", "attn")
    assert one.run is None
    assert one.name == "a run not recorded"


def test_cells_that_hold_something_else_are_one_sentence():
    """A value that no table can write is found before one is half written."""
    configuration = {"accumulation": "fp32 += fp32", "device": "cpu"}
    odd = Cell("precision", configuration, "ok", derived={"sum": {"of": "what"}}, run_id="a")
    (one,) = invocations([Results({"a": run("a")}, (odd,))])
    with pytest.raises(UsageError, match=r"^precision, run a of time of a: the saved cells hold something else than "):
        saved_tables(one, shown_cells(one), Presentation())


@pytest.mark.parametrize(
    "command", ["allreduce", "attn", "bench", "ddp", "flash", "kernels", "losses", "nsys", "shard"]
)
def test_csv_of_a_command_has_the_same_columns_whatever_was_swept(command):
    files = sorted(
        (Path(__file__).parents[2] / "docs" / "results").glob(f"{command}-*.jsonl.gz"),
        key=lambda path: path.stat().st_size,
    )
    headers = set()
    for path in files[:3]:
        header, *rows = csv.reader(CliRunner().invoke(app, ["show", str(path), "--format", "csv"]).stdout.splitlines())
        assert len(set(header)) == len(header)
        assert {len(row) for row in rows} == {len(header)}
        assert {row[header.index("run_id")] for row in rows} != {""}
        headers.add(tuple(header))
    assert len(headers) == 1
    assert {"batch_size" if command not in ("allreduce", "kernels") else "dtype", "gpu_name", "torch"} <= set(header)
