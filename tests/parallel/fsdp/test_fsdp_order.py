"""Gathers come ahead of use and reductions during the backward pass, in one order on all ranks, whoever comes late."""

import fsdp_order_ranks
import fsdp_training_ranks
import pytest
import torch
from same_tensors import assert_same

UNITS = ["token_embeddings", "layers.0", "layers.1", "lm_head"]
NORMS = ", ".join([*(f"layers.{layer}.ln{n}.weight" for layer in (0, 1) for n in (1, 2)), "ln_final.weight"])


@pytest.mark.parametrize(("compute_dtype", "reduction"), [(None, "reduce-scatter"), (torch.bfloat16, "all-to-all")])
def test_gathers_come_ahead_of_use_and_reductions_in_the_backward_pass(ranks, compute_dtype, reduction):
    embedding, first, second, head = UNITS
    expected_forward = [("all-gather", unit) for unit in UNITS]
    expected_backward = [
        # The head is still there; the block before it was gathered while the head ran forward.
        ("all-gather", first),
        (reduction, head),
        ("all-gather", embedding),
        (reduction, second),
        (reduction, first),
        # The backward pass ends.
        (reduction, embedding),
    ]
    for forward, backward, late, evaluation in ranks(2).run(fsdp_order_ranks.launches, compute_dtype, 1):
        assert forward == [*expected_forward, ("all-gather", second)]
        assert backward == expected_backward
        # Every rank finishes a step, but not every backward pass comes through a unit that could tell its end.
        assert late == [("all-reduce", NORMS)]
        assert evaluation == 2 * expected_forward


def test_nothing_is_gathered_ahead_of_use_if_so_asked(ranks):
    embedding, first, second, _ = UNITS
    forward, backward, _, evaluation = ranks(2).run(fsdp_order_ranks.launches, None, 0)[0]
    assert forward == [("all-gather", unit) for unit in UNITS]
    assert evaluation == 2 * forward
    gathers = [unit for collective, unit in backward if collective == "all-gather"]
    assert gathers == [second, first, embedding]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_kept_weights_are_not_gathered_again(ranks, prefetch):
    embedding, first, second, head = UNITS
    for forward, backward, _, evaluation in ranks(2).run(fsdp_order_ranks.launches, None, prefetch, 1):
        assert forward == [("all-gather", unit) for unit in UNITS]
        assert [unit for collective, unit in backward if collective == "all-gather"] == [first, embedding]
        assert [unit for collective, unit in backward if collective == "reduce-scatter"] == [
            head, second, first, embedding
        ]  # fmt: skip
        # Without gradients nothing stays.
        assert evaluation == 2 * [("all-gather", unit) for unit in UNITS]


@pytest.mark.parametrize(("prefetch", "keep_gathered"), [(1, 0), (2, 0), (1, 2), (0, 9)])
def test_order_of_units_may_change(ranks, prefetch, keep_gathered):
    """What was fetched in vain is freed, gradients are right, and each unit reduces once, however often it is used."""
    orders = ["012345", "543210", "5432", "0", "010123", "012345", "012345", "024", "135"]
    orders = [[int(index) for index in order] for order in orders]
    for result in ranks(2).run(fsdp_order_ranks.changing_order, orders, prefetch, keep_gathered):
        for order, (most, sharded, expected, reductions) in zip(orders, result, strict=True):
            assert most <= 1 + prefetch + (1 + keep_gathered if keep_gathered else 0)
            assert_same(sharded, expected, atol=1e-14)
            assert sorted(reductions) == [f"blocks.{index}" for index in sorted(set(order))]


def test_weights_are_cast_and_gradients_averaged_beside_the_current_stream(ranks):
    """Waiting is "communicate", too: for the weights on the stream that computes, for half precision on another."""
    gather = ["side waits for main", "on side", "communicate", "off side", "communicate"]
    notes, gradient = ranks(2).run(fsdp_order_ranks.side_streams, torch.bfloat16)[0]
    exchange = ["communicate", "mean waits for main", "on mean", "communicate", "off mean", "main waits for mean"]
    # The one unit is the last: it is kept for the backward pass from the second step on.
    assert notes == [*gather, *gather, *exchange]
    assert gradient.any()
    notes, _ = ranks(2).run(fsdp_order_ranks.side_streams, None)[0]
    assert notes == [*gather, *gather, "communicate", "communicate"]


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(fsdp_order_ranks.trained_without_delays)[0]
    for seed in range(3):
        for result in ranks(2).run(fsdp_order_ranks.train_with_delays, seed):
            for delayed, undisturbed in zip(result, expected, strict=True):
                assert_same(delayed, undisturbed)


def test_lateness_is_told_for_every_gather(ranks):
    for timings in ranks(2).run(fsdp_order_ranks.timings):
        embedding, first, second, head = UNITS
        forward = [(name, False) for name in (embedding, first, second, head)]
        assert [(name, is_backward) for name, is_backward, _ in timings] == [
            *forward,
            *((name, True) for name in (second, first, embedding)),
        ]
        assert all(late_ms >= 0 for *_, late_ms in timings)


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus(two_gpus):
    expected = two_gpus.run(fsdp_order_ranks.trained_without_delays)[0]
    for seed in range(5):
        for result in two_gpus.run(fsdp_order_ranks.train_with_delays, seed):
            for delayed, undisturbed in zip(result, expected, strict=True):
                # Sums by atomic additions differ in the last places, here and there by one rounding to half precision.
                assert_same(delayed, undisturbed, rtol=1e-3, atol=1e-4)


@pytest.mark.multigpu
@pytest.mark.parametrize(("compute_dtype", "reduction"), [(None, "reduce-scatter"), (torch.bfloat16, "all-to-all")])
def test_half_precision_gradients_are_summed_in_full_precision_on_two_gpus(two_gpus, compute_dtype, reduction):
    _, backward, late, _ = two_gpus.run(fsdp_order_ranks.launches, compute_dtype, 1)[0]
    assert [collective for collective, _ in backward].count(reduction) == len(UNITS)
    assert late == [("all-reduce", NORMS)]
    if compute_dtype:
        for averaged, means, of_gradients, _ in two_gpus.run(fsdp_training_ranks.mixed_precision, compute_dtype):
            assert of_gradients == {torch.float32}
            assert_same(averaged, means, rtol=1e-5, atol=1e-6)


@pytest.mark.multigpu
def test_lateness_is_told_on_two_gpus(two_gpus):
    for timings in two_gpus.run(fsdp_order_ranks.timings):
        assert [name for name, *_ in timings] == [*UNITS, *UNITS[-2::-1]]
        assert all(abs(late_ms) < 1000 for *_, late_ms in timings)
