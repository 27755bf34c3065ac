"""``compare`` as a user runs it: tables, and what ``--fail-above`` says; ``compared.txt`` has pairs of small files."""

import contextlib
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

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


def runs(side, factor=1.0):
    """Return four files of a process each: the noise is what these differ by, and two samples of each are enough."""
    levels = (factor * level for level in (98, 100, 101, 102))
    return {
        f"{side}{number}": {"cells": [cell("small", step=times(level, level + 1))], "run_id": f"{side}{number}"}
        for number, level in enumerate(levels)
    }


def of_code(name, median_ms):
    return {"cells": [small(median_ms)], "run_id": name, "source_digest": name}


def printed(options, joined=(), **saved):
    """Return what a comparison of these files prints, also where scipy is not installed; the last may be two joined."""
    with files(**saved), mock.patch.dict(sys.modules, scipy=None):
        if joined:
            Path("both.jsonl").write_text("".join(Path(f"{name}.jsonl").read_text() for name in joined))
        result = invoke("compare", options)
    return [result.exit_code, *result.stdout.splitlines(), *result.stderr.splitlines()]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_comparisons_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


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
