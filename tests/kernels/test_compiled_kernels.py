"""The fused kernels under torch.compile: their operators, one graph, and in it the same results to the last bit."""

import pytest
import torch
from kernel_checks import results

from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope, rope_qkv
from cs336sys.kernels.swiglu import swiglu


def rotate_projection(x, positions):
    return rope(x.unflatten(-1, (3, -1)).transpose(-3, -2), positions)


def split_and_rotate(x):
    return rope_qkv(x, num_heads=1)


def predict_first_tokens(hidden, weight):
    targets = torch.arange(hidden.shape[0] * hidden.shape[1], device=hidden.device).view(hidden.shape[:-1])
    return linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1, z_loss=0.01)


# The function and the shapes of its arguments.
CASES = {
    "rms_norm": (rms_norm, {"x": (2, 5, 18), "weight": (18,)}),
    "rms_norm with residual": (rms_norm, {"x": (2, 5, 18), "weight": (18,), "residual": (2, 5, 18)}),
    "rope": (rotate_projection, {"x": (2, 5, 18), "positions": None}),
    "rope_qkv": (split_and_rotate, {"x": (2, 5, 18)}),
    "swiglu": (swiglu, {"gate": (2, 5, 18), "up": (2, 5, 18)}),
    "linear_cross_entropy": (predict_first_tokens, {"hidden": (2, 5, 18), "weight": (11, 18)}),
}


@pytest.mark.parametrize(("function", "shapes"), CASES.values(), ids=CASES.keys())
def test_compiled_in_one_graph(function, shapes, device):
    torch.manual_seed(0)
    inputs = {
        name: torch.arange(5, device=device) if shape is None else torch.randn(shape, device=device)
        for name, shape in shapes.items()
    }
    outputs = function(**inputs)
    grads = [torch.randn_like(output) for output in (outputs if isinstance(outputs, tuple) else (outputs,))]
    # Without code for this machine: what is tested is the graph.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    eager, graph = (results(one, inputs, grads) for one in (function, compiled))
    for name, tensor in eager.items():
        assert torch.equal(tensor, graph[name]), name
        assert tensor.stride() == graph[name].stride(), name


def check_operator(operator, *arguments):
    """Its schema says what it does to its arguments, and what it returns without computing fits what it computes."""
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("residual_dtype", [None, torch.float16], ids=["alone", "residual"])
def test_operators_of_rms_norm(residual_dtype, device):
    x, weight = torch.randn(2, 3, 34, device=device)[:, :, ::2], torch.randn(17, device=device)
    residual = None if residual_dtype is None else x.to(residual_dtype)
    arguments = x, weight, residual, 1e-5, torch.float16
    check_operator(torch.ops.cs336sys.rms_norm_forward.default, *arguments)
    y, total, inverse_rms = torch.ops.cs336sys.rms_norm_forward(*arguments)
    grads = (y, None, x) if residual is None else (y, y, total)
    check_operator(
        torch.ops.cs336sys.rms_norm_backward.default, *grads, weight, inverse_rms, torch.float32, residual_dtype
    )


@pytest.mark.parametrize("recomputes", [False, True])
def test_operators_of_swiglu(recomputes, device):
    gate, up, grad = torch.randn(3, 3, 10, device=device)
    check_operator(torch.ops.cs336sys.swiglu_forward.default, gate[:, ::2], up[:, ::2], torch.float16)
    check_operator(torch.ops.cs336sys.swiglu_backward.default, gate, up.half(), grad, recomputes)


@pytest.mark.parametrize("strides", [None, (120, 24, 8, 1)], ids=["laid out as x", "strides"])
def test_operator_of_rope(strides, device):
    x = torch.randn(2, 5, 3, 8, device=device)
    x = x.transpose(1, 2)[..., ::2] if strides is None else x
    check_operator(torch.ops.cs336sys.rope.default, x, None, 1e4, False, strides, torch.float16)


def test_operators_of_rope_qkv(device):
    qkv, positions = torch.randn(2, 5, 24, device=device), torch.arange(5, device=device)
    arguments = qkv, positions, 1, 1, 1e4, torch.float32
    check_operator(torch.ops.cs336sys.rope_qkv.default, *arguments)
    grads = torch.ops.cs336sys.rope_qkv(*arguments)
    check_operator(torch.ops.cs336sys.rope_qkv_backward.default, *grads, None, 1e4, torch.float16)
