"""The fused kernels under torch.compile: one graph, and in it the same results to the last bit."""

import pytest
import torch
from kernel_checks import results

from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope, rope_qkv
from cs336sys.kernels.swiglu import swiglu, swiglu_linear


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
    "swiglu_linear": (swiglu_linear, {"gate": (2, 5, 18), "up": (2, 5, 18), "weight": (7, 18)}),
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
