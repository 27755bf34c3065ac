"""Models of the user's in commands, as a user runs them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app

pytestmark = pytest.mark.usefixtures("kept_workers")

FILE = Path(__file__).parents[1] / "user_models.py"
TINY = ["--size", "tiny", "--device", "cpu", "--batch-size", "2", "--context", "16", "--steps", "1", "--warmup", "1"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def mine(tmp_path):
    """A file of the user's, with a model that does not depend on anything."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def build(size):\n"
        "    if size.context > 16:\n"
        "        raise ValueError('too long')\n"
        "    return nn.Sequential(nn.Embedding(size.vocab_size, 8), nn.Linear(8, size.vocab_size))\n"
    )
    return tmp_path / "mine.py"


def test_a_sweep_goes_on_after_a_model_that_fails_and_measures_an_edited_one_again(mine):
    arguments = ["bench", *TINY, "--context", "16,32", "--model", f"{mine}:build", "--format", "json"]
    arguments += ["--save", mine.with_name("r.jsonl"), "--resume"]
    result = invoke(*arguments)
    assert result.exit_code == 1
    (table, *_) = json.loads(result.stdout)["tables"]
    assert [(row["context"], row["status"]) for row in table["rows"]] == [(16, "ok"), (32, "error")]
    assert table["rows"][0]["parameters"] == 8 * 10_000 + 8 * 10_000 + 10_000
    # The gradients of the embedding are no product.
    assert table["rows"][0]["tflops"] == pytest.approx(6e-9 * 32 * 80_000 / table["rows"][0]["step_ms_mean"])
    assert f"model {mine}:build, code " in table["title"]
    assert "error: mine.py, line 5: ValueError: too long" in table["notes"]
    assert "Traceback" not in result.stderr
    again = invoke(*arguments[:-1], "--resume", "--context", "16")
    assert "1 of 2 cells" in again.stderr or again.stderr.count("ok") < 2, again.stderr
    saved = mine.with_name("r.jsonl").read_text().count('"kind": "cell"')
    mine.write_text(mine.read_text() + "# edited\n")
    invoke(*arguments)
    assert mine.with_name("r.jsonl").read_text().count('"kind": "cell"') == saved + 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gone.py:build"], "error: --model 'gone.py:build': there is no file gone.py\n"),
        (["--optimizer", "gone.py:adam"], "error: --optimizer 'gone.py:adam': 'gone.py:adam': there is no file"),
        (["--batch", f"{FILE}:images"], "is about a model of yours; give --model, too\n"),
        (["--model", f"{FILE}:ours", "--kernels", "fused"], "error: --kernels fused takes the place of modules"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments, sentence):
    result = invoke("bench", *TINY, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize("command", ["bench", "nsys", "ddp", "shard"])
def test_a_plan_says_who_knows_the_memory_of_a_users_model(command):
    result = invoke(command, *TINY, "--model", f"{FILE}:ours", "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["tables"]
    assert table["rows"][0]["model"] == f"{FILE}:ours"
    assert any("memprof --model" in note for note in table["notes"])


def doctor(*arguments):
    result = invoke("doctor", "--format", "json", *arguments)
    (table,) = json.loads(result.stdout)["tables"]
    return result.exit_code, {row["name"]: row for row in table["rows"]}


def test_doctor_says_what_each_command_can_do_with_a_model():
    code, rows = doctor("--model", f"{FILE}:Classifier", "--batch", f"{FILE}:images", "--loss", f"{FILE}:classes")
    assert code == 0
    assert rows["blocks"]["found"] == "4 of ResidualBlock: stages.0.0 to stages.1.1"
    assert rows["attention"]["verdict"] == "warn"
    assert rows["compiles"]["found"] == "the whole model, in one graph"
    assert rows["initial values"]["found"] == "layer by layer, from the meta device"
    assert rows["batch norm"]["verdict"] == "ok"
    assert {"bench", "nsys", "memprof", "ddp", "shard"} <= rows.keys()


def test_doctor_names_a_line_that_waits():
    _, rows = doctor("--model", f"{FILE}:Synchronizing")
    assert "tests/user_models.py:" in rows["waits"]["found"]
    assert rows["bench"]["found"] == "all, but --cuda-graph on"


@pytest.mark.parametrize(
    ("model", "check", "sentence"),
    [
        ("missing", "imports", "has no missing; it has "),
        ("raises", "trains", "KeyError: 'no such size'"),
        ("no_module", "trains", "returned a list"),
        ("no_parameters", "trains", "without parameters to train"),
        ("OfTheLastToken", "trains", "logits of shape (2, 1, 10000)"),
        ("InPlace", "trains", "computes is changed in place: one of the variables needed"),
    ],
)
def test_doctor_ends_at_what_is_wrong(model, check, sentence):
    code, rows = doctor("--model", f"{FILE}:{model}")
    assert code == 3
    last = list(rows.values())[-1]
    assert (last["name"], last["verdict"]) == (check, "missing")
    assert sentence in last["found"]
    assert "docs/your_model.md" in last["fix"]
