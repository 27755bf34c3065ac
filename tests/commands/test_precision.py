"""``precision`` as a user runs it: the sums are the handout's, and the dtypes those of the run itself."""

from functools import partial

import pytest
import torch
from run_commands import invoke, tables

from cs336sys.commands.precision.measure import ToyModel, accumulate, autocast_dtypes
from cs336sys.errors import CapabilityError

precision = partial(invoke, "precision")


def test_saved_cells_are_shown_as_they_were_printed(tmp_path):
    printed = precision("--device cpu --save", tmp_path / "p.jsonl")
    assert printed.exit_code == 0, printed.output
    assert invoke("show", tmp_path / "p.jsonl").stdout == printed.stdout


def test_a_file_that_cannot_be_appended_to_is_found_first(tmp_path):
    (tmp_path / "p.jsonl").write_text("notes\n")
    result = precision("--device cpu --save", tmp_path / "p.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it holds something else" in result.stderr


def test_device_that_cannot_run_a_cell_gives_a_row_with_the_reason(monkeypatch):
    linear = torch.nn.functional.linear

    def without_half(*arguments):
        if torch.get_autocast_dtype("cpu") == torch.float16:
            raise RuntimeError("not implemented for 'Half'\nmore")
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", without_half)
    _, dtypes = tables(precision("--device cpu --format json")).values()
    rows = dtypes["rows"]
    assert [row["status"] for row in rows] == ["unsupported", "unsupported", "ok", "ok"]
    assert (rows[0]["reason"], rows[0]["logits"]) == ("not implemented for 'Half'", None)


@pytest.mark.gpu
def test_on_the_gpu_by_default():
    _, dtypes = tables(precision("--format json")).values()
    assert torch.cuda.get_device_name() in dtypes["title"]
    assert {row["layer_norm"] for row in dtypes["rows"]} == {"fp32"}


@pytest.mark.gpu
def test_sums_are_those_of_the_handouts_code():
    sums = accumulate(torch.device("cuda"))
    assert [round(total, 4) for total in sums.values()] == [10.0001, 9.9531, 10.0021, 10.0021]


def test_toy_model_is_the_handouts():
    shapes = {name: tuple(parameter.shape) for name, parameter in ToyModel(20, 5).named_parameters()}
    assert shapes == {"fc1.weight": (10, 20), "ln.weight": (10,), "ln.bias": (10,), "fc2.weight": (5, 10)}
    model, x = ToyModel(20, 5), torch.randn(3, 20)
    assert torch.equal(model(x), model.fc2(model.ln(model.fc1(x).relu())))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_dtypes_on_cuda(precision):
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    halves = dict.fromkeys(("fc1", "logits", "loss_outside"), precision)
    floats = dict.fromkeys(("parameters", "layer_norm", "loss", "gradients"), "fp32")
    expected = {**halves, **floats, "rms_norm": "fp32" if version >= (2, 12) else precision}
    assert autocast_dtypes(precision, "cross-entropy", torch.device("cuda")) == expected


def test_autocast_that_torch_switches_off_is_unsupported_not_fp32(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    with pytest.raises(CapabilityError, match=r"^torch .* does not autocast to torch\.float16 on cpu$"):
        autocast_dtypes("fp16", "mse", torch.device("cpu"))
