"""Which saved cells were one invocation (``invocations.txt``), and what is said of cells that cannot be shown."""

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner
from written_figures import read_figures, rows_of, write_figures

from cs336sys.cli import app
from cs336sys.commands.registry import invocations, saved_tables, shown_cells
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, Run
from cs336sys.tables.saved import Presentation

PATH = Path(__file__).with_name("invocations.txt")
H200 = {"gpu": "NVIDIA H200", "cpu": "x", "torch": "2.11"}


def run(name, *arguments, machine=H200, **environment):
    return Run(name, f"time of {name}", ("flash", *arguments), machine, {"source_digest": "1"} | environment)


def cell(run_id, context, status="ok", command="flash"):
    return Cell(command, {"context": context}, status, run_id=run_id)


def invoked(runs, *cells):
    """Return the runs of each invocation, with its cells, from a file that is given twice."""
    results = Results({run.run_id: run for run in runs}, cells)
    return [
        (
            [run.run_id for run in one.runs],
            [(cell.configuration["context"], cell.status) for cell in one.cells.values()],
            one.run and one.run.run_id,
            f"{one.command}, {one.name}",
        )
        for one in invocations([results, results])
    ]


OTHER_GPU, OTHER_TORCH = H200 | {"gpu": "NVIDIA B200"}, H200 | {"torch": "2.12"}


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_invocations_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


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


if __name__ == "__main__":
    write_figures(PATH, globals())
