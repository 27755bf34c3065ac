"""The commands as functions, as a notebook or a script calls them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_processes import run_scripts
from typer.testing import CliRunner

import cs336sys.api
from cs336sys import Interrupted, Results, account, bench, compare, ddp, flash, read, tune
from cs336sys.cli import app
from cs336sys.errors import INTERRUPTED, UsageError
from cs336sys.sizes import choose_size

ROOT = Path(__file__).parent.parent

SCRIPT = """
from pathlib import Path
from typing import Any

import cs336sys
from cs336sys import Interrupted, Results, Tables, account, allreduce, api, bench, compare, ddp, flash, memprof, read
from cs336sys import shard, trace, tune, verify


def build(size: Any) -> Any:
    raise NotImplementedError


def measure(folder: Path) -> list[Results]:
    return [
        bench("tiny", precision=["fp32", "bf16"], steps=2, percentiles=[50, 90.5]),
        bench(build, device="cpu"),
        memprof(["tiny"], dry_run=True),
        flash(context=512, causal=True),
        api.kernels(op="rms-norm"),
        allreduce(world_size=2),
        ddp("tiny", plot=folder / "ddp.png"),
        shard("tiny", strategy=("fsdp", "tensor")),
        tune("tiny", measure=None),
        trace([folder / "a.json", folder / "b.json"], top=3),
        read(folder / "saved.jsonl"),
    ]


def show(results: Results, other: Results) -> Tables:
    print(cs336sys.__version__, results, results.table("csv"), results.to_dict()["tables"], results.ok)
    print(results.to_pandas("bench"), results._repr_html_(), [cell.status for cell in results.cells])
    results.save("saved.jsonl")
    results.plot(Path("saved.png"))
    try:
        print(account("memory", size="xl"), verify("mine.py:wrap", world_size=2).ok)
    except Interrupted as stop:
        print(stop.results.runs[0].machine)
    return compare(results, other, fail_above="5%")
"""


def model_of_this_file(size):
    raise NotImplementedError


@pytest.fixture(scope="module")
def measured():
    return bench("tiny", device="cpu", batch_size=2, context=16, mode="forward", steps=1, warmup=1)


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
    # As a reader could run it again: without the temporary file.
    assert measured.runs[0].arguments[:2] == ("bench", "--size=tiny")
    assert not any("--save" in argument for argument in measured.runs[0].arguments)
    assert "<table>" in measured._repr_html_()
    assert "tiny" in measured._repr_html_()
    measured.plot(tmp_path / "saved.png")
    assert (tmp_path / "saved.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


def test_user_file_is_appended_to_and_only_new_cells_are_returned(measured, tmp_path, monkeypatch):
    path = tmp_path / "saved.jsonl"
    measured.save(path)

    def main(command, line, **settings):
        assert f"--save={path}" in line
        measured_again.save(path)
        return 0

    run = cs336sys.api.replace(measured.runs[0], run_id="later")
    cell = cs336sys.api.replace(measured.cells[0], run_id="later")
    measured_again = Results(measured.tables, True, (cell,), (run,))
    monkeypatch.setattr("cs336sys.cli.CommandTable.main", main)
    assert bench("tiny", save=path).cells == (cell,)


def test_interruption_leaves_what_was_measured(measured, monkeypatch):
    def main(command, line, **settings):
        path = Path(next(one for one in line if one.startswith("--save=")).removeprefix("--save="))
        measured.save(path)
        return INTERRUPTED

    monkeypatch.setattr("cs336sys.cli.CommandTable.main", main)
    with pytest.raises(Interrupted) as stopped:
        bench("tiny")
    assert stopped.value.results.cells == measured.cells
    assert isinstance(stopped.value, KeyboardInterrupt)


def test_comparison_takes_results_and_files(measured, tmp_path):
    measured.save(tmp_path / "saved.jsonl")
    found = compare(measured, tmp_path / "saved.jsonl")
    assert found.ok
    assert found.to_dict()["tables"][0]["name"]
    assert not compare(measured, measured, fail_above="5%").ok, "one sample a side is undecided"


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
        (lambda: bench("tiny", precison="bf16"), "no such option: --precison; did you mean --precision?"),
        (lambda: bench("tiny", interleave="attention"), "give --attention two values or more"),
        (lambda: bench("tiny", device=["cpu", "cuda"]), "takes one value"),
        (lambda: bench("tiny", dry_run="yes"), "must be True or False"),
        (lambda: bench("tiny", cuda_graph=True), "--cuda-graph takes a value"),
        (lambda: bench("tiny", save="a.jsonl", resume=True), "resume with cs336sys bench"),
        (lambda: ddp(lambda: None), "give 'FILE.py:NAME'"),
        (lambda: ddp(torch.nn.Linear(1, 1)), "a Linear that worker processes cannot find by name"),
        (lambda: bench(torch.nn.Linear(1, 1), cell_timeout=5.0), "--cell-timeout 5: needs processes of its own"),
        (lambda: account("memry"), "did you mean memory"),
        (lambda: tune("tiny", save="a.jsonl"), "add --measure"),
    ],
)
def test_refusal_is_one_sentence(call, sentence):
    with pytest.raises(UsageError, match=sentence.replace("?", r"\?").replace("(", r"\(")) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_function_of_a_file_is_named():
    assert cs336sys.api._arguments({"model": model_of_this_file}, "bench") == [f"--model={__file__}:model_of_this_file"]


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
    assert done.stdout.split() == ["1", "False", "bench"]


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


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_user_script_is_typed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"],
        cwd=tmp_path,
        # mypy does not see editable installations.
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
