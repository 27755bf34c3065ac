"""How much rounding explains: some units in the last place, and some times what other orders of summation differ by."""

from types import SimpleNamespace

import pytest
import torch

from cs336sys.experiments.verify.comparison import CaseComparison
from cs336sys.parity.rounding import rounding_in


@pytest.mark.parametrize(
    ("dtype", "half", "most"),
    [(torch.float64, None, 1e-14), (torch.float32, None, 1e-5), (torch.float32, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize("repeated", [0.0, 1e-3])
def test_rounding_explains_little(dtype, half, most, repeated):
    value = torch.ones(100, dtype=dtype)
    comparison = SimpleNamespace(rounding=rounding_in(dtype, half), shapes={"w": value.shape})
    others = [value, value * (1 + repeated), value * (1 + repeated / 2)]
    allowed = CaseComparison._rounding(comparison, value, others)
    relative = allowed / torch.linalg.vector_norm(value).item()
    assert repeated < relative <= most + 20 * repeated
    assert relative > torch.finfo(half or dtype).eps / 2
