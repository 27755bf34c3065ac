"""Gradients that are missing, repeated, kept apart, of several dtypes or not finite are averaged, or named."""

import ddp_gradients_ranks
import pytest
import torch
from ddp_modes import EVERY_MODE
from same_tensors import assert_same, dict_of


def means(results):
    """Mean over ranks of dictionaries of tensors."""
    return {name: sum(result[name] for result in results) / len(results) for name in results[0]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one(ranks, world_size):
    whole = sum(12.0 * (rank + 1) for rank in range(world_size)) / world_size
    for result in ranks(world_size).run(ddp_gradients_ranks.unused_on_some_ranks):
        for mode in EVERY_MODE:
            on_all, on_first, on_none = result[mode]
            assert_same(on_first, dict_of(used=whole, sometimes=12.0 / world_size, never=None))
            assert_same(on_all, dict_of(used=whole, sometimes=whole, never=None))
            assert_same(on_none, dict_of(used=whole, sometimes=None, never=None))


def test_backward_function_that_returns_none_counts_as_zero(ranks):
    for result in ranks(2).run(ddp_gradients_ranks.none_gradients):
        for mode in EVERY_MODE:
            assert_same(result[mode], dict_of(used=2.0, sometimes=2.0, never=None))


def test_second_backward_is_an_error_in_every_mode_and_the_next_step_is_good(ranks):
    for result in ranks(2).run(ddp_gradients_ranks.second_backward):
        for mode in EVERY_MODE:
            errors, averaged = result[mode]
            for kind, message in errors:
                assert kind == "UsageError"
                assert "got a gradient from a second backward pass before finish_gradient_sync" in message
                assert "no_sync()" in message
            assert_same(averaged, dict_of(used=3.0, sometimes=3.0, never=None))


def test_no_sync_keeps_gradients_apart_until_finish(ranks):
    for rank, result in enumerate(ranks(2).run(ddp_gradients_ranks.accumulate_without_the_last_pass)):
        for mode in EVERY_MODE:
            error, once, alone, averaged = result[mode]
            assert error[0] == "UsageError"
            assert_same(once, dict_of(used=18.0, sometimes=18.0, never=None))
            assert_same(alone, dict_of(used=12.0 * (rank + 1), sometimes=12.0 * (rank + 1), never=None))
            assert_same(averaged, once)


def test_each_dtype_is_averaged_exactly_in_its_own(ranks):
    for result in ranks(2).run(ddp_gradients_ranks.mixed_dtypes, 2.0):
        for mode in EVERY_MODE:
            averaged, sent = result[mode]
            assert [gradient.dtype for gradient in averaged] == list(ddp_gradients_ranks.MixedDtypes.DTYPES)
            assert all((gradient == 3.0).all() for gradient in averaged)
            assert len(sent) == (6 if mode in ("naive", "overlap") else 4)


def test_parameters_that_are_not_contiguous(ranks):
    results = ranks(2).run(ddp_gradients_ranks.permuted_parameters)
    for mode in EVERY_MODE:
        expected = means([result[mode][1] for result in results])
        for averaged, _, weights in (result[mode] for result in results):
            assert_same(averaged, expected)
            assert_same(weights, results[0][mode][2])


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float64])
def test_gradient_dtype_is_sent_and_the_result_keeps_its_own(ranks, gradient_dtype):
    results = ranks(2).run(ddp_gradients_ranks.smaller_traffic, gradient_dtype)
    for mode in EVERY_MODE:
        sent = [
            {name: gradient.to(gradient_dtype) for name, gradient in result[mode][1].items() if gradient is not None}
            for result in results
        ]
        expected = {name: mean.to(torch.float32) for name, mean in means(sent).items()}
        for averaged, _, launches in (result[mode] for result in results):
            assert_same({name: averaged[name] for name in expected}, expected)
            assert all(dtype == gradient_dtype and len(elements) == 1 for _, elements, dtype in launches)


def test_nan_of_one_rank_is_seen_by_all(ranks):
    for result in ranks(2).run(ddp_gradients_ranks.not_a_number):
        for mode in EVERY_MODE:
            assert result[mode]["used"].isnan().all()


def test_sparse_gradient_is_named(ranks):
    for result in ranks(2).run(ddp_gradients_ranks.sparse_gradient):
        assert set(result.values()) == {
            ("UsageError", "weight has a sparse gradient, which cannot be averaged: choose sparse=False")
        }


def assert_penalties_are_right_or_refused(results):
    expected = ddp_gradients_ranks.penalized_alone()
    for result in results:
        for mode in EVERY_MODE:
            penalized, errors = result[mode]
            assert_same(penalized, expected, atol=1e-12)
            for kind, message in errors:
                assert kind == "UsageError"
                _, _, reason = message.partition(" got its gradient with ")
                assert reason == (
                    "create_graph=True, and the average over ranks is in no graph: take gradients to differentiate "
                    "again by torch.autograd.grad, and call backward() without it"
                )


def test_gradient_penalty_is_that_of_one_process_and_gradients_in_a_graph_are_refused(ranks):
    assert_penalties_are_right_or_refused(ranks(2).run(ddp_gradients_ranks.gradient_penalty))


@pytest.mark.multigpu
def test_gradient_penalty_on_two_gpus(two_gpus):
    assert_penalties_are_right_or_refused(two_gpus.run(ddp_gradients_ranks.gradient_penalty))


@pytest.mark.multigpu
def test_parameter_without_gradient_on_two_gpus(two_gpus):
    for result in two_gpus.run(ddp_gradients_ranks.unused_on_some_ranks):
        for mode in EVERY_MODE:
            on_all, on_first, on_none = result[mode]
            assert_same(on_first, dict_of(used=18.0, sometimes=6.0, never=None))
            assert_same(on_all, dict_of(used=18.0, sometimes=18.0, never=None))
            assert_same(on_none, dict_of(used=18.0, sometimes=None, never=None))
