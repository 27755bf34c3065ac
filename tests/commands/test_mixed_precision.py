"""The sums are the handout's, and the dtypes those of the run itself."""

import pytest
import torch

from cs336sys.commands.precision.measure import ToyModel, accumulate, autocast_dtypes
from cs336sys.errors import CapabilityError

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_are_those_of_the_handouts_code(device):
    sums = accumulate(torch.device(device))
    assert [round(total, 4) for total in sums.values()] == [10.0001, 9.9531, 10.0021, 10.0021]


def test_toy_model_is_the_handouts():
    shapes = {name: tuple(parameter.shape) for name, parameter in ToyModel(20, 5).named_parameters()}
    assert shapes == {"fc1.weight": (10, 20), "ln.weight": (10,), "ln.bias": (10,), "fc2.weight": (5, 10)}
    model, x = ToyModel(20, 5), torch.randn(3, 20)
    assert torch.equal(model(x), model.fc2(model.ln(model.fc1(x).relu())))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("loss_function", "loss_outside"), [("cross-entropy", None), ("mse", "fp32")])
def test_dtypes_on_the_cpu(precision, loss_function, loss_outside):
    # CPU autocast leaves norms in the dtype that they get.
    halves = dict.fromkeys(("fc1", "layer_norm", "rms_norm", "logits"), precision)
    floats = dict.fromkeys(("parameters", "loss", "gradients"), "fp32")
    expected = {**halves, **floats, "loss_outside": loss_outside or precision}
    assert autocast_dtypes(precision, loss_function, CPU) == expected


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
        autocast_dtypes("fp16", "mse", CPU)
