"""The examples of docs/examples, run as their first lines say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import run_scripts
from two_agents import run_two_ranks

from cs336sys import compare, read

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"


def run(*command, **settings):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, **settings)


TRAINING = [("train_ddp", "step 20: loss 0."), ("train_fsdp", "saved and loaded")]


@pytest.mark.parametrize(("example", "last"), TRAINING)
def test_training_example_runs_on_two_ranks(example, last, tmp_path, monkeypatch):
    # There may be one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = run_two_ranks(EXAMPLES / f"{example}.py", folder=tmp_path)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert first.stdout.splitlines()[-1].startswith(last)


def test_own_attention_stands_beside_ours(tmp_path):
    (done,) = run_scripts(EXAMPLES / "own_kernel.py", folder=tmp_path)
    assert done.exit_code == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "own_kernel.py:attention" in line]
    assert "ok" in row


def test_steps_of_a_trainer_are_shown_and_compared(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for name in ("first", "second"):
        done = run(EXAMPLES / "trainer_callback.py", f"{name}.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (row,) = read(tmp_path / "first.jsonl")
    assert row["tokens_per_s"] == pytest.approx(64 * 1000 / row["step_ms_mean"])
    assert compare(tmp_path / "first.jsonl", tmp_path / "second.jsonl").ok


@pytest.mark.nightly
def test_gate_compares_a_checkout_with_itself():
    done = run(
        EXAMPLES / "ci_gate.py", ROOT, ROOT, "--size", "tiny", "--context", "32", "--steps", "5", "--mode", "forward"
    )
    # A shared machine may be slower in one half: either verdict, but a verdict.
    assert done.returncode in (0, 1), done.stderr
    assert "forward" in done.stdout


@pytest.mark.nightly
def test_notebook_runs_from_top_to_bottom(tmp_path):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n".join(code))
    done = run(tmp_path / "notebook.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "after.png").is_file()
