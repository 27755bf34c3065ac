"""The fused kernels that work on rows or elements, against float64: shapes, dtypes and strides of all kinds.

On the CPU they run in Triton's interpreter. What swiglu and weighted_sum do alone is at the end, and what others do is
in the files of their names.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_checks import DTYPES, LAYOUTS, assert_equal_to_reference, assert_matches_float64, dtype_id, random, shape_id

from cs336sys.kernels.rms_norm import reference_rms_norm, rms_norm
from cs336sys.kernels.rope import reference_rope, rope
from cs336sys.kernels.swiglu import reference_swiglu, swiglu
from cs336sys.kernels.weighted_sum import reference_weighted_sum, weighted_sum

pytestmark = pytest.mark.usefixtures("poisoned_empty")


class Operation(NamedTuple):
    """``tensors``: of the shape of x, the shapes of all inputs by name, and of the outputs' gradients."""

    function: Callable
    reference: Callable
    tensors: Callable
    shapes: list
    large: list
    scale: float = 1.0  # How many times the rounding of one element is allowed, as sums over rows are long.
    large_scale: float = 1.0


EMPTY = [(0, 4), (2, 0, 4), (3, 0)]
# No leading dimension; one row, with a tail; whole tiles, several leading dimensions; tiles of 16 rows: more than there
# are programs, and some rows more.
NORMED = [(5,), (1, 1), (1, 33), (2, 3, 64), (230, 65), *EMPTY]
LARGE_NORMED = [(4099, 4096), (1031, 1600), (70001, 96), (300, 11008), (129, 40001)]
# A masked tail of columns; one token; two tiles of rows, two groups of heads, all ragged.
ROTATED = [(1, 2), (5, 6), (3, 1, 8), (2, 9, 18, 40), (2, 1, 2, 3, 4), (0, 4, 2), (2, 0, 4)]
LARGE_ROTATED = [(2, 33, 4099, 128), (4, 25, 513, 64), (1, 3, 777, 80)]
# Both tails masked; whole tiles, several leading dimensions; two strips of rows, two tiles of columns, all ragged.
SUMMED = [(5,), (1, 1), (17, 33), (2, 3, 16, 128), (3, 87, 129), *EMPTY]
OPERATIONS = {
    "rms_norm": Operation(rms_norm, reference_rms_norm, lambda x: ({"x": x, "weight": x[-1:]}, [x]), NORMED, [], 4),
    "rms_norm with residual": Operation(
        rms_norm, reference_rms_norm, lambda x: ({"x": x, "weight": x[-1:], "residual": x}, [x, x]),
        NORMED, LARGE_NORMED, 4, 20,
    ),
    "rope": Operation(rope, reference_rope, lambda x: ({"x": x}, [x]), ROTATED, LARGE_ROTATED),
    "swiglu": Operation(
        swiglu, reference_swiglu, lambda x: ({"gate": x, "up": x}, [x]),
        [(1,), (7,), (2, 3, 5), (3, 1367), *EMPTY], [(4099, 11008), (513, 6401), (3, 5, 7, 11)],
    ),
    "weighted_sum": Operation(
        weighted_sum, reference_weighted_sum, lambda x: ({"x": x, "weight": x[-1:]}, [x[:-1]]), SUMMED, [], 0.5
    ),
}  # fmt: skip


def problem(name, shape, device, dtype=torch.float32):
    """Inputs by name, and the outputs' gradients."""
    shapes, of_outputs = OPERATIONS[name].tensors(shape)
    tensors = random(device, *shapes.values(), *of_outputs, dtype=dtype)
    return dict(zip(shapes, tensors, strict=False)), tensors[len(shapes) :]


def assert_matches(name, inputs, grads, scale=1.0):
    assert_matches_float64(OPERATIONS[name].function, OPERATIONS[name].reference, inputs, grads, scale)


def cases(sizes):
    return [
        pytest.param(name, shape, id=f"{name} {shape_id(shape)}")
        for name, operation in OPERATIONS.items()
        for shape in getattr(operation, sizes)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("name", "shape"), cases("shapes"))
def test_outputs_and_gradients(name, shape, dtype, device):
    assert_matches(name, *problem(name, shape, device, dtype), OPERATIONS[name].scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("name", "shape"), cases("large"))
def test_large(name, shape, dtype, device):
    assert_matches(name, *problem(name, shape, device, dtype), OPERATIONS[name].large_scale)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides(name, layout, device):
    """Of one tensor at a time, lest it be read by the strides of another."""
    shape = (3, 7, 130)
    inputs, grads = problem(name, shape, device)
    tensors = inputs | dict(enumerate(grads))
    for key, tensor in tensors.items():
        laid_out = layout(tensor) if tensor.shape == shape else tensor.repeat_interleave(2, -1)[..., ::2]
        assert not laid_out.is_contiguous()
        changed = tensors | {key: laid_out}
        assert_matches(name, {key: changed[key] for key in inputs}, [changed[number] for number in range(len(grads))])


def test_dtypes_of_swiglu_may_differ(device):
    gate, up, grad = random(device, (3, 7), (3, 7), (3, 7))
    inputs = {"gate": gate, "up": up.half()}
    assert_matches_float64(swiglu, reference_swiglu, inputs, [grad])
    assert swiglu(**inputs).dtype == torch.float32


# The interpreter computes in numpy, which warns.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_swiglu_of_huge_values_nan_and_infinity_is_as_in_the_reference(device):
    values = [0.0, -0.0, 80.0, -80.0, 1e4, -1e4, 1e38, -1e38, torch.inf, -torch.inf, torch.nan]
    gate, up = torch.meshgrid(*[torch.tensor(values, device=device)] * 2, indexing="ij")
    assert_equal_to_reference(swiglu, reference_swiglu, {"gate": gate, "up": up}, [torch.ones_like(gate)])


def test_weighted_sum_with_a_gradient_of_stride_0(device):
    """As the sum sends it back."""
    inputs = {"x": torch.randn(3, 7, 130, device=device), "weight": torch.randn(130, device=device)}
    grad = torch.ones((), device=device).expand(3, 7)
    assert_matches_float64(weighted_sum, reference_weighted_sum, inputs, [grad])


def test_nan_stays_in_its_row_of_a_weighted_sum(device):
    x, weight = torch.ones(20, 130, device=device), torch.ones(130, device=device)
    x[3, 129] = float("nan")
    assert weighted_sum(x, weight).isnan().nonzero().tolist() == [[3]]
