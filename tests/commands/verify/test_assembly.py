"""Slices that ranks hold are put together, or said not to fit."""

import math
from types import SimpleNamespace

import pytest
import torch

from cs336sys.commands.verify.comparison import TensorDifference
from cs336sys.commands.verify.diagnosis import _holds_twice
from cs336sys.commands.verify.measure import _Case
from cs336sys.parity.assembly import assemble, model_name
from cs336sys.parity.record import RankReport, Record

SHAPE = torch.Size([5, 3])
WHOLE = torch.arange(15.0).view(SHAPE)
GROUPS = [[0, 1]]


def together(*parts):
    return assemble([{"w": part} for part in parts], {"w": SHAPE}, GROUPS)


def test_rows_columns_and_flat_pieces_make_a_whole():
    flat = torch.cat([WHOLE.flatten(), torch.zeros(1)])
    for parts in (WHOLE.split([3, 2]), WHOLE.split([2, 1], dim=1), flat.split(8), (WHOLE, WHOLE)):
        whole, unknown = together(*parts)
        assert not unknown
        assert all(torch.equal(tensors["w"], WHOLE) for tensors in whole)


def test_slices_that_do_not_add_up_are_unknown():
    whole, unknown = together(WHOLE[:3], WHOLE[:3])
    assert unknown == {"w"}
    assert whole == [{}, {}]


def test_parameter_without_a_name_is_refused_by_its_name_and_not_by_that_of_unknown_slices():
    reports = [RankReport(Record(), unmatched=("c.renamed",))]
    shapes = {"a.weight": SHAPE, "b.weight": SHAPE}
    compared = SimpleNamespace(records=[Record()], shapes=shapes, unknown={"a.weight"}, reports=reports)
    outcome = _Case._nothing_found(SimpleNamespace(), compared)
    assert outcome.derived["verdict"] == "refused"
    assert "no parameter that is the model's b.weight; c.renamed is none of the model's" in outcome.reason


def test_a_rank_without_the_parameter_has_none():
    whole, unknown = assemble([{"w": WHOLE}, {}], {"w": SHAPE}, GROUPS)
    assert not unknown
    assert [set(tensors) for tensors in whole] == [{"w"}, set()]


def test_names_of_wrapped_modules_are_found_in_the_plain_one():
    names = ["layers.0.weight", "head.weight"]
    assert model_name("module.layers.0.weight", names) == "layers.0.weight"
    assert model_name("layers.0._checkpoint_wrapped_module._orig_mod.weight", names) == "layers.0.weight"
    assert model_name("adapter.weight", names) is None


def test_rows_that_several_ranks_hold_are_seen():
    rows = torch.arange(12.0).view(4, 3)
    assert not _holds_twice(rows)
    assert _holds_twice(rows[[0, 1, 0, 1]])
    assert _holds_twice(torch.tensor([1.0, 2.0, 1.0]))


@pytest.mark.parametrize(("relative", "by"), [(math.inf, "more than its size"), (0.01234, "1.23 %")])
def test_difference_without_a_finite_size_is_said_in_words(relative, by):
    difference = TensorDifference("weight", 2, "w", 0, relative, 0.0, WHOLE, WHOLE)
    assert difference.message == f"step 2, rank 0: weight of w is off by {by}"
