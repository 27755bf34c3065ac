"""weighted_sum against float64, on the CPU through Triton's interpreter. Tiles of 16 x 128, strips of 128 rows."""

import pytest
import torch
from kernel_checks import LAYOUTS as COMMON_LAYOUTS
from kernel_checks import assert_matches_float64, dtype_id, results, shape_id

from cs336sys.kernels.weighted_sum import reference_weighted_sum, weighted_sum

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Inputs are exact in float64, so this is the rounding of float32 sums and of the stored result: half a unit in the last
# place on a GPU, a whole one in the interpreter, which cuts bfloat16 off instead of rounding it.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5},
}


def matches(x, weight, grad_output):
    inputs = {"x": x, "weight": weight}
    assert weighted_sum(**inputs).dtype == x.dtype
    assert_matches_float64(weighted_sum, reference_weighted_sum, inputs, [grad_output], tolerances=TOLERANCES)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_id)
@pytest.mark.parametrize(
    "shape",
    [
        (5,),  # no leading dimension
        (1, 1),
        (17, 33),  # both tails masked
        (2, 3, 16, 128),  # whole tiles, several leading dimensions
        (3, 87, 129),  # two strips of rows, two tiles of columns, all ragged
    ],
    ids=shape_id,
)
def test_output_and_gradients(shape, dtype, device):
    torch.manual_seed(0)
    x, weight, grad_output = (torch.randn(s, dtype=dtype, device=device) for s in (shape, shape[-1:], shape[:-1]))
    matches(x, weight, grad_output)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_id)
def test_integers_are_exact(dtype, device):
    # Sums of 300 products of -1, 0 and 1 stay below 256, up to which bfloat16 holds every integer.
    torch.manual_seed(0)
    x, weight, grad_output = (
        torch.randint(-1, 2, shape, device=device).to(dtype) for shape in ((300, 200), (200,), (300,))
    )
    actual = results(weighted_sum, {"x": x, "weight": weight}, [grad_output])
    expected = results(reference_weighted_sum, {"x": x.double(), "weight": weight.double()}, [grad_output.double()])
    assert expected["grad weight"].abs().max() < 256
    for name, tensor in actual.items():
        assert torch.equal(tensor.double(), expected[name]), name


LAYOUTS = COMMON_LAYOUTS | {
    "transposed": lambda x: x.flatten(0, 1).T.contiguous().T,  # rows 1 apart, as in the gradient made like it
    "swapped-leading-dimensions": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides_of_x(layout, device):
    torch.manual_seed(0)
    x = layout(torch.randn(3, 7, 130, device=device))
    assert not x.is_contiguous()
    matches(x, torch.randn(130, device=device), torch.randn(x.shape[:-1], device=device))


def test_strides_of_weight_and_of_the_incoming_gradient(device):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7, 130, device=device), torch.randn(260, device=device)[::2]
    matches(x, weight, torch.randn(7, 3, device=device).T)
    matches(x, weight, torch.ones((), device=device).expand(3, 7))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (3, 0)], ids=shape_id)
def test_empty(shape, device):
    x, weight, grad_output = (torch.ones(s, device=device) for s in (shape, shape[-1:], shape[:-1]))
    matches(x, weight, grad_output)


def test_nan_stays_in_its_row(device):
    x, weight = torch.ones(20, 130, device=device), torch.ones(130, device=device)
    x[3, 129] = float("nan")
    assert weighted_sum(x, weight).isnan().nonzero().tolist() == [[3]]
