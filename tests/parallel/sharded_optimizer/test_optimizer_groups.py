"""Parameter groups: options of their own, schedulers, and groups added on the way."""

import optimizer_groups_ranks
import pytest
import torch
from optimizer_models import MODES
from same_tensors import assert_same
from torch import nn

from cs336sys.parallel.sharded_optimizer.groups import in_model_order

each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("overlap", [False, True])
def test_groups_and_a_scheduler(ranks, mode, overlap):
    expected, rates = optimizer_groups_ranks.train_groups("alone")
    for weights, seen in ranks(2).run(optimizer_groups_ranks.train_groups, mode, overlap):
        assert_same(weights, expected, atol=1e-12)
        assert seen == rates


@each_mode
@pytest.mark.parametrize(("world_size", "overlap"), [(2, True), (3, False)])
def test_group_added_and_parameters_unfrozen_on_the_way(ranks, mode, world_size, overlap):
    expected = optimizer_groups_ranks.grow("alone")
    for weights in ranks(world_size).run(optimizer_groups_ranks.grow, mode, overlap):
        assert_same(weights, expected, atol=1e-12)


@each_mode
def test_group_that_is_refused_leaves_the_optimizer_as_it_was(ranks, mode):
    for errors, groups in ranks(2).run(optimizer_groups_ranks.failed_groups, mode):
        rate, options, shape, kind, known = errors
        assert rate == ("ValueError", "AdamW: lr is -1.0, but must be at least 0")
        assert "lr=0.1, weight_decay=0.01 on rank 0, group 1 with" in options[1]
        assert "(4,) strides (1,) trained on rank 0, parameter 3 of group 1 float32 (5,)" in shape[1]
        assert "TypeError: optimizer can only optimize Tensors, but one of the params is str on rank 1" in kind[1]
        assert known[0] == "ValueError"
        assert {error[0] for error in (options, shape, kind)} == {"UsageError"}
        assert groups == 1


def test_added_group_goes_where_least_is(ranks):
    results = ranks(2).run(optimizer_groups_ranks.owners_of_groups, [[5, 3, 3], [2], [4, 4]])
    # 5 against 3 + 3; then 5 + 2 against 6; then 7 + 4 against 6 + 4, the fuller one second.
    assert results[0] == [[True, False, False], [True], [False, True]]
    assert results[1] == [[False, True, True], [False], [True, False]]


def test_groups_are_taken_to_be_spread_over_the_model():
    parameters = {name: nn.Parameter(torch.ones(1)) for name in "abcdef"}
    groups = [
        {"params": [parameters[name] for name in "abcd"], "param_names": list("abcd")},
        {"params": [parameters[name] for name in "ef"], "param_names": list("ef")},
    ]
    assert list(in_model_order(groups, None)) == list("aebcfd")
    model = nn.ParameterList([parameters[name] for name in "fedcba"])
    assert in_model_order(groups, model) == {name: parameters[name] for name in "fedcba"}
    assert list(in_model_order(groups, model)) == list("fedcba")
