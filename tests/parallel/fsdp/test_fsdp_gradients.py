"""Gradients that are missing, frozen, accumulated, clipped or not finite are those of one process."""

import fsdp_gradients_ranks
import pytest
import torch
from same_tensors import assert_same


def mean(parts):
    """Over ranks; None counts as zero, and is the result if there is nothing else."""
    given = [part for part in parts if part is not None]
    return sum(given) / len(parts) if given else None


def means(results):
    return {name: mean([result[name] for result in results]) for name in results[0]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one(ranks, world_size):
    everywhere = tuple(range(world_size))
    cases = [(everywhere, False), ((0,), False), ((world_size - 1,), False), ((), False), (everywhere, True)]
    results = ranks(world_size).run(fsdp_gradients_ranks.unused, cases)
    for case in range(len(cases)):
        expected = means([result[case][1] for result in results])
        assert expected["blocks.0.never.weight"] is None
        assert (expected["blocks.0.sometimes.weight"] is None) == (cases[case][0] == ())
        assert (expected["blocks.2.always.weight"] is None) == cases[case][1]
        for result in results:
            assert_same(result[case][0], expected)


def test_zeros_that_zero_grad_left_stay_zeros(ranks):
    for found in ranks(2).run(fsdp_gradients_ranks.unused_keeps_what_was_there):
        assert all(gradient is not None for gradient in found.values())
        assert not found["blocks.0.never.weight"].any()


def test_gradient_of_any_pass_of_a_step_stays(ranks):
    for found in ranks(2).run(fsdp_gradients_ranks.used_in_the_second_of_three_passes):
        assert found["blocks.0.sometimes.weight"].any()
        assert found["blocks.0.never.weight"] is None


def test_parameter_unfrozen_is_an_error_until_refresh(ranks):
    names = {f"blocks.{block}.{part}" for block in range(3) for part in ("always.weight", "sometimes.weight", "gain")}
    for before, after, whole, errors in ranks(2).run(fsdp_gradients_ranks.freeze_and_unfreeze):
        assert before == names - {"blocks.0.always.weight", "blocks.1.gain"}
        assert after == names - {"blocks.2.sometimes.weight"}
        assert all(whole[name] is not None for name in after)
        (kind, message), (refused, difference) = errors
        assert (kind, refused) == ("UsageError", "UsageError")
        assert message == "blocks.0.always.weight was unfrozen after it was wrapped: call refresh() on every rank"
        assert "blocks.2.always.weight float32 (3, 3) strides (3, 1) trained on rank 0, " in difference


def test_gradients_pass_through_layers_that_have_none(ranks):
    for found, expected in ranks(2).run(fsdp_gradients_ranks.through_frozen_layers):
        assert [torch.equal(gradient, expected) for gradient in found] == [True, True]


def test_no_sync_sends_nothing_until_the_last_pass_or_finish(ranks):
    results = ranks(2).run(fsdp_gradients_ranks.accumulation)[0]
    for compute_dtype in (None, torch.bfloat16):
        of_dtype = [result for result in results if result[0] == compute_dtype]
        *_, expected = next(result for result in of_dtype if all(result[1]))
        for _, synchronized, reductions, found in of_dtype:
            # Units: the embedding, three blocks, the head.
            assert reductions == 5 * max(1, sum(synchronized)), synchronized
            # Kept gradients are summed in fp32 here and by autograd: the order of additions differs.
            assert_same(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("norm_type", "largest"), [(2.0, 0.1), (1.0, 0.5), (float("inf"), 0.01), (2.0, 1e9)])
def test_clipping_is_that_of_the_whole_gradient(ranks, world_size, norm_type, largest):
    for norm, expected, sharded, alone in ranks(world_size).run(fsdp_gradients_ranks.clipped, norm_type, largest):
        torch.testing.assert_close(norm, expected)
        assert_same(sharded, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(ranks, value):
    for error, before, after, norm, infinite in ranks(2).run(fsdp_gradients_ranks.not_a_number, value):
        assert error == (
            "RuntimeError",
            f"the norm of the gradients is {value}: some are NaN or infinite, on some rank",
        )
        assert_same(before, after, equal_nan=True)
        assert not norm.isfinite()
        assert not infinite.isfinite()


@pytest.mark.multigpu
def test_clipping_and_accumulation_on_two_gpus(two_gpus):
    for norm, expected, sharded, alone in two_gpus.run(fsdp_gradients_ranks.clipped, 2.0, 0.1):
        torch.testing.assert_close(norm, expected)
        assert_same(
            sharded,
            alone,
            rtol=1e-8,
            atol=1e-10,
        )
    results = two_gpus.run(fsdp_gradients_ranks.accumulation)[0]
    for compute_dtype in (None, torch.bfloat16):
        found = {synchronized: whole for dtype, synchronized, _, whole in results if dtype == compute_dtype}
        for whole in found.values():
            assert_same(whole, found[True, True, True], rtol=1e-3, atol=1e-5)
