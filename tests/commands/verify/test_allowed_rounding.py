"""How much rounding explains: some units in the last place, and some times what other orders of summation differ by."""

from types import SimpleNamespace

import pytest
import torch

from cs336sys.commands.verify.comparison import ComparedCase
from cs336sys.parity.rounding import rounding_in
from cs336sys.parity.weights import TensorComparison


@pytest.mark.parametrize(
    ("dtype", "half", "most"),
    [(torch.float64, None, 1e-14), (torch.float32, None, 1e-5), (torch.float32, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize("repeated", [0.0, 1e-3])
def test_rounding_explains_little(dtype, half, most, repeated):
    value = torch.ones(100, dtype=dtype)
    comparison = SimpleNamespace(rounding=rounding_in(dtype, half), shapes={"w": value.shape})
    others = [value, value * (1 + repeated), value * (1 + repeated / 2)]
    allowed = ComparedCase._rounding(comparison, value, others)
    relative = allowed / torch.linalg.vector_norm(value).item()
    assert repeated < relative <= most + 20 * repeated
    assert relative > torch.finfo(half or dtype).eps / 2


def test_parameters_and_copies_that_one_side_lacks_are_off():
    weight = torch.ones(3)
    lacking = TensorComparison({"w": weight / 2}, {"w": weight}, {}, allowed=0.1)
    assert lacking.farthest(1).relative == 2
    stale = TensorComparison({"w": weight}, {"w": 2 * weight}, {"w": 2 * weight, "the copy of w": weight}, allowed=0.1)
    assert stale.farthest(1).parameter == "the copy of w"
    assert stale.explained(lambda name: []) == []
