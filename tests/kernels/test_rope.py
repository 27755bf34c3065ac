"""rope and rope_qkv against float64, on the CPU through Triton's interpreter."""

import functools

import pytest
import torch
from kernel_checks import DTYPES, assert_equal_to_reference, assert_matches_float64, dtype_id, random

from cs336sys.kernels.rope import reference_rope, rope, rope_qkv

pytestmark = pytest.mark.usefixtures("poisoned_empty")

matches = functools.partial(assert_matches_float64, rope, reference_rope)


def problem(shape, device, dtype=torch.float32):
    x, grad = random(device, shape, shape, dtype=dtype)
    return {"x": x}, [grad]


def split_heads(projection, head_dim):
    """(B, S, H D) as attention wants it, (B, H, S, D), without moving anything."""
    return projection.unflatten(-1, (-1, head_dim)).transpose(-3, -2)


def reference_rope_qkv(qkv, num_heads, num_key_value_heads, positions=None, theta=10_000.0):
    heads = (num_heads, num_key_value_heads, num_key_value_heads)
    head_dim = qkv.shape[-1] // sum(heads)
    query, key, value = split_heads(qkv, head_dim).split(heads, dim=-3)
    if positions is not None:
        positions = positions.unsqueeze(-2)
    return *(reference_rope(x, positions, theta=theta) for x in (query, key)), value


def test_angles_are_exact_far_from_the_start(device):
    inputs, grads = problem((7, 8), device)
    positions = torch.tensor([0, 1, 1000, 32767, 131071, 10**6, 2**31 - 1], device=device)
    matches(inputs | {"positions": positions}, grads)
    matches(inputs | {"positions": -positions}, grads)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 0.5])
def test_theta(theta, device):
    inputs, grads = problem((9, 8), device)
    matches(inputs | {"theta": theta}, grads)


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5, 10),
        torch.tensor([[[3, 1, 4, 1, 5]], [[9, 2, 6, 5, 3]]]),  # for each sequence of the batch
        torch.arange(30).view(2, 3, 5).int(),  # for each head
        torch.tensor([7]),
        torch.arange(10).view(5, 2)[:, 1],
    ],
    ids=["shared", "batch", "heads", "one", "strided"],
)
def test_positions(positions, device):
    inputs, grads = problem((2, 3, 5, 6), device)
    matches(inputs | {"positions": positions.to(device)}, grads)


LAYOUTS = {
    "projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part-of-a-projection": lambda x: torch.cat([x, x], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, 3:],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides(layout, device):
    inputs, grads = problem((2, 3, 5, 6), device)
    x = layout(inputs["x"])
    assert not x.is_contiguous()
    matches({"x": x}, grads)
    matches(inputs, [layout(grads[0])])


def test_no_copy_is_left_between_a_projection_and_attention(device):
    (projection,) = random(device, (2, 5, 24))
    heads = split_heads(projection, 8).requires_grad_()
    # What attention reads is laid out as the projection, and so are its output and the gradient that it gives.
    y = rope(heads)
    assert y.stride() == heads.stride()
    (contiguous,) = random(device, (2, 3, 5, 8))
    for grad in (contiguous, contiguous.transpose(1, 2).contiguous().transpose(1, 2)):
        (grad_x,) = torch.autograd.grad(y, heads, grad, retain_graph=True)
        assert grad_x.stride() == heads.stride()


# The interpreter computes in numpy, which warns.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_huge_values_nan_and_infinity_are_as_in_the_reference(device):
    inputs, grads = problem((6, 8), device)
    inputs["x"][1] *= 1e38
    inputs["x"][2, 3] = torch.nan
    inputs["x"][3, 0] = torch.inf
    inputs["x"][0, 5] = -torch.inf
    assert_equal_to_reference(rope, reference_rope, inputs, grads)


def test_second_derivative_is_there(device):
    """The rotation is linear, so the derivative's derivative is the rotation."""
    (x, direction), (grad,) = random(device, (4, 6), (4, 6)), random(device, (4, 6))
    x, grad = x.requires_grad_(), grad.requires_grad_()
    (grad_x,) = torch.autograd.grad(rope(x), x, grad, create_graph=True)
    (back,) = torch.autograd.grad(grad_x, grad, direction)
    torch.testing.assert_close(back, reference_rope(direction))


# 17: three groups of query heads and one of key heads, of which each is written once, and nothing else.
@pytest.mark.parametrize("num_heads", [3, 17])
@pytest.mark.parametrize("positions", [None, torch.tensor([[4, 2, 0, 1, 7]])], ids=["implied", "given"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_fused_projection(dtype, positions, num_heads, device):
    of_keys = (2, 2, 5, 6)
    qkv, *grads = random(device, (2, 5, (num_heads + 4) * 6), (2, num_heads, 5, 6), of_keys, of_keys, dtype=dtype)
    inputs = {"qkv": qkv, "num_heads": num_heads, "num_key_value_heads": 2}
    inputs["positions"] = None if positions is None else positions.to(device)
    assert_matches_float64(rope_qkv, reference_rope_qkv, inputs, grads)


def test_parts_of_a_fused_projection_are_laid_out_for_attention(device):
    (qkv,) = random(device, (2, 5, 9 * 8))
    qkv.requires_grad_()
    parts = rope_qkv(qkv, 3)
    for part in parts:
        assert part.shape == (2, 3, 5, 8)
        assert part.transpose(1, 2).is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.autograd.grad(sum(part.sum() for part in parts), qkv)[0].is_contiguous()
