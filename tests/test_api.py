"""The commands as functions, as a notebook or a script calls them."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_processes import run_scripts
from typer.testing import CliRunner

import cs336sys.api
from cs336sys import Interrupted, account, bench, compare, ddp, flash, read
from cs336sys.cli import app
from cs336sys.errors import INTERRUPTED, UsageError
from cs336sys.results.recording import record
from cs336sys.settings.sizes import choose_size

ROOT = Path(__file__).parent.parent


def model_of_this_file(size):
    raise NotImplementedError


MEASURED = {"device": "cpu", "batch_size": 2, "context": 16, "mode": "forward", "steps": 1, "warmup": 1}


@pytest.fixture(scope="module")
def measured():
    return bench("tiny", **MEASURED)


def test_results_are_those_of_the_command(measured, tmp_path, capsys):
    path = tmp_path / "saved.jsonl"
    measured.save(path)
    for format in ("markdown", "json"):
        shown = CliRunner().invoke(app, ["show", str(path), "--format", format])
        text = measured.table() if format == "markdown" else json.dumps(measured.to_dict())
        assert shown.stdout == text if format == "markdown" else json.loads(shown.stdout) == json.loads(text)
    again = read(path)
    assert (again.table(), again.cells, again.runs) == (measured.table(), measured.cells, measured.runs)
    assert measured.ok
    assert [cell.status for cell in measured.cells] == ["ok"]
    assert measured.runs[0].arguments[:2] == ("bench", "--size=tiny")
    assert "<table>" in measured._repr_html_()
    assert "tiny" in measured._repr_html_()
    measured.plot(tmp_path / "saved.png")
    assert (tmp_path / "saved.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


def test_user_file_is_appended_to_and_only_new_cells_are_returned(measured, tmp_path):
    path = tmp_path / "saved.jsonl"
    measured.save(path)
    again = bench("tiny", **MEASURED, save=path)
    assert [len(cells) for cells in (again.cells, read(path).cells)] == [1, 2]
    assert read(path).cells == (*measured.cells, *again.cells)


def test_interruption_leaves_what_was_measured(measured, monkeypatch):
    def main(command, line, **settings):
        record(measured.runs[0], *measured.cells)
        return INTERRUPTED

    monkeypatch.setattr("cs336sys.cli.CommandTable.main", main)
    with pytest.raises(Interrupted) as stopped:
        bench("tiny")
    assert stopped.value.results.cells == measured.cells
    assert isinstance(stopped.value, KeyboardInterrupt)


def test_results_are_rows_and_columns(measured):
    assert len(measured) == 1
    (row,) = measured
    step = measured.cells[0].samples["step"]
    assert measured["step_ms"] == [row["step_ms_mean"]] == [step.mean]
    assert (row["batch_size"], row["steps"], row["device"]) == (2, 1, "cpu")
    assert (row["torch"], row["run_id"]) == (torch.__version__, measured.runs[0].run_id)
    assert repr(measured) == measured.table("table")
    assert "<figure><img" in measured.plot()._repr_html_()
    for column, sentence in (("peak_gb", "'peak_gb'; did you mean peak_gib"), (0, "0")):
        with pytest.raises(KeyError, match=f"no column {sentence}"):
            measured[column]


def test_numbers_of_numpy_and_ranges_are_lists(measured):
    plan = bench("tiny", device="cpu", dry_run=True, context=range(16, 33, 16), batch_size=np.array([1, 2]))
    assert (plan["context"], plan["batch_size"]) == ([16, 16, 32, 32], [1, 2, 1, 2])
    assert bench("tiny", device="cpu", dry_run=True, num_layers=np.int64(1))["num_layers"] == [1]


def test_one_argument_without_a_name_is_taken():
    with pytest.raises(TypeError, match=r"bench\(\) got size twice: without a name, and as size="):
        bench("tiny", size="small")
    with pytest.raises(TypeError, match="takes one argument"):
        bench("tiny", "small")


def stub():
    """The text of ``cs336sys/__init__.pyi``: the signatures that the functions have."""
    lines = [
        "# Written by: CS336SYS_WRITE_DOCS=1 pytest tests/test_api.py -k stub",
        "# fmt: off",
        "from collections.abc import Callable, Iterable",
        "from pathlib import Path",
        "from typing import Any",
        "",
        *(
            f"from cs336sys.api import {name} as {name}"
            for name in ("Interrupted", "Results", "Tables", "account", "compare", "read")
        ),
        "from cs336sys.commands.verify.library import verify as verify",
        "",
        "__version__: str",
        "",
    ]
    for name in sorted({*cs336sys.api.FUNCTIONS} - {"kernels"}):
        signature = inspect.signature(getattr(cs336sys.api, name)).replace(return_annotation=inspect.Signature.empty)
        text = re.sub(r"(collections\.abc|pathlib|typing)\.", "", f"def {name}{signature}").removesuffix(")")
        lines += [*textwrap.wrap(text, 116, subsequent_indent="    ", break_on_hyphens=False), ") -> Results: ..."]
    return "\n".join(lines) + "\n"


def test_stub_has_the_signatures_of_the_functions():
    path = ROOT / "cs336sys" / "__init__.pyi"
    if os.environ.get("CS336SYS_WRITE_DOCS"):
        path.write_text(stub())
    assert path.read_text() == stub()


def test_directory_of_the_package_lists_its_functions():
    names = set(dir(cs336sys))
    assert {*cs336sys.api.FUNCTIONS} - {"kernels"} <= names
    assert names - {*cs336sys.api.FUNCTIONS} == {
        *("account", "compare", "read", "verify"),
        *("Interrupted", "Results", "Tables"),
    }
    assert all(callable(getattr(cs336sys, name)) for name in names)


def test_comparison_takes_results_and_files(measured, tmp_path):
    measured.save(tmp_path / "saved.jsonl")
    found = compare(measured, tmp_path / "saved.jsonl")
    assert found.ok
    assert found.to_dict()["tables"][0]["name"]
    assert compare(measured, measured, fail_above="5%").ok, "results against themselves"


def test_account_and_plans_are_the_commands_tables():
    for answer, line in (
        (account("memory", size="xl", world_size=2), "account memory --size xl --world-size 2"),
        (bench(["tiny"], device="cpu", dry_run=True), "bench --size tiny --device cpu --dry-run"),
    ):
        assert answer.table() == CliRunner().invoke(app, line.split()).stdout


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bench("tinny"), "did you mean tiny"),
        (lambda: bench("tiny", precison="bf16"), "no such option: precison; did you mean precision?"),
        (lambda: bench("tiny", device=["cpu", "cuda"]), "takes one value"),
        (lambda: bench("tiny", dry_run="yes"), "must be True or False"),
        (lambda: bench("tiny", cuda_graph=True), "cuda_graph=True: takes a value"),
        (lambda: bench("tiny", save="a.jsonl", resume=True), "resume with cs336sys bench"),
        (lambda: ddp(lambda: None), "give 'FILE.py:NAME'"),
        (lambda: ddp(torch.nn.Linear(1, 1)), "a Linear that worker processes cannot find by name"),
        (lambda: bench(torch.nn.Linear(1, 1), cell_timeout=5.0), "--cell-timeout 5: needs processes of its own"),
        (lambda: account("memry"), "did you mean memory"),
    ],
)
def test_refusal_is_one_sentence(call, sentence):
    with pytest.raises(UsageError, match=sentence.replace("?", r"\?").replace("(", r"\(")) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert (refused.value.__cause__, refused.value.__suppress_context__) in ((None, True), (None, False))
    frames = [frame.filename for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert not any("typer" in file or "/commands/" in file for file in frames)


def test_function_of_a_file_is_named():
    plan = bench(model_of_this_file, dry_run=True, wide=False, device="cpu", context=8)
    assert (plan["model"], plan["context"]) == ([f"{__file__}:model_of_this_file"], [8])


def test_script_without_a_main_guard_is_refused_in_its_worker(monkeypatch):
    monkeypatch.setenv("_CS336SYS_MEASURING", "1")
    with pytest.raises(UsageError, match="if __name__ == '__main__'"):
        bench("tiny")


def test_import_is_small():
    script = (
        "import sys; before = set(sys.modules); import cs336sys; added = set(sys.modules) - before;"
        "print(len([one for one in added if one.startswith('cs336sys')]));"
        "from cs336sys import bench; print('torch' in sys.modules, bench.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "False", "bench"]


def test_example_of_the_page_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "api.md").read_text()
    example = page.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    (done,) = run_scripts(tmp_path / "example.py", folder=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("### bench")
    assert (tmp_path / "bench.jsonl").exists()


def layers(count, size):
    blocks = [torch.nn.Linear(size.d_model, size.d_model) for _ in range(count)]
    return torch.nn.Sequential(
        torch.nn.Embedding(size.vocab_size, size.d_model), *blocks, torch.nn.Linear(size.d_model, size.vocab_size)
    )


SHORT = {"context": 16, "batch_size": 2, "warmup": 1, "steps": 2, "device": "cpu"}


def test_objects_without_a_name_are_measured_in_this_process(capsys):
    count, built_in = 2, []

    def build(size):
        built_in.append(os.getpid())
        return layers(count, size)

    results = bench(build, **SHORT)
    assert [cell.status for cell in results.cells] == ["ok"]
    assert set(built_in) == {os.getpid()}
    assert results.runs[0].machine["torch"] == torch.__version__
    assert "it is measured in this process" in capsys.readouterr().err
    # The same object is the same configuration.
    again = bench(build, **SHORT)
    assert [cell.configuration for cell in again.cells] == [cell.configuration for cell in results.cells]
    assert bench(lambda size: layers(1, size), **SHORT).cells[0].configuration != results.cells[0].configuration


def test_a_copy_of_a_built_module_is_trained():
    module = layers(1, choose_size("tiny"))
    before = [parameter.clone() for parameter in module.parameters()]
    assert bench(module, **SHORT, precision=["fp32", "bf16"]).ok
    assert all(torch.equal(now, was) for now, was in zip(module.parameters(), before, strict=True))


def test_failure_in_this_process_is_a_cell():
    def fail(size):
        raise ZeroDivisionError("mine")

    (cell,) = bench(fail, **SHORT).cells
    assert cell.status == "error"
    assert re.fullmatch(r"test_api.py, line \d+: ZeroDivisionError: mine", cell.reason), cell.reason


def test_own_kernel_may_be_a_closure():
    scale = 1.0

    def attention(query, key, value, is_causal):
        return scale * torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    settings = {"context": 32, "num_heads": 2, "head_dim": 8, "dtype": "fp32", "device": "cpu", "repetition_ms": 2}
    cells = flash(kernel=attention, implementation="eager", **settings).cells
    assert [cell.status for cell in cells] == ["ok", "ok"]
