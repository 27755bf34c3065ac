"""The sums are the handout's, and the dtypes those of the run itself."""

import pytest
import torch

from cs336sys.commands.precision.measure import AutocastDtypes, ToyModel, accumulate, autocast_dtypes

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_are_those_of_the_handouts_code(device):
    sums = accumulate(torch.device(device))
    assert [round(accumulation.total, 4) for accumulation in sums] == [10.0001, 9.9531, 10.0021, 10.0021]
    assert [round(accumulation.absolute_error, 4) for accumulation in sums] == [0.0001, 0.0469, 0.0021, 0.0021]
    assert sums[1].relative_error == pytest.approx(0.0046875)


def test_toy_model_is_the_handouts():
    shapes = {name: tuple(parameter.shape) for name, parameter in ToyModel(20, 5).named_parameters()}
    assert shapes == {"fc1.weight": (10, 20), "ln.weight": (10,), "ln.bias": (10,), "fc2.weight": (5, 10)}
    model, x = ToyModel(20, 5), torch.randn(3, 20)
    assert torch.equal(model(x), model.fc2(model.ln(model.fc1(x).relu())))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("loss_function", "loss_outside"), [("cross-entropy", None), ("mse", "fp32")])
def test_dtypes_on_the_cpu(precision, loss_function, loss_outside):
    assert autocast_dtypes(precision, loss_function, CPU) == AutocastDtypes(
        precision,
        loss_function,
        parameters="fp32",
        fc1=precision,
        # CPU autocast leaves norms in the dtype that they get.
        layer_norm=precision,
        rms_norm=precision,
        logits=precision,
        loss="fp32",
        loss_outside=loss_outside or precision,
        gradients="fp32",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_dtypes_on_cuda(precision):
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert autocast_dtypes(precision, "cross-entropy", torch.device("cuda")) == AutocastDtypes(
        precision,
        "cross-entropy",
        parameters="fp32",
        fc1=precision,
        layer_norm="fp32",
        rms_norm="fp32" if version >= (2, 12) else precision,
        logits=precision,
        loss="fp32",
        loss_outside=precision,
        gradients="fp32",
    )


def test_an_operation_that_the_device_lacks_makes_the_row_unsupported(monkeypatch):
    linear = torch.nn.functional.linear

    def without_half(*arguments):
        if torch.get_autocast_dtype("cpu") == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nmore")
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", without_half)
    reason = "\"addmm_impl_cpu_\" not implemented for 'Half'"
    assert autocast_dtypes("fp16", "mse", CPU) == AutocastDtypes("fp16", "mse", "unsupported", reason)
    assert autocast_dtypes("bf16", "mse", CPU).status == "ok"


def test_autocast_that_torch_switches_off_is_unsupported_not_fp32(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    found = autocast_dtypes("fp16", "mse", CPU)
    assert found.status == "unsupported"
    assert found.reason == f"torch {torch.__version__} does not autocast to torch.float16 on cpu"
    assert found.fc1 is None
