"""Softmax, cross-entropy and gradient clipping against torch, at the edges of their number ranges."""

import math

import pytest
import torch
import torch.nn.functional as F
from cs336_basics.nn_utils import clip_gradient, cross_entropy, log_softmax, softmax

HALF_TYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_TYPES])
@pytest.mark.parametrize(("ours", "theirs"), [(softmax, F.softmax), (log_softmax, F.log_softmax)])
def test_softmax_matches_torch_in_value_gradient_and_dtype(ours, theirs, dtype, dim):
    x = (4 * torch.randn(3, 5, 7)).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    grad = torch.randn(3, 5, 7).to(dtype)
    out, expected = ours(x, dim=dim), theirs(x64, dim=dim)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(x.grad, x64.grad.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e4), (torch.float16, 6e4), (torch.bfloat16, 6e4)])
def test_softmax_of_large_numbers_does_not_overflow(dtype, large):
    x = torch.tensor([large, large, -large, 0.0], dtype=dtype)
    torch.testing.assert_close(softmax(x), torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=dtype))
    torch.testing.assert_close(log_softmax(x.float())[:2], torch.full((2,), 0.5).log())


def test_fp16_softmax_sums_beyond_the_range_of_fp16():
    # 100,000 equal entries: their sum is more than 65,504.
    out = softmax(torch.zeros(100_000, dtype=torch.float16))
    torch.testing.assert_close(out, torch.full_like(out, 1e-5))


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 2, 3)])
def test_cross_entropy_is_the_mean_over_all_positions(shape):
    logits = torch.randn(*shape, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, shape)
    loss = cross_entropy(logits, targets)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e4), (torch.float16, 6e4), (torch.bfloat16, 6e4)])
def test_cross_entropy_of_large_logits_is_exact(dtype, large):
    logits = (large * torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])).to(dtype).requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx((math.log(2) + math.log(3)) / 3, abs=1e-6)
    loss.backward()
    expected = torch.tensor([[0, 0, 0], [0, -0.5, 0.5], [1 / 3, -2 / 3, 1 / 3]]) / 3
    torch.testing.assert_close(logits.grad, expected.to(dtype))
    # The difference between the extremes, 2 * 6e4, is beyond fp16.
    torch.testing.assert_close(
        cross_entropy(logits[:1], torch.tensor([1])), logits[0, 0].float() - logits[0, 1].float()
    )


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_logits_give_an_fp32_loss_and_gradients_without_cancellation(dtype):
    logits = torch.randn(8, 50).to(dtype)
    targets = torch.randint(50, (8,))
    # Nearly sure of the target: its gradient is a small difference of two numbers near 1 / 8.
    logits[torch.arange(8), targets] = 12.0
    logits.requires_grad_()
    logits64 = logits.detach().double().requires_grad_()
    loss, expected = cross_entropy(logits, targets), F.cross_entropy(logits64, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad.double(), logits64.grad, rtol=0.01, atol=1e-7)


def test_second_derivative_of_cross_entropy_is_refused():
    logits = torch.randn(3, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(cross_entropy(logits, torch.tensor([1, 2, 3])), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.square().sum().backward()


def parameters_with_gradients(scale=1.0, dtype=torch.float32):
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), (), (2, 2))]
    for parameter in parameters[:-1]:
        parameter.grad = (scale * torch.randn(parameter.shape)).to(dtype)
    return parameters


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clip_gradient_matches_torch(max_norm):
    ours = parameters_with_gradients(scale=10.0)
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for parameter, copy in zip(ours, theirs, strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    gradients = [parameter.grad for parameter in ours]
    clip_gradient((parameter for parameter in ours), max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for parameter, copy, gradient in zip(ours, theirs, gradients, strict=True):
        assert parameter.grad is gradient
        if gradient is not None:
            torch.testing.assert_close(gradient, copy.grad)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_gradients_are_clipped_by_their_norm_in_fp32(dtype):
    # The norm of the first gradient alone, 3e4 * sqrt(12), is beyond fp16.
    parameters = parameters_with_gradients(dtype=dtype)[:-1] + parameters_with_gradients()[:1]
    for parameter in parameters:
        parameter.grad.sign_().mul_(3e4)
    gradients = [parameter.grad.double() for parameter in parameters]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    clip_gradient(parameters, 1.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad.dtype == parameter.dtype
        torch.testing.assert_close(parameter.grad, (gradient / norm).to(parameter.dtype))


def test_clip_gradient_without_gradients_does_nothing():
    parameter = torch.nn.Parameter(torch.ones(3))
    clip_gradient([parameter], 1.0)
    assert parameter.grad is None
    assert parameter.tolist() == [1, 1, 1]
    clip_gradient([], 1.0)


@pytest.mark.gpu
def test_clipping_and_the_loss_never_make_the_host_wait_for_the_gpu():
    parameters = [torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3, device="cuda")
    logits, targets = torch.randn(4, 9, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_gradient(parameters, 1.0)
        loss = cross_entropy(logits, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(parameters[0].grad.cpu(), torch.full((3,), 6**-0.5))
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))
