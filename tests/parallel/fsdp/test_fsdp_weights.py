"""Weights at the start, made whole, and in state dicts."""

import fsdp_weights_ranks
import pytest
import torch
from same_tensors import assert_same


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_parameters_are_those_of_the_first_rank(ranks, world_size):
    results = ranks(world_size).run(fsdp_weights_ranks.whole_parameters)
    for rank, (whole, expected, shapes, offset) in enumerate(results):
        assert_same(whole, expected)
        assert torch.equal(offset, results[0][3])
        each = -(-15 // world_size)
        assert shapes["blocks.0.up.weight"] == (max(0, min(each, 15 - rank * each)), 7)
        assert shapes["blocks.0.norm.weight"] == (15,)
        assert shapes["narrow.weight"] == ((3, 7), (2 - rank, 7), None, (int(rank < 3), 7))[world_size - 1]
        assert shapes["gain"] == (7,)


@pytest.mark.parametrize("world_size", [2, 3])
def test_module_made_on_the_meta_device_starts_as_one_made_as_usual(ranks, world_size):
    for results, trained, error in ranks(world_size).run(fsdp_weights_ranks.from_meta):
        for found, expected in results:
            assert_same(found, expected)
        assert trained == [True, True, True, True, False, False, True]
        assert error == (
            "UsageError",
            "Network is on the meta device and its class Network has no reset_parameters(): "
            "give FSDP a function to initialize it",
        )


def test_state_dict_is_the_modules_with_slices(ranks):
    names, expected, same = ranks(2).run(fsdp_weights_ranks.state_dicts)[0]
    assert names == expected
    assert same
