"""Data parallel training equals training in one process, bitwise where that is possible."""

import pytest
import torch
import torch.distributed as dist
from ddp_modes import MODES, TORCH_MODES, each_mode, finish, train, train_alone
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import Products, factors
from world_sizes import WORLD_SIZES

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ranks import launch


@on_ranks(2, gpus=True)
def test_all_modes_and_torch_train_to_bitwise_equal_weights():
    """Possible at two ranks alone: a + b is b + a, while longer sums depend on how messages are cut."""
    expected = gather_objects(train("torch"))[0]
    for mode in [*MODES, *TORCH_MODES]:
        assert_same(train(mode), expected)


@on_ranks(*WORLD_SIZES)
@each_mode
def test_mean_of_integer_gradients_is_exact(mode):
    world_size = dist.get_world_size()
    wrapped = MODES[mode](Products())
    wrapped(factors(dist.get_rank())).backward()
    finish(wrapped)
    for part, *parts in zip(wrapped.module.parts, *map(factors, range(world_size)), strict=True):
        assert torch.equal(part.grad, sum(parts) / world_size)


def train_in_fp64():
    return [train(mode, torch.float64) for mode in MODES]


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    for weights in launch.run(train_in_fp64, world_size=1, backend="nccl")[0]:
        assert_same(weights, train_alone(torch.float64), atol=1e-10)
