"""swiglu against float64, on the CPU through Triton's interpreter. Tiles are of 1024 elements."""

import pytest
import torch
from kernel_checks import assert_equal_to_reference, assert_matches_float64, random

from cs336sys.kernels.swiglu import reference_swiglu, swiglu

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def test_dtypes_may_differ(device):
    gate, up, grad = random(device, (3, 7), (3, 7), (3, 7))
    inputs = {"gate": gate, "up": up.half()}
    assert_matches_float64(swiglu, reference_swiglu, inputs, [grad])
    assert swiglu(**inputs).dtype == torch.float32


# The interpreter computes in numpy, which warns.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_huge_values_nan_and_infinity_are_as_in_the_reference(device):
    values = [0.0, -0.0, 80.0, -80.0, 1e4, -1e4, 1e38, -1e38, torch.inf, -torch.inf, torch.nan]
    gate, up = torch.meshgrid(*[torch.tensor(values, device=device)] * 2, indexing="ij")
    assert_equal_to_reference(swiglu, reference_swiglu, {"gate": gate, "up": up}, [torch.ones_like(gate)])


def test_nothing_but_the_inputs_is_kept(device):
    inputs = [tensor.requires_grad_() for tensor in random(device, (3, 7), (3, 7))]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        swiglu(*inputs)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in inputs}
