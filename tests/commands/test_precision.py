"""``precision`` as a user runs it: the sums are the handout's, and the dtypes those of the run itself."""

from functools import partial

import pytest
import torch
from run_commands import invoke, tables

from cs336sys.commands.precision.measure import autocast_dtypes
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
