"""Random models and histories under every wrapper and optimizer equal one process on the whole batch, in float64."""

import pytest
import random_training_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_training_equals_one_process(ranks, world_size, request):
    """Half of --random-models each, by two wrappers each; --random-models 1000 --every-wrapper is for a change here."""
    count, first = request.config.getoption("--random-models"), request.config.getoption("--random-seed")
    print(f"repeat with --random-seed {first} --random-models {count}")
    seeds = range(first + world_size % 2, first + count, 2)
    every_wrapper = request.config.getoption("--every-wrapper")
    for wrong in ranks(world_size).run(random_training_ranks.train_all, seeds, every_wrapper):
        assert wrong == []
