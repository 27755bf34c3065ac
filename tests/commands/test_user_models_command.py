"""Models of the user's in commands, as a user runs them."""

import json
from pathlib import Path

import pytest
import torch
from run_commands import invoke, tables

FILE = Path(__file__).parents[1] / "user_models.py"
TINY = "--size tiny --device cpu --batch-size 2 --context 16 --steps 1 --warmup 1 --format json"


@pytest.mark.parametrize("command", ["bench", "nsys", "ddp", "shard"])
def test_a_plan_says_who_knows_the_memory_of_a_users_model(command):
    (table,) = tables(invoke(command, TINY, f"--dry-run --model {FILE}:ours")).values()
    assert table["rows"][0]["model"] == f"{FILE}:ours"
    assert any("memprof --model" in note for note in table["notes"])


def doctor(*arguments):
    result = invoke("doctor --format json", arguments)
    (table,) = json.loads(result.stdout)["tables"]
    return result.exit_code, {row["name"]: row for row in table["rows"]}


def test_doctor_says_what_each_command_can_do_with_a_model():
    code, rows = doctor(f"--model {FILE}:Classifier --batch {FILE}:images --loss {FILE}:classes")
    assert code == 0
    assert rows["blocks"]["found"] == "4 of ResidualBlock: stages.0.0 to stages.1.1"
    assert rows["attention"]["verdict"] == "warn"
    assert rows["compiles"]["found"] == "the whole model, in one graph"
    assert rows["initial values"]["found"] == "layer by layer, from the meta device"
    assert rows["batch norm"]["verdict"] == "ok"
    assert {"bench", "nsys", "memprof", "ddp", "shard"} <= rows.keys()


def test_doctor_says_that_nothing_is_compiled(tmp_path):
    model = tmp_path / "mine.py"
    model.write_text(
        "from torch import nn\n"
        "class Plain(nn.Sequential):\n"
        "    def forward(self, tokens):\n"
        "        return self[2](self[1](self[0](tokens))[0])\n"
        "def build(size):\n"
        "    lstm = nn.LSTM(32, 32, batch_first=True)\n"
        "    return Plain(nn.Embedding(size.vocab_size, 32), lstm, nn.Linear(32, size.vocab_size))\n"
    )
    _, rows = doctor("--model", f"{model}:build")
    assert rows["compiles"]["found"] == "nothing: torch.compile leaves the model as it is"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_doctor_compiles_no_interpreter():
    """It warned of an InterpreterError and said to choose --compile off."""
    _, rows = doctor("--model", f"{FILE.with_name('triton_model.py')}:Doubled")
    assert (rows["compiles"]["verdict"], rows["compiles"]["found"].partition(":")[0]) == ("ok", "not tried")
    assert "double_kernel" in rows["compiles"]["found"]


def test_doctor_names_a_line_that_waits():
    _, rows = doctor("--model", f"{FILE}:Synchronizing")
    assert "tests/user_models.py:" in rows["waits"]["found"]
    assert rows["bench"]["found"] == "all, but --cuda-graph on"


IN_PLACE_LINE = FILE.read_text().splitlines().index("        weights.add_(1)") + 1


@pytest.mark.parametrize(
    ("model", "check", "sentence"),
    [
        ("missing", "imports", "has no missing; it has "),
        ("raises", "trains", "KeyError: 'no such size'"),
        ("leaves", "trains", "SystemExit: 7"),
        ("no_module", "trains", "returned a list"),
        ("no_parameters", "trains", "without parameters to train"),
        ("OfTheLastToken", "trains", "logits of shape (2, 1, 10000)"),
        ("InPlace", "trains", f"user_models.py, line {IN_PLACE_LINE} changes a tensor in place that the backward pass"),
    ],
)
def test_doctor_ends_at_what_is_wrong(model, check, sentence):
    code, rows = doctor("--model", f"{FILE}:{model}")
    assert code == 3
    last = list(rows.values())[-1]
    assert (last["name"], last["verdict"]) == (check, "missing")
    assert sentence in last["found"]
    assert "page your_model" in last["fix"]


def test_doctor_names_the_line_of_a_neighbouring_module_that_changes_in_place(tmp_path):
    """It named the line of the caller, or none: the module was in another file than the one that is named."""
    (tmp_path / "gating.py").write_text(
        "import torch\n"
        "def gate(x):\n"
        "    gates = torch.sigmoid(x)\n"
        "    early = x * 2\n"
        "    early += 1\n"
        "    torch.nn.functional.relu(gates, inplace=True)\n"
        "    return early * gates\n"
    )
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "from gating import gate\n"
        "class Model(nn.Sequential):\n"
        "    def forward(self, tokens):\n"
        "        return self[1](gate(self[0](tokens)))\n"
        "def build(size):\n"
        "    return Model(nn.Embedding(size.vocab_size, 8), nn.Linear(8, size.vocab_size))\n"
    )
    code, rows = doctor("--model", f"{tmp_path}/mine.py:build")
    assert code == 3
    assert rows["trains"]["found"].startswith("gating.py, line 6 changes a tensor in place")


def test_doctor_warns_of_what_is_never_trained():
    code, rows = doctor("--model", f"{FILE}:InAList", "--loss", f"{FILE}:of_nothing")
    assert code == 0
    assert (rows["trains"]["verdict"], rows["parameters"]["verdict"]) == ("warn", "warn")
    assert "losses nan, nan, nan" in rows["trains"]["found"]
    assert (
        "4 tensors that require gradients (blocks.0.weight, blocks.0.bias, blocks.1.weight, ...)"
        in rows["parameters"]["found"]
    )


@pytest.mark.parametrize(
    "command",
    ["bench", "nsys", "memprof", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ddp", "shard"))],
)
def test_a_loss_that_is_no_number_is_a_warning_and_a_note(command):
    """And so are blocks in a list."""
    ranks = {"ddp": "--mode naive --world-size 1", "shard": "--strategy fsdp --world-size 1"}
    result = invoke(command, TINY, ranks.get(command, ""), f"--model {FILE}:InAList --loss {FILE}:of_nothing")
    loss = f"warning: {FILE}:InAList: the loss is nan: the measured steps train nothing"
    hidden = f"warning: {FILE}:InAList: 4 tensors that require gradients (blocks.0.weight, "
    assert loss in result.stderr
    assert hidden in result.stderr
    notes = [note for table in tables(result).values() for note in table["notes"]]
    assert loss in notes
    assert any(note.startswith(hidden) for note in notes)
