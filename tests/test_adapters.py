"""The course's Triton function by either engine: what its tests ask of it, on small shapes."""

import adapters
import pytest
import torch

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import FlashAttentionTriton
from cs336sys.kernels.attention.hopper import settings
from cs336sys.kernels.attention.reference import reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def engine(monkeypatch, name):
    monkeypatch.setenv("CS336SYS_TRITON_ENGINE", name)
    return adapters.get_flashattention_autograd_function_triton()


def test_plain_triton_is_the_default(monkeypatch):
    monkeypatch.delenv("CS336SYS_TRITON_ENGINE", raising=False)
    assert adapters.get_flashattention_autograd_function_triton() is FlashAttentionTriton
    assert engine(monkeypatch, "") is FlashAttentionTriton
    assert engine(monkeypatch, "triton") is FlashAttentionTriton


def test_an_engine_that_does_not_exist(monkeypatch):
    with pytest.raises(ValueError, match="'cuda' does not exist: choose one of triton, hopper"):
        engine(monkeypatch, "cuda")


def test_hopper_is_refused_on_a_cpu(monkeypatch):
    query = torch.randn(1, 4, 64)
    with pytest.raises(CapabilityError, match="'hopper' runs on CUDA tensors, got cpu"):
        engine(monkeypatch, "hopper").apply(query, query, query)


LACKS = "no CUDA GPU"
if torch.cuda.is_available():
    LACKS = settings.why_unavailable(torch.empty(1, 64, dtype=torch.float16, device="cuda"))
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(LACKS is not None, reason=str(LACKS))]


# Plain Triton's kernels stand in where there is no such GPU: the casts around them are the same.
@pytest.mark.parametrize("kernels", ["triton", pytest.param("hopper", marks=ON_HOPPER)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_hopper_takes_and_gives_float32(monkeypatch, kernels, is_causal):
    function = engine(monkeypatch, "hopper")
    monkeypatch.setattr(function, "kernels", kernels)
    inputs = [torch.randn(2, length, 16, device=DEVICE, requires_grad=True) for length in (33, 48, 48)]
    grad_out = torch.randn(2, 33, 16, device=DEVICE)
    out = function.apply(*inputs, is_causal)
    (logsumexp,) = [tensor for tensor in out.grad_fn.saved_tensors if tensor.shape == (2, 33)]
    assert {tensor.dtype for tensor in out.grad_fn.saved_tensors if tensor.dim() == 3} == {torch.float16}
    grads = torch.autograd.grad(out, inputs, grad_out)

    expected_out, expected_logsumexp = reference_attention(*inputs, is_causal)
    expected_grads = torch.autograd.grad(expected_out, inputs, grad_out)
    # These also compare dtypes.
    torch.testing.assert_close(out, expected_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logsumexp, expected_logsumexp, rtol=1e-2, atol=1e-2)
    for name, grad, expected in zip(("dQ", "dK", "dV"), grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")
