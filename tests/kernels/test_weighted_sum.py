"""weighted_sum against float64, on the CPU through Triton's interpreter. Tiles of 16 x 128, strips of 128 rows."""

import pytest
import torch
from kernel_checks import assert_matches_float64

from cs336sys.kernels.weighted_sum import reference_weighted_sum, weighted_sum

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def test_gradient_of_stride_0(device):
    """As the sum sends it back."""
    inputs = {"x": torch.randn(3, 7, 130, device=device), "weight": torch.randn(130, device=device)}
    grad = torch.ones((), device=device).expand(3, 7)
    assert_matches_float64(weighted_sum, reference_weighted_sum, inputs, [grad])


def test_nan_stays_in_its_row(device):
    x, weight = torch.ones(20, 130, device=device), torch.ones(130, device=device)
    x[3, 129] = float("nan")
    assert weighted_sum(x, weight).isnan().nonzero().tolist() == [[3]]
