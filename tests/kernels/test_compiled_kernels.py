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
    torch.testing.assert_close(graph, eager, rtol=0, atol=0, check_stride=True)


def operator_calls(device):
    """The operators with arguments of several strides, dtypes and options."""
    operators = torch.ops.cs336sys
    x, weight = torch.randn(2, 3, 34, device=device)[:, :, ::2], torch.randn(17, device=device)
    for residual_dtype in (None, torch.float16):
        residual = None if residual_dtype is None else x.to(residual_dtype)
        yield operators.rms_norm_forward, (x, weight, residual, 1e-5, torch.float16)
        y, total, inverse_rms = operators.rms_norm_forward(x, weight, residual, 1e-5, torch.float16)
        grads = (y, None, x) if residual is None else (y, y, total)
        yield operators.rms_norm_backward, (*grads, weight, inverse_rms, torch.float32, residual_dtype)
    gate, up, grad = torch.randn(3, 3, 10, device=device)
    yield operators.swiglu_forward, (gate[:, ::2], up[:, ::2], torch.float16)
    for recomputes in (False, True):
        yield operators.swiglu_backward, (gate, up.half(), grad, recomputes)
    x = torch.randn(2, 5, 3, 8, device=device)
    yield operators.rope, (x.transpose(1, 2)[..., ::2], None, 1e4, False, None, torch.float16)
    yield operators.rope, (x, None, 1e4, False, (120, 24, 8, 1), torch.float16)
    qkv = torch.randn(2, 5, 24, device=device), torch.arange(5, device=device), 1, 1, 1e4, torch.float32
    yield operators.rope_qkv, qkv
    yield operators.rope_qkv_backward, (*operators.rope_qkv(*qkv), None, 1e4, torch.float16)


def test_operators_keep_the_rules_of_pytorch(device):
    """Schemas say what becomes of arguments, and what is returned without computing fits what is computed."""
    for operator, arguments in operator_calls(device):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
