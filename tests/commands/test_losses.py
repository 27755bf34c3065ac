"""``losses`` as a user runs it, on the CPU."""

import pytest
import torch
import typer
from run_commands import invoke, tables

from cs336sys.commands.losses.measure import measure_losses
from cs336sys.results.model import configuration_key
from cs336sys.settings.profiling import LossWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

# Where kernels run: on a CPU in the interpreter, where there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LOSSES = "losses --device cpu --size tiny --context 4 --batch-size 1 --vocab-size 256"
LOSSES += " --num-layers 1 --d-model 16 --d-ff 32 --num-heads 2"


def test_curves_of_two_ways(tmp_path):
    text = tmp_path / "texts"
    text.mkdir()
    (text / "a.md").write_text("a text of few words, again and again. " * 20)
    (text / "picture.png").write_bytes(b"\xff" * 100)
    picture = tmp_path / "losses.svg"
    saved = tmp_path / "losses.jsonl"
    options = ["--steps 30 --learning-rate 0.01 --precision fp32,bf16 --format json --text", text]
    (table,) = tables(invoke(LOSSES, options, "--plot", picture, "--save", saved)).values()
    first, second = table["rows"]
    assert first["first_loss"] == pytest.approx(5.55, abs=0.5)
    assert first["last_loss"] < first["first_loss"]
    assert "mean_difference" not in first or first["mean_difference"] is None
    assert 0 < second["largest_difference"] < 0.2
    assert abs(second["mean_difference"]) <= second["largest_difference"]
    assert "precision bf16" in picture.read_text()

    assert tables(invoke("show", saved, "--format json"))["losses"]["rows"] == table["rows"]


def test_wrong_kernel_is_found_before_training(tmp_path, monkeypatch):
    text = tmp_path / "a.md"
    text.write_text("a text of few words, again and again. " * 20)
    size = choose_size("tiny", context=4, batch_size=1, vocab_size=256, num_layers=1, d_model=16, d_ff=32, num_heads=2)
    training = Workload(size, device=DEVICE.type, warmup=0, steps=2, kernels="fused")
    configuration = LossWorkload(training, str(text)).configuration()
    outcome = measure_losses(configuration, lambda stage: None)
    assert outcome.status == "ok", outcome.reason
    assert outcome.derived["notes"][0].startswith("checked first, 1 block against PyTorch's operations")
    monkeypatch.setattr("cs336sys.kernels.fuse.swiglu", lambda gate, up: 2 * gate * up)
    monkeypatch.setattr("cs336sys.parity.step._checked_few_blocks", {})
    outcome = measure_losses(configuration, lambda stage: None)
    assert outcome.status == "wrong"
    assert outcome.reason.startswith("with our kernels: after 5 steps ")


def test_another_text_in_the_same_file_is_no_cell_to_resume(tmp_path, monkeypatch):
    asked_for = []

    def only_asked(command, measure, configurations, sweeping):
        asked_for.append([configuration_key(configuration) for configuration in configurations])
        raise typer.Exit

    monkeypatch.setattr("cs336sys.commands.losses.options.run_sweep", only_asked)
    text = tmp_path / "text.md"
    for content in ("one text of these two", "one text of these two", "another text, which is longer"):
        text.write_text(content)
        assert invoke(LOSSES, "--text", text).exit_code == 0
    first, again, other = asked_for
    assert first == again != other
