"""Losses that units keep beside their outputs train as in one process; gradients of gradients are refused."""

import fsdp_kept_ranks
import pytest
import torch
from same_tensors import assert_same


def assert_like_one_process(results):
    for result in results:
        for case, (found, expected, gathered, hooked, ahead) in result.items():
            assert_same(found, expected, atol=1e-12)
            assert gathered == {}, case
            # Losses of earlier steps, which the list still has, are not watched again.
            assert hooked == ({1} if case[0] == "list" else set())
            assert ahead == [0, 0, 0] or case[1] == "two passes forward", case


def test_auxiliary_losses_that_blocks_keep_are_trained(ranks):
    assert_like_one_process(ranks(2).run(fsdp_kept_ranks.auxiliary_losses))


def test_lists_and_dictionaries_of_the_caller_are_changed_also_where_they_were_converted(ranks):
    for numbers, named, dtypes, trained in ranks(2).run(fsdp_kept_ranks.containers_under_bf16):
        assert numbers == [(torch.float32, True), *[(torch.float32, False)] * 3]
        assert named == [("first", True), ("last", False), ("dtypes", False)]
        # What the last block saw: converted but for what it added.
        assert dtypes == [torch.bfloat16] * 3 + [torch.float32]
        assert trained == [True] * 6


def test_gradient_penalty_is_refused_on_every_rank_and_the_next_step_is_good(ranks):
    for errors, gathered, found, expected in ranks(2).run(fsdp_kept_ranks.gradient_penalty):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        replicated = errors.pop("replicated")[1]
        assert replicated.startswith("weight got its gradient with create_graph=True, and the average over ranks is in")
        for _, message in errors.values():
            assert message == (
                "the backward pass through blocks.2 has create_graph=True, and FSDP frees the weights that a second "
                "one would need: take gradients of gradients with DDP or a ShardedOptimizer"
            )
        assert gathered.keys() <= {"blocks.2"}
        assert_same(found, expected, atol=1e-12)


@pytest.mark.multigpu
def test_auxiliary_losses_on_two_gpus(two_gpus):
    assert_like_one_process(two_gpus.run(fsdp_kept_ranks.auxiliary_losses))
