"""Data parallel training equals training in one process, bitwise where that is possible."""

import ddp_training_ranks
import pytest
import small_models
import torch
from ddp_modes import EVERY_MODE, MODES, TORCH_MODES
from same_tensors import assert_same
from world_sizes import WORLD_SIZES

from cs336sys.parallel.ranks import launch


def test_all_modes_and_torch_train_to_bitwise_equal_weights_on_two_ranks(ranks):
    """Possible at two ranks alone: a + b is b + a, while longer sums depend on how messages are cut."""
    results = ranks(2).run(ddp_training_ranks.train_all, [*MODES, *TORCH_MODES])
    for result in results:
        for weights in result.values():
            assert_same(weights, results[0]["torch"])


def test_training_in_fp32_equals_one_process_within_rounding(ranks):
    expected = ddp_training_ranks.train_alone()
    for weights in ranks(2).run(ddp_training_ranks.train_all, EVERY_MODE)[0].values():
        assert_same(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mean_of_integer_gradients_is_exact(ranks, world_size):
    expected = [sum(parts) / world_size for parts in zip(*map(small_models.factors, range(world_size)), strict=True)]
    for result in ranks(world_size).run(ddp_training_ranks.average_integers):
        for mode in EVERY_MODE:
            assert all(torch.equal(ours, exact) for ours, exact in zip(result[mode], expected, strict=True)), mode


@pytest.mark.multigpu
def test_all_modes_and_torch_train_to_bitwise_equal_weights_on_two_gpus(two_gpus):
    for result in two_gpus.run(ddp_training_ranks.train_all, [*MODES, *TORCH_MODES]):
        for weights in result.values():
            assert_same(weights, result["torch"])


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    expected = ddp_training_ranks.train_alone(torch.float64)
    (result,) = launch.run(ddp_training_ranks.train_all, EVERY_MODE, torch.float64, world_size=1, backend="nccl")
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
