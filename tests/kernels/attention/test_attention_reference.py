"""The plain attentions against torch's own."""

import math

import pytest
import torch
from attention_checks import Operations, random_inputs

from cs336sys.kernels.attention.reference import FlashAttentionTorch, plain_attention, reference_attention

# (leading dimensions, S_q, S_k, D)
SHAPES = [((), 1, 1, 4), ((2,), 17, 17, 8), ((2, 3), 5, 33, 16), ((2, 1, 2), 33, 5, 3)]
SHAPE_IDS = ["2d-1x1", "3d-17x17", "4d-5x33", "5d-33x5"]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_agrees_with_torch(shape, is_causal):
    inputs = query, key, _ = random_inputs(*shape, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    scores = query.detach() @ key.detach().mT / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & is_causal
    expected_logsumexp = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.testing.assert_close(reference_attention(*inputs, is_causal)[1], expected_logsumexp)
    grad_out = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, grad_out)
    for function in (plain_attention, lambda *args: reference_attention(*args)[0]):
        out = function(*inputs, is_causal)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(out, inputs, grad_out)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_first_and_second_derivatives_of_output_and_logsumexp(is_causal):
    inputs = random_inputs((2,), 4, 3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *args: reference_attention(*args, is_causal), inputs)
    assert torch.autograd.gradgradcheck(lambda *args: reference_attention(*args, is_causal), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_compute_dtype(dtype):
    inputs = random_inputs((2,), 9, 9, 8, dtype)
    out, logsumexp = reference_attention(*inputs)
    assert out.dtype == logsumexp.dtype == dtype

    out, logsumexp = reference_attention(*inputs, compute_dtype=torch.float64)
    expected, expected_logsumexp = reference_attention(*(tensor.detach().double() for tensor in inputs))
    assert torch.equal(out, expected)
    assert torch.equal(logsumexp, expected_logsumexp)
    out.sum().backward()
    assert all(tensor.grad.dtype == dtype for tensor in inputs)


@pytest.mark.parametrize(
    ("is_causal", "expected"),
    [
        pytest.param(False, ["bmm", "_softmax"], id="full"),
        pytest.param(True, ["bmm", "masked_fill_", "_softmax"], id="causal"),
    ],
)
def test_the_baseline_does_nothing_that_it_need_not(is_causal, expected):
    inputs = random_inputs((4,), 32, 32, 4, torch.float64)
    saved = []
    with (
        Operations() as operations,
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
    ):
        plain_attention(*inputs, is_causal)
    assert [name for name, numel in operations.made if numel >= 4 * 32 * 32 and name != "_unsafe_view"] == expected
    quadratic = {tensor.data_ptr(): tensor for tensor in saved if tensor.shape[-2:] == (32, 32)}
    mask_bytes = 32 * 32 if is_causal else 0
    assert sum(tensor.nbytes for tensor in quadratic.values()) == 4 * 32 * 32 * 8 + mask_bytes


@pytest.mark.parametrize("leading", [(), (0,), (2, 3)], ids=["2d", "empty-batch", "4d"])
@pytest.mark.parametrize("num_queries", [0, 3])
def test_no_queries_and_no_batch_are_fine(leading, num_queries):
    query, key = torch.ones(*leading, num_queries, 8), torch.ones(*leading, 5, 8)
    for attention in (plain_attention, lambda *args: reference_attention(*args)[0], FlashAttentionTorch.apply):
        torch.testing.assert_close(attention(query, key, key), torch.ones_like(query))
