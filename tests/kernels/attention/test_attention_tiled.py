"""FlashAttention-2 in PyTorch against the float64 reference, with tiles small enough for several in both directions."""

import math
import os
import shutil

import pytest
import torch
from attention_checks import TOLERANCES, Operations, assert_close_to_float64, random_inputs

from cs336sys.kernels.attention import reference
from cs336sys.kernels.attention.reference import (
    FlashAttentionCompiledBackward,
    FlashAttentionTorch,
    reference_attention,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty", "small_tiles")

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float64, *TOLERANCES)]
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def small_tiles(monkeypatch):
    for name in ("CPU_TILE", "GPU_TILE"):
        monkeypatch.setattr(reference, name, (16, 32))


def assert_matches_float64(inputs, is_causal, grad_out=None, attention=FlashAttentionTorch):
    out = attention.apply(*inputs, is_causal)
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    actual = out, out.grad_fn.saved_tensors[-1], *torch.autograd.grad(out, inputs, grad_out)
    assert_close_to_float64(actual, inputs, is_causal, None, grad_out)


@CAUSAL
@pytest.mark.parametrize("num_keys", [1, 18, 33, 65])
@pytest.mark.parametrize("num_queries", [1, 17, 33, 65])
def test_lengths(num_queries, num_keys, is_causal, device):
    inputs = random_inputs((2,), num_queries, num_keys, 8, torch.float64, device)
    assert_matches_float64(inputs, is_causal)


@CAUSAL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("attention", [FlashAttentionTorch, FlashAttentionCompiledBackward], ids=["tiled", "untiled"])
def test_dtypes_and_leading_dimensions(attention, leading, dtype, is_causal, device, monkeypatch):
    monkeypatch.setattr(reference, "_compiled_backward", lambda: reference.tiled_backward)
    assert_matches_float64(random_inputs(leading, 65, 49, 16, dtype, device), is_causal, attention=attention)


@CAUSAL
def test_no_tensor_grows_with_the_square_of_the_sequence(is_causal, device):
    inputs = random_inputs((2,), 512, 512, 8, device=device)
    with Operations() as operations:
        FlashAttentionTorch.apply(*inputs, is_causal).sum().backward()
    assert max(numel for _, numel in operations.made) == 2 * 512 * 8


@pytest.mark.parametrize(
    ("is_causal", "tiles", "masked_tiles"),
    # Tiles of 16 x 32 over 128 x 128: 8 x 4 of them, of which 8 lie on the diagonal and 12 above it.
    [pytest.param(False, 32, 0, id="full"), pytest.param(True, 20, 8, id="causal")],
)
def test_tiles_above_the_diagonal_are_skipped_and_only_those_on_it_masked(is_causal, tiles, masked_tiles, device):
    inputs = random_inputs((2,), 128, 128, 8, device=device)
    with Operations() as forward:
        out = FlashAttentionTorch.apply(*inputs, is_causal)
    assert forward.count("bmm", "masked_fill_") == (2 * tiles, masked_tiles)
    with Operations() as backward:
        out.backward(torch.ones_like(out))
    assert backward.count("bmm", "masked_fill_") == (5 * tiles, masked_tiles)


def test_scores_of_minus_infinity_give_zeros_and_clean_gradients(device):
    query, key, value = random_inputs((2,), 20, 40, 8, torch.float64, device)
    with torch.no_grad():
        query[..., 0] = 1.0
        key[1, :, 0] = -math.inf  # the second batch element sees nothing
        key[0, :32, 0] = -math.inf  # the first sees nothing in its first tile of keys
    out = FlashAttentionTorch.apply(query, key, value)
    expected, expected_logsumexp = reference_attention(query, key, value)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out.grad_fn.saved_tensors[-1], expected_logsumexp)
    assert (out[1] == 0.0).all()

    actual = torch.autograd.grad(out.sum(), (query, key, value))
    expected = torch.autograd.grad(expected.sum(), (query, key, value))
    # dQ = dS K is 0 * inf there in the reference, too.
    torch.testing.assert_close(actual[0], expected[0], equal_nan=True)
    torch.testing.assert_close(actual[1:], expected[1:])


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_and_infinity_propagate_as_in_the_reference(poisoned, poison, device):
    inputs = random_inputs((), 40, 40, 8, torch.float64, device)
    with torch.no_grad():
        inputs[("query", "key", "value").index(poisoned)][35, 0] = poison
    out, expected = FlashAttentionTorch.apply(*inputs), reference_attention(*inputs)[0]
    assert not expected.isfinite().all()
    torch.testing.assert_close(out, expected, equal_nan=True)
    gradients = (torch.autograd.grad(result.sum(), inputs) for result in (out, expected))
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_autocast_does_not_lower_the_precision(device):
    inputs = random_inputs((2,), 33, 33, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_matches_float64(inputs, is_causal=False)


@pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile needs a C++ compiler without a GPU",
)
@pytest.mark.nightly
def test_compiled_backward(device):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    inputs = random_inputs((2,), 33, 33, 16, device=device)
    assert_matches_float64(inputs, is_causal=True, attention=FlashAttentionCompiledBackward)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
