"""swiglu against float64, on the CPU through Triton's interpreter. Tiles are of 1024 elements."""

import functools

import pytest
import torch
from kernel_checks import DTYPES, LAYOUTS, assert_equal_to_reference, assert_matches_float64, dtype_id, random, shape_id

from cs336sys.kernels.swiglu import reference_swiglu, swiglu

pytestmark = pytest.mark.usefixtures("poisoned_empty")

matches = functools.partial(assert_matches_float64, swiglu, reference_swiglu)


def problem(shape, device, dtype=torch.float32):
    gate, up, grad = random(device, *[shape] * 3, dtype=dtype)
    return {"gate": 3 * gate, "up": up}, [grad]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (3, 1367)], ids=shape_id)
def test_output_and_gradients(shape, dtype, device):
    matches(*problem(shape, device, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(4099, 11008), (513, 6401), (3, 5, 7, 11)], ids=shape_id)
def test_large(shape, dtype, device):
    matches(*problem(shape, device, dtype))
    inputs, grads = problem((*shape[:-1], 2 * shape[-1]), device, dtype)
    gate, up = inputs["gate"].chunk(2, dim=-1)
    matches({"gate": gate, "up": up}, [grads[0][..., ::2]])


def test_dtypes_may_differ(device):
    inputs, grads = problem((3, 7), device)
    inputs["up"] = inputs["up"].half()
    matches(inputs, grads)
    assert swiglu(**inputs).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides(layout, device):
    inputs, grads = problem((3, 70, 34), device)
    assert not layout(inputs["gate"]).is_contiguous()
    matches({name: layout(value) for name, value in inputs.items()}, grads)
    matches(inputs, [layout(grads[0])])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=shape_id)
def test_empty(shape, device):
    matches(*problem(shape, device))


# The interpreter computes in numpy, which warns.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_huge_values_nan_and_infinity_are_as_in_the_reference(device):
    values = [0.0, -0.0, 80.0, -80.0, 1e4, -1e4, 1e38, -1e38, torch.inf, -torch.inf, torch.nan]
    gate, up = torch.meshgrid(*[torch.tensor(values, device=device)] * 2, indexing="ij")
    assert_equal_to_reference(swiglu, reference_swiglu, {"gate": gate, "up": up}, [torch.ones_like(gate)])


def test_nothing_but_the_inputs_is_kept(device):
    inputs, _ = problem((3, 7), device)
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        swiglu(**inputs)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in inputs.values()}
