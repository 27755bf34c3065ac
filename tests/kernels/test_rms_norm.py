"""rms_norm against float64, on the CPU through Triton's interpreter."""

import functools

import pytest
import torch
from kernel_checks import assert_equal_to_reference, assert_matches_float64, results

from cs336sys.kernels import rms_norm as module
from cs336sys.kernels.rms_norm import reference_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_empty")

matches = functools.partial(assert_matches_float64, rms_norm, reference_rms_norm)


def problem(shape, device, dtype=torch.float32, *, residual=False, weight_dtype=None, residual_dtype=None):
    """Inputs and the outputs' gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    inputs = {"x": random(shape), "weight": random(shape[-1:], weight_dtype or dtype)}
    if not residual:
        return inputs, [random(shape)]
    total = torch.promote_types(dtype, residual_dtype or dtype)
    return inputs | {"residual": random(shape, residual_dtype or dtype)}, [random(shape, total), random(shape, total)]


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_rows_of_several_tiles(residual, device, monkeypatch):
    monkeypatch.setattr(module, "FORWARD_ROW_ELEMENTS", 32)
    monkeypatch.setattr(module, "BACKWARD_ROW_ELEMENTS", 16)
    monkeypatch.setattr(module, "LONG_ROW_TILES", (4, 16))
    inputs, grads = problem((17, 75), device, residual=residual)
    matches(inputs, grads)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "residual_dtype"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_dtypes_may_differ(dtype, weight_dtype, residual_dtype, device):
    inputs, grads = problem(
        (7, 33), device, dtype, residual=True, weight_dtype=weight_dtype, residual_dtype=residual_dtype
    )
    matches(inputs, grads, scale=2)
    y, total = rms_norm(**inputs)
    assert y.dtype == total.dtype == torch.promote_types(dtype, residual_dtype)
    assert rms_norm(inputs["x"], inputs["weight"]).dtype == dtype


def test_gradient_of_one_output_alone(device):
    inputs, grads = problem((5, 33), device, residual=True)

    def of(number, function):
        return lambda **inputs: function(**inputs)[number]

    assert_matches_float64(of(0, rms_norm), of(0, reference_rms_norm), inputs, grads[:1])
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    (grad,) = torch.autograd.grad(rms_norm(**inputs)[1], [inputs["residual"]], grads[1])
    assert torch.equal(grad, grads[1])


# The interpreter computes in numpy, which warns.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_huge_values_nan_and_infinity_are_as_in_the_reference(device):
    inputs, grads = problem((6, 33), device)
    x = inputs["x"]
    x[0] *= 1e18  # the square is still finite
    x[1] *= 1e25  # and here infinite
    x[2, 32] = torch.nan
    x[3, 5] = torch.inf
    x[4] = 0
    assert_equal_to_reference(rms_norm, reference_rms_norm, inputs, grads)
    assert rms_norm(**inputs).isnan().any(-1).tolist() == [False, False, True, True, False, False]


def test_eps(device):
    inputs, grads = problem((3, 8), device)
    inputs["x"] *= 1e-3
    matches(inputs | {"eps": 1e-2}, grads)


def test_equal_from_run_to_run(device):
    inputs, grads = problem((120, 65), device, residual=True)
    first, second = (results(rms_norm, inputs, grads) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
