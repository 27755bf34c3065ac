"""Ranks on two GPUs, for the tests of a file."""

import pytest

from cs336sys.parallel.ranks import launch


@pytest.fixture(scope="module")
def two_gpus():
    with launch.start(2, backend="nccl") as ranks:
        yield ranks
