"""Modules that use weights and arguments in unusual ways, and unusual orders of passes, train as in one process."""

import fsdp_unusual_ranks
import pytest
import torch
from same_tensors import assert_same

NAMES = [*fsdp_unusual_ranks.MODELS]
NAMES += [f"{name} {variant}" for name in ("TiedByHand", "PenaltyOnAll") for variant in fsdp_unusual_ranks.SETTINGS]


@pytest.fixture(scope="module")
def trained(ranks):
    return ranks(2).run(fsdp_unusual_ranks.unusual_models)


@pytest.mark.parametrize("name", NAMES)
def test_module_gets_the_gradients_of_one_process(trained, name):
    for results in trained:
        (sharded, alone), gathered, holds_slices = results[name]
        assert_same(sharded, alone, atol=1e-14)
        assert gathered == {}
        assert holds_slices


def test_module_evaluates_as_one_process_does(ranks):
    for results in ranks(2).run(fsdp_unusual_ranks.evaluated):
        for name, (wrapped, inner, _, gathered) in results.items():
            assert (wrapped, inner) == pytest.approx((0, 0), abs=1e-14), name
            assert gathered == {}


def test_weight_used_outside_of_its_layer_in_several_passes(ranks):
    for sharded, alone in ranks(2).run(fsdp_unusual_ranks.several_passes_through_lent_weights):
        assert_same(sharded, alone, atol=1e-14)


def test_passes_in_one_autocast_context_leave_no_gradient_behind(ranks):
    for sharded, alone in ranks(2).run(fsdp_unusual_ranks.under_autocast):
        assert_same(sharded, alone, atol=1e-2, rtol=3e-2)


def test_bias_held_twice_has_the_dtype_of_its_weight(ranks):
    for has_gradient in ranks(2).run(fsdp_unusual_ranks.bias_held_twice_in_half_precision):
        assert all(has_gradient.values())


def test_inputs_that_are_converted_may_be_changed_in_place(ranks):
    for sharded, alone in ranks(2).run(fsdp_unusual_ranks.inputs_changed_in_place_in_half_precision):
        sharded = {name: gradient.double() for name, gradient in sharded.items()}
        assert_same(sharded, alone, atol=3e-2, rtol=1e-1)


def test_two_wrapped_modules_in_one_graph(ranks):
    for results in ranks(2).run(fsdp_unusual_ranks.two_modules_in_one_graph):
        for sharded, alone in results:
            assert_same(sharded, alone, atol=1e-15)


def test_whoever_drops_gradients_drops_those_kept_under_no_sync(ranks):
    for results in ranks(2).run(fsdp_unusual_ranks.gradients_kept_and_dropped):
        for sharded, alone in results.values():
            assert_same(sharded, alone, atol=1e-15)


@pytest.mark.parametrize("keep_gathered", [0, 2])
def test_layers_called_alone_use_slices_that_changed_after_a_forward_pass(ranks, keep_gathered):
    for results, sharded, alone in ranks(2).run(fsdp_unusual_ranks.layers_called_alone, keep_gathered):
        for found, expected in results:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert_same(sharded, alone, atol=1e-14)


def test_refresh_refuses_gradients_kept_under_no_sync_until_they_are_dropped(ranks):
    for results in ranks(2).run(fsdp_unusual_ranks.refreshed_after_dropping):
        for how, (error, sharded, alone) in results.items():
            assert (error is None) == (how in ("none", "zeros")), how
            assert error is None or "no_sync() have left gradients to average" in error[1]
            assert_same(sharded, alone, atol=1e-15)


def test_gradients_dropped_between_forward_and_backward_are_gone(ranks):
    for results in ranks(2).run(fsdp_unusual_ranks.gradients_dropped_between):
        for sharded, alone in results:
            assert_same(sharded, alone, atol=1e-15)


def test_discarded_pass_and_frozen_module_leave_no_zeros(ranks):
    for spare, trained in ranks(2).run(fsdp_unusual_ranks.discarded_pass):
        assert spare is None
        assert trained == [[True] * 4, [False] * 4] * 2


def test_second_loss_after_a_failed_backward_pass_keeps_its_gradients(ranks):
    for holds_slices, (sharded, alone) in ranks(2).run(fsdp_unusual_ranks.second_loss_after_a_failed_backward_pass):
        assert all(holds_slices)
        assert_same(sharded, alone, atol=1e-15)


def test_buffers_of_all_dtypes_are_rank_0s_and_sparse_ones_are_refused(ranks):
    for values, error in ranks(2).run(fsdp_unusual_ranks.buffers_of_all_kinds):
        assert {number for numbers in values.values() for number in numbers} == {1}
        assert error == (
            "UsageError",
            "sparse is sparse, which cannot be sent to other ranks: make it dense by to_dense()",
        )
