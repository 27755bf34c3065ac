"""Gradients that are missing, repeated, clipped, scaled or not finite are those of the class itself, or named."""

import math

import optimizer_gradients_ranks
import pytest
import small_models
import torch
from optimizer_models import MODES
from same_tensors import assert_same, dict_of

each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_is_left_alone(ranks, mode, world_size):
    model = small_models.PartlyUsed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    whole = sum(12.0 * (rank + 1) for rank in range(world_size)) / world_size
    expected = []
    for sometimes in (whole, 12.0 / world_size, None):
        optimizer.zero_grad()
        model.used.grad = torch.full((3,), whole)
        model.sometimes.grad = None if sometimes is None else torch.full((3,), sometimes)
        optimizer.step()
        expected.append(small_models.weights(model))
    steps = {}
    for history, own_steps in ranks(world_size).run(optimizer_gradients_ranks.unused_parameters, mode):
        for after, exact in zip(history, expected, strict=True):
            assert_same(after, exact, rtol=1e-6)
        steps |= own_steps
    assert steps == {"used": 3, "sometimes": 2}


@each_mode
def test_backward_function_that_returns_none_counts_as_zero(ranks, mode):
    for weights in ranks(2).run(optimizer_gradients_ranks.none_gradient, mode):
        assert_same(weights, dict_of(used=-1.0, sometimes=-1.0, never=1.0))


def test_second_backward_is_an_error_and_the_next_step_is_good(ranks):
    for (kind, message), weights in ranks(2).run(optimizer_gradients_ranks.second_backward):
        assert kind == "UsageError"
        assert "got a gradient from a second backward pass before finish_gradient_synchronization()" in message
        assert "no_sync()" in message
        assert_same(weights, dict_of(used=-2.0, sometimes=-2.0, never=1.0))


@each_mode
def test_sparse_gradient_is_named(ranks, mode):
    for kind, message in ranks(2).run(optimizer_gradients_ranks.sparse_gradient, mode):
        assert kind == "UsageError"
        assert "has a sparse gradient" in message
        assert "choose sparse=False" in message


def test_gradient_scaler_steps_and_skips_alike_on_all_ranks(ranks):
    for (good, scale), (skipped, smaller) in ranks(2).run(optimizer_gradients_ranks.scaled_steps):
        assert good.tolist() == skipped.tolist() == [-1.0] * 3
        assert (scale, smaller) == (4.0, 2.0)


@each_mode
def test_gradient_penalty_is_that_of_one_process_and_gradients_in_a_graph_are_refused(ranks, mode):
    expected = optimizer_gradients_ranks.penalized_alone()
    for weights, (kind, message) in ranks(2).run(optimizer_gradients_ranks.gradient_penalty, mode):
        assert_same(weights, expected, atol=1e-12)
        assert kind == "UsageError"
        assert " got its gradient with create_graph=True, and the average over ranks is in no graph" in message


@each_mode
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_norm_is_that_of_all_gradients_and_nan_is_seen_by_all(ranks, mode, max_norm):
    expected, weights = optimizer_gradients_ranks.clipped_alone(max_norm)
    results = ranks(2).run(optimizer_gradients_ranks.clipped, mode, max_norm)
    for norm, after, bad, skipped, good in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert (norm, good) == (results[0][0], results[0][4])
        assert_same(after, weights, atol=1e-7)
        assert math.isnan(bad)
        assert math.isfinite(good)
        assert_same(skipped, after)


@each_mode
def test_nan_of_one_rank_is_in_the_parameters_of_all(ranks, mode):
    for weights in ranks(2).run(optimizer_gradients_ranks.not_a_number, mode):
        assert weights.isnan().all()
