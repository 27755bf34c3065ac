"""Gradients that are missing, repeated, clipped, sparse or not finite are those of the class itself, or named."""

import math

import pytest
import torch
from on_ranks import on_ranks
from optimizer_models import each_mode, finish, network, sharded
from same_tensors import assert_same
from small_models import batch, penalized_loss, refusal_of, share, weights
from torch import nn

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


@on_ranks(2)
@each_mode
def test_sparse_gradient_is_named(mode):
    """By default without a wrapper, which would refuse it."""
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, flat=mode == "flat")

    def step():
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    message = refusal_of(step)
    assert "has a sparse gradient" in message
    assert "choose sparse=False" in message


@on_ranks(2)
@each_mode
def test_gradient_penalty_is_that_of_one_process_and_gradients_in_a_graph_are_refused(mode):
    model, alone = (network(0, torch.float64) for _ in range(2))
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=0.1)
    penalized_loss(wrapped, *map(share, batch(0, torch.float64))).backward()
    finish(wrapped)
    optimizer.step()
    penalized_loss(alone, *batch(0, torch.float64)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_same(weights(model), weights(alone), atol=1e-12)
    optimizer.zero_grad()
    message = refusal_of(wrapped(share(batch(0, torch.float64)[0])).sum().backward, create_graph=True)
    assert " got its gradient with create_graph=True, and the average over ranks is in no graph" in message


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_norm_is_that_of_all_gradients_and_nan_is_seen_by_all(mode, max_norm):
    model, alone = (network(0, torch.float64) for _ in range(2))
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=0.1)
    inputs, targets = batch(0, torch.float64)

    def clip(rows, targets):
        nn.functional.mse_loss(wrapped(rows), targets).backward()
        finish(wrapped)
        norm = optimizer.clip_grad_norm_(max_norm).item()
        assert gather_objects(str(norm)) == [str(norm)] * 2
        return norm

    nn.functional.mse_loss(alone(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm).item()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert clip(share(inputs), share(targets)) == pytest.approx(expected, rel=1e-6)
    optimizer.step()
    assert_same(weights(model), weights(alone), atol=1e-7)
    optimizer.zero_grad()
    inputs[-1] = torch.nan
    assert math.isnan(clip(share(inputs), share(targets)))
    optimizer.zero_grad()
    assert math.isfinite(clip(share(targets).new_zeros(3, 7), share(targets)[:3]))
