"""``compare`` as a user runs it: tables, and what ``--fail-above`` says; ``compared.txt`` has pairs of small files."""

import contextlib
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from run_commands import invoke
from written_figures import read_figures, rows_of, write_figures

from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, Samples

PATH = Path(__file__).with_name("compared.txt")
H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def times(*measured):
    return Samples("ms", "cuda events", measured)


def around(median_ms):
    """Eight samples with this median."""
    return times(*(median_ms + offset / 10 for offset in (0, -4, 2, 0, 4, -1, 1, -2)))


def cell(size, precision="fp32", steps=8, status="ok", reason=None, **samples):
    d_model = {"tiny": 128, "small": 768, "medium": 1024}[size]
    configuration = {"size": size, "d_model": d_model, "context": 512, "precision": precision, "steps": steps}
    configuration["seed"] = 0
    return Cell("bench", configuration, status, samples, {}, reason, run_id="run")


# B is 10 % slower for small fp32, 20 % faster for small bf16, the same for medium fp32, and broken for medium bf16.
A = [
    cell("small", step=around(100)),
    cell("small", "bf16", step=around(50)),
    cell("medium", step=around(300)),
    cell("medium", "bf16", step=around(150)),
]
B = [
    cell("small", step=around(110)),
    cell("small", "bf16", step=around(40)),
    cell("medium", step=around(300)),
    cell("medium", "bf16", status="oom", reason="CUDA out of memory"),
]
NOISY = times(120, 10, 160, 20, 150, 30, 140, 130)


def small(median_ms, **settings):
    return cell("small", step=around(median_ms), **settings)


def oom(size="small", *settings):
    return cell(size, *settings, status="oom", reason="out of memory")


def save(name, cells, machine=H200, run_id="run", **environment):
    file = ResultsFile(Path(name))
    file.append(Run(run_id, "2026-01-01T00:00:00+00:00", ("bench",), machine, environment))
    for cell in cells:
        file.append(replace(cell, run_id=run_id))
    file.close()


@contextlib.contextmanager
def files(**cells):
    """A folder of results files, by their names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, saved in cells.items():
            settings = {} if isinstance(saved, list) else saved
            save(f"{name}.jsonl", **{"cells": saved} if isinstance(saved, list) else settings)
        yield


def compared(a, b, options=""):
    """Return the exit code of a comparison, each row's ratio and verdict in every table, and the lines of stderr."""
    with files(a=a, b=b):
        result = invoke("compare a.jsonl b.jsonl", options)
        shown = invoke("compare a.jsonl b.jsonl --format json")
    tables = json.loads(shown.stdout)["tables"] if shown.stdout else []
    rows = [(row["ratio"], row["verdict"]) for table in tables for row in table["rows"] if "ratio" in row]
    return result.exit_code, rows, result.stderr.splitlines()


def tables(a, b, options=""):
    with files(a=a, b=b):
        return json.loads(invoke("compare a.jsonl b.jsonl", options, "--format json").stdout)["tables"]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_comparisons_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


def test_comparison_of_two_sweeps(monkeypatch):
    """Also where scipy is not installed."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    with files(a=A, b=B):
        result = invoke("compare a.jsonl b.jsonl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "### compare: step_ms of B against A\n"
        "\n"
        "| size   | precision   |   A median, ms |   B median, ms |    B/A |   95 % from |     to |      p | "
        "verdict         |   A runs |   B runs |   A lag 1 |   B lag 1 |\n"
        "|:-------|:------------|---------------:|---------------:|--"
        "-----:|------------:|-------:|-------:|:----------------|---------:|---------:|----------:|----------:|\n"
        "| small  | fp32        |          100.0 |          110.0 | 1"
        ".100x |      1.097x | 1.103x | 0.0002 | differs: slower |        1 |        1 |     -0.54 |     -0.54 |\n"
        "| small  | bf16        |          50.00 |          40.00 | 0"
        ".800x |      0.795x | 0.805x | 0.0002 | differs: faster |        1 |        1 |     -0.54 |     -0.54 |\n"
        "| medium | fp32        |          300.0 |          300.0 | 1"
        ".000x |      1.000x | 1.000x |    1.0 | same within 0 % |        1 |        1 |     -0.54 |     -0.54 |\n"
        "\n"
        "- B/A: ratio of the medians with its 95 % interval, lower is better; p: of the rank-sum test; differs: "
        "p up to 0.05, or drifting samples that do not overlap; same: the interval is within 5 % of 1; runs: rounds "
        "count; lag 1: autocorrelation of samples\n"
        "- one run a side: what differs from run to run is not covered; take --rounds, or several files a side\n"
        "- every cell: command bench, context 512\n"
        "\n"
        "### compare: cells that are not ok in both files\n"
        "\n"
        "| size   | precision   | A   | B   | reason             |\n"
        "|:-------|:------------|:----|:----|:-------------------|\n"
        "| medium | bf16        | ok  | oom | CUDA out of memory |\n"
        "\n"
        "### compare: summary\n"
        "\n"
        "| metric   |   cells |   faster |   slower |   same |   undecided |   geometric mean of B/A |\n"
        "|:---------|--------:|---------:|---------:|-------:|------------:|------------------------:|\n"
        "| step_ms  |       3 |        1 |        1 |      1 |           0 |                  0.958x |\n"
    )


def test_several_files_and_rounds_are_runs():
    """Four processes a side: the noise is what these differ by, and two samples of each are enough."""
    runs = {
        f"{side}{number}": {
            "cells": [cell("small", step=times(factor * level, factor * level + 1))],
            "run_id": side + str(number),
        }
        for side, factor in (("a", 1), ("b", 1.2))
        for number, level in enumerate((98, 100, 101, 102))
    }
    a, b = (",".join(f"{side}{number}.jsonl" for number in range(4)) for side in "ab")
    with files(**runs):
        result = invoke("compare", a, b, "--fail-above 5% --format json")
        alone = json.loads(invoke("compare a0.jsonl b0.jsonl --format json").stdout)["tables"][0]["rows"][0]
    (table, _) = json.loads(result.stdout)["tables"]
    (row,) = table["rows"]
    assert (row["verdict"], row["a_runs"], row["b_runs"]) == ("differs: slower", 4, 4)
    assert table["notes"][1] == (
        "the noise is the spread between runs of one side; compare in the documentation says how many it needs"
    )
    assert (result.exit_code, result.stderr) == (1, "regression: the cell: step_ms is 19.9 % slower\n")
    assert alone["verdict"] == "undecided"


def test_runs_of_other_code_are_left_out_and_it_is_said():
    old, new = (
        {"cells": [small(ms)], "run_id": name, "source_digest": name} for name, ms in (("old", 100), ("new", 50))
    )
    with files(old=old, new=new):
        both = "".join(Path(f"{name}.jsonl").read_text() for name in ("old", "new"))
        Path("both.jsonl").write_text(both)
        result = invoke("compare old.jsonl both.jsonl --format json")
    row = json.loads(result.stdout)["tables"][0]["rows"][0]
    assert (row["ratio"], row["b_runs"]) == (0.5, 1)
    assert result.stderr == "warning: B holds 1 cell of other code or another machine than its last: left out\n"


@pytest.mark.parametrize("value", ["0.0", "1e308", "5e-324", str(10**400), "-1.0", "[" * 5000])
def test_samples_that_are_no_times_cost_their_cell_and_never_pass(value):
    """Zeros were "differs: faster", and passed under --fail-above; the others were tracebacks."""
    cells = [small(10), cell("medium", step=times(*[123.5] * 5))]
    with files(a=cells, b=cells):
        text = Path("b.jsonl").read_text()
        assert text.count("123.5") == 5
        Path("b.jsonl").write_text(text.replace("123.5", value))
        result = invoke("compare a.jsonl b.jsonl --fail-above 5%")
    assert result.exit_code == 1
    assert re.search(r"(?m)^warning: .*b\.jsonl: line 3 is .*, and passed over$", result.stderr)
    assert "size medium: only A has it" in result.stderr
    assert "small" in result.stdout


if __name__ == "__main__":
    write_figures(PATH, globals())
