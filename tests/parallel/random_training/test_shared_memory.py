"""What was once wrong without a word: each test failed before the code that it guards was written."""

import pytest
import shared_memory_ranks
import torch
from shared_memory_ranks import WRAPPERS

KINDS = ["embedding", "sum of views"]
HOWS = ["frozen unit", "unit without gradients", "vectors alone"]


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "optimizer-flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_share_memory_are_not_averaged_in_it(ranks, kind, wrapper):
    for world_size in (2, 3):
        for errors in ranks(world_size).run(shared_memory_ranks.shared_memory, kind, wrapper):
            assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_that_share_memory_are_not_accumulated_in_it(ranks, wrapper):
    for errors in ranks(2).run(shared_memory_ranks.accumulated_in_shared_memory, wrapper):
        assert max(errors.values()) < 1e-12, errors


def test_gradients_that_share_memory_are_not_divided_in_it(ranks):
    for errors in ranks(2).run(shared_memory_ranks.divided_in_shared_memory):
        assert max(errors.values()) < 0.01, errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_gradient_of_a_transformer_is_copied_for_it(ranks, wrapper):
    assert ranks(2).run(shared_memory_ranks.copies_of_a_transformer, wrapper) == [0, 0]


@pytest.mark.parametrize("how", HOWS)
def test_fsdp_averages_replicated_gradients_whatever_the_backward_pass_went_through(ranks, how):
    assert max(ranks(2).run(shared_memory_ranks.without_a_unit_in_the_backward_pass, how)) < 1e-12


@pytest.mark.multigpu
def test_gradients_are_the_mean_on_two_gpus(two_gpus):
    for errors in two_gpus.run(shared_memory_ranks.on_gpus, KINDS, HOWS):
        assert max(errors.values()) < 1e-12, errors


def test_flat_gradients_of_a_layer_that_was_frozen_are_not_taken_for_anothers(ranks):
    assert all(ranks(2).run(shared_memory_ranks.frozen_after_training))


def test_a_gradient_of_the_flat_buckets_size_is_not_taken_for_it(ranks):
    assert max(ranks(2).run(shared_memory_ranks.slices_of_one_gradient)) < 1e-12


@pytest.mark.parametrize("wrapper", ["naive", "flat", "overlap", "bucketed"])
def test_gradients_in_the_dtype_they_are_sent_in_are_averaged_where_they_are(ranks, wrapper):
    for found in ranks(2).run(shared_memory_ranks.rows_of_one_half_gradient, wrapper):
        assert found["off"] < 0.01
        assert found["dtypes"] == [torch.bfloat16, torch.bfloat16, torch.float32]
        # Flat buckets are one memory; otherwise only a bucket of both layers may leave its rows in theirs.
        assert found["one memory"] == (wrapper in ("flat", "bucketed"))


def test_gradient_that_cannot_be_averaged_is_refused_on_every_rank(ranks):
    for said in ranks(2).run(shared_memory_ranks.refusals):
        assert said["nested"] == "0 (BucketedDDP) is wrapped already: wrap the plain module"
        assert said["an old wrapper alive"].startswith("weight has its gradient averaged already")
        assert said["an old wrapper gone"] == "nothing"
        assert said["over FSDP"] == "the module (FSDP) is wrapped already: wrap the plain module"
        assert said["inside of FSDP"] == "the module (Sequential) is wrapped already: wrap the plain module"
        for wrapper in ("naive", "flat", "fsdp", "optimizer"):
            assert said[f"grad_dtype, {wrapper}"].startswith(
                "weight is in torch.float32 and has grad_dtype torch.float64"
            )
        assert "ranks differ" in said["grad_dtype, one rank"]
