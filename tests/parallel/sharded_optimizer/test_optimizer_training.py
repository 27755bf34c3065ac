"""Training with a sharded optimizer equals training with the class itself, in either mode."""

import optimizer_models
import optimizer_training_ranks
import pytest
import small_models
import torch
from optimizer_models import CLASSES, MODES
from same_tensors import assert_same, assert_same_state, dict_of
from torch import nn
from world_sizes import WORLD_SIZES

from cs336sys.parallel.ranks import launch

each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_equals_the_class_on_one_process(ranks, world_size):
    names = [name for name in CLASSES if name != "Adafactor"] if world_size == 2 else ["AdamW", "SGD"]
    results = ranks(world_size).run(optimizer_training_ranks.train_all, names, MODES, torch.float64)
    for name in names:
        expected, _ = optimizer_training_ranks.train_alone(name, torch.float64)
        for result in results:
            for mode in MODES:
                for overlap in (False, True):
                    assert_same(result[name, mode, overlap], expected, atol=1e-12)


def test_whole_parameters_serve_a_class_that_mixes_elements(ranks):
    expected, _ = optimizer_training_ranks.train_alone("Adafactor", torch.float64)
    for result in ranks(2).run(optimizer_training_ranks.train_all, ["Adafactor"], ["default"], torch.float64):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


def test_both_modes_and_torch_train_to_bitwise_equal_weights_on_two_ranks(ranks):
    expected = ranks(2).run(optimizer_training_ranks.torch_zero, 4)[0]
    for result in ranks(2).run(optimizer_training_ranks.train_all, ["AdamW"]):
        for weights in result.values():
            assert_same(weights, expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each_mode
def test_step_along_integer_gradients_is_exact(ranks, mode, world_size):
    parts = zip(*map(small_models.factors, range(world_size)), strict=True)
    expected = [-sum(part) / world_size for part in parts]
    for result in ranks(world_size).run(
        optimizer_training_ranks.step_of_integers, mode, [1e-9, optimizer_models.SMALL_MB, None]
    ):
        for parameters in result.values():
            assert all(torch.equal(ours, exact) for ours, exact in zip(parameters, expected, strict=True))


@each_mode
def test_closure_runs_once_with_gradients_on_every_rank(ranks, mode):
    for rank, (loss, calls, weights) in enumerate(ranks(2).run(optimizer_training_ranks.closure_step, mode)):
        assert loss == 12.0 * (rank + 1)
        assert calls == [True]
        assert_same(weights, dict_of(used=-2.0, sometimes=-2.0, never=1.0))


@each_mode
def test_step_takes_the_class_arguments_and_calls_hooks(ranks, mode):
    for weights, calls, seen in ranks(2).run(optimizer_training_ranks.step_arguments_and_hooks, mode):
        assert_same(weights, dict_of(used=-0.5, sometimes=-0.5, never=1.0))
        assert calls == 1 or mode == "flat"
        assert seen == [("pre", {"factor": 0.5}), ("post", {"factor": 0.5})]


@each_mode
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"foreach": True}])
def test_fewer_parameters_than_ranks(ranks, mode, options):
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for step in range(2):
        model.weight.grad = torch.full((1, 3), 2.0 * (step + 1))
        optimizer.step()
    results = ranks(3).run(optimizer_training_ranks.few_parameters, mode, options)
    for weight, _ in results:
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-6, atol=0)
    assert [states for _, states in results] == [1, 0, 0]


@each_mode
def test_start_values_are_those_of_the_first_rank(ranks, mode):
    first, second = ranks(2).run(optimizer_training_ranks.start_values, mode)
    assert first == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert second == ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])


def test_master_parameters_carry_what_bf16_rounds_away(ranks):
    expected, masters = optimizer_training_ranks.with_masters_by_hand(5)
    straight = ranks(2).run(optimizer_training_ranks.with_masters, 5, None)
    for _, weights, _ in straight:
        assert_same(weights, expected)
    states = straight[0][2]["state"]
    assert len(states) == len(masters)
    for state, master in zip(states.values(), masters, strict=True):
        assert state["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(state["master_parameter"], master, rtol=0, atol=0)
        assert not torch.equal(master, master.bfloat16().float())
    for (losses, weights, _), (resumed, same, _) in zip(
        straight, ranks(2).run(optimizer_training_ranks.with_masters, 5, 2), strict=True
    ):
        assert losses == resumed
        assert_same(same, weights)


@each_mode
def test_parameters_that_are_not_contiguous(ranks, mode):
    expected, state = optimizer_training_ranks.permuted_alone()
    for weights, consolidated in ranks(2).run(optimizer_training_ranks.permuted_parameters, mode):
        assert_same(weights, expected, rtol=1e-6)
        if consolidated is not None:
            assert_same_state(consolidated, state, rtol=1e-5, atol=1e-7)


@pytest.mark.multigpu
def test_both_modes_and_torch_train_to_bitwise_equal_weights_on_two_gpus(two_gpus):
    expected = two_gpus.run(optimizer_training_ranks.torch_zero, 4)[0]
    for result in two_gpus.run(optimizer_training_ranks.train_all, ["AdamW"]):
        for weights in result.values():
            assert_same(weights, expected)


@pytest.mark.gpu
def test_fused_step_on_one_gpu_equals_the_class():
    (result,) = launch.run(
        optimizer_training_ranks.train_all, ["AdamW fused"], MODES, torch.float64, 4, world_size=1, backend="nccl"
    )
    expected, _ = optimizer_training_ranks.train_alone("AdamW", torch.float64)
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
