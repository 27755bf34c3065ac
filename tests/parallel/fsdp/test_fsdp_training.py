"""Fully sharded training equals training in one process."""

import fsdp_training_ranks
import pytest
import torch
from same_tensors import assert_same
from world_sizes import WORLD_SIZES

from cs336sys.parallel.ranks import launch

VARIANTS = {
    "plain": {},
    "fetching nothing ahead": {"prefetch": 0},
    "fetching more than there is": {"prefetch": 50},
    "accumulated": {"micro_batches": 3},
    "accumulated with communication": {"micro_batches": 3, "no_sync": False},
    "checkpointed": {"checkpoints": True},
    "evaluated with gradients before each step": {"evaluates": True},
}
THROUGH_THE_HOST = {"through the host": {"host": True}}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_equals_one_process_on_the_whole_batch(ranks, world_size):
    """Variants on two ranks; those of random training have other numbers, and prefetch and evaluate there, too."""
    expected = fsdp_training_ranks.train_alone()
    variants = VARIANTS if world_size == 2 else {"plain": {}}
    for result in ranks(world_size).run(fsdp_training_ranks.train_all, variants | THROUGH_THE_HOST):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["course", "fused", "sgd"])
def test_any_optimizer_steps_the_slices(ranks, optimizer):
    expected = fsdp_training_ranks.train_alone(optimizer)
    assert_same(ranks(2).run(fsdp_training_ranks.train, optimizer)[0], expected, atol=1e-12)


def test_training_in_fp32_equals_one_process_within_rounding(ranks):
    expected = fsdp_training_ranks.train_alone("sgd", dtype=torch.float32)
    assert_same(ranks(2).run(fsdp_training_ranks.train, "sgd", 4, torch.float32)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mean_of_integer_gradients_is_exact(ranks, world_size):
    # Products of 12 and up to 10 are exact in bf16, up to 100 in fp16.
    settings = {
        "fp32": (999, {}),
        "fp16": (100, {"compute_dtype": torch.float16}),
        "bf16": (10, {"compute_dtype": torch.bfloat16}),
        "bf16 sent in fp32": (10, {"compute_dtype": torch.bfloat16, "gradient_dtype": torch.float32}),
        "fp32 sent in bf16": (10, {"gradient_dtype": torch.bfloat16}),
    }
    results = ranks(world_size).run(fsdp_training_ranks.average_integers, settings)
    for name, (largest, _) in settings.items():
        of_ranks = [fsdp_training_ranks.factors(rank, largest) for rank in range(world_size)]
        expected = [2 * sum(parts) / world_size for parts in zip(*of_ranks, strict=True)]
        for result in results:
            assert [gradient.dtype for gradient in result[name].values()] == [torch.float32] * len(expected)
            assert all(torch.equal(*pair) for pair in zip(result[name].values(), expected, strict=True)), name


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_half_precision_gradients_are_summed_in_full_precision(ranks, world_size, compute_dtype):
    for averaged, means, of_gradients, of_slices in ranks(world_size).run(
        fsdp_training_ranks.mixed_precision, compute_dtype
    ):
        assert of_gradients == of_slices == {torch.float32}
        assert averaged.keys() == means.keys()
        for name in means:
            # Replicated gradients are summed in another order, with fp32's roundings of 2^-24; in half precision a sum
            # would be 2^-11 off.
            atol = 2**-22 * means[name].abs().max().item() if "ln" in name else 1e-9
            torch.testing.assert_close(averaged[name], means[name], rtol=0, atol=atol)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_torchs_own_trains_to_the_same_weights(ranks, compute_dtype):
    for ours, theirs in ranks(2).run(fsdp_training_ranks.beside_fully_shard, compute_dtype):
        assert_same(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.multigpu
def test_training_on_two_gpus_equals_one_process_on_the_whole_batch(two_gpus):
    expected = fsdp_training_ranks.train_alone()
    for result in two_gpus.run(fsdp_training_ranks.train_all, VARIANTS):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-10)


@pytest.mark.multigpu
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_torchs_own_trains_to_the_same_weights_on_two_gpus(two_gpus, compute_dtype):
    for ours, theirs in two_gpus.run(fsdp_training_ranks.beside_fully_shard, compute_dtype):
        assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    expected = fsdp_training_ranks.train_alone()
    (result,) = launch.run(fsdp_training_ranks.train_all, VARIANTS, world_size=1, backend="nccl")
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
