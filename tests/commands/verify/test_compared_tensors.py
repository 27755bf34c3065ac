"""What compared tensors say: how much rounding explains, which names and slices fit, and by how much one is off."""

import math
from types import SimpleNamespace

import pytest
import torch

from cs336sys.commands.verify.comparison import ComparedCase, TensorDifference
from cs336sys.commands.verify.diagnosis import _holds_twice
from cs336sys.commands.verify.measure import _Case
from cs336sys.parity.record import RankReport, Record
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


def test_parameter_without_a_name_is_refused_by_its_name_and_not_by_that_of_unknown_slices():
    reports = [RankReport(Record(), unmatched=("c.renamed",))]
    shapes = dict.fromkeys(("a.weight", "b.weight"), torch.Size([5, 3]))
    compared = SimpleNamespace(records=[Record()], shapes=shapes, unknown={"a.weight"}, reports=reports)
    outcome = _Case._nothing_found(SimpleNamespace(), compared)
    assert outcome.derived["verdict"] == "refused"
    assert "no parameter that is the model's b.weight; c.renamed is none of the model's" in outcome.reason


def test_rows_that_several_ranks_hold_are_seen():
    rows = torch.arange(12.0).view(4, 3)
    assert not _holds_twice(rows)
    assert _holds_twice(rows[[0, 1, 0, 1]])
    assert _holds_twice(torch.tensor([1.0, 2.0, 1.0]))


@pytest.mark.parametrize(("relative", "by"), [(math.inf, "more than its size"), (0.01234, "1.23 %")])
def test_difference_without_a_finite_size_is_said_in_words(relative, by):
    difference = TensorDifference("weight", 2, "w", 0, relative, 0.0, torch.ones(3), torch.ones(3))
    assert difference.message == f"step 2, rank 0: weight of w is off by {by}"
