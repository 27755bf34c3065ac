"""Parameter groups: options of their own, schedulers, and groups added on the way."""

import pytest
import torch
import torch.distributed as dist
from cs336_basics.optimizer import AdamW
from on_ranks import on_ranks
from optimizer_models import each_mode, finish, network, sharded, train_step, wait_for_parameters
from same_tensors import assert_same
from small_models import PartlyUsed, error_of, refusal_of, weights
from torch import nn

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def train_groups(mode, overlap=False):
    """Weights and options of training matrices that decay and vectors that do not, with a scheduler for both."""
    model, options = network(0, torch.float64), []
    matrices, vectors = (
        [(name, p) for name, p in model.named_parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05, "betas": (0.8, 0.9)}]
    wrapped, optimizer = sharded(mode, model, overlap=overlap, params=groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=8)
    for step in range(6):
        train_step(wrapped, optimizer, step, torch.float64)
        scheduler.step()
        options.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])
    wait_for_parameters(optimizer)
    return weights(model), options


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("overlap", [False, True])
def test_groups_and_a_scheduler(mode, overlap):
    expected, expected_options = train_groups("alone")
    trained, options = train_groups(mode, overlap)
    assert_same(trained, expected, atol=1e-12)
    assert options == expected_options


@on_ranks(2)
@each_mode
def test_group_that_is_refused_leaves_the_optimizer_as_it_was(mode):
    model, other, is_first = PartlyUsed(), nn.Parameter(torch.ones(4)), dist.get_rank() == 0
    wrapped, optimizer = sharded(mode, model, AdamW, lr=0.01)
    rate = ("ValueError", "AdamW: lr is -1.0, but must be at least 0")
    assert error_of(optimizer.add_param_group, {"params": [other], "lr": -1.0}) == rate
    for group, difference in (
        ({"params": [other], "lr": 0.1 if is_first else 0.2}, "lr=0.1, weight_decay=0.01 on rank 0, group 1 with"),
        (
            {"params": [other if is_first else nn.Parameter(torch.ones(5))]},
            "(4,) strides (1,) trained on rank 0, parameter 3 of group 1 float32 (5,)",
        ),
        (
            {"params": [other if is_first else "weight"]},
            "TypeError: optimizer can only optimize Tensors, but one of the params is str on rank 1",
        ),
    ):
        assert difference in refusal_of(optimizer.add_param_group, group)
    assert error_of(optimizer.add_param_group, {"params": [model.used]})[0] == "ValueError"
    wrapped(1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_added_group_goes_where_least_is():
    groups = [[nn.Parameter(torch.ones(size)) for size in sizes] for sizes in ([5, 3, 3], [2], [4, 4])]
    optimizer = ShardedOptimizer(groups[0], torch.optim.SGD, lr=1.0)
    for group in groups[1:]:
        optimizer.add_param_group({"params": group})
    owned = {id(parameter) for parameter in optimizer.own_tensors}
    first, second = gather_objects([[id(parameter) in owned for parameter in group] for group in groups])
    # 5 against 3 + 3; then 5 + 2 against 6; then 7 + 4 against 6 + 4, the fuller one second.
    assert first == [[True, False, False], [True], [False, True]]
    assert second == [[False, True, True], [False], [True, False]]
