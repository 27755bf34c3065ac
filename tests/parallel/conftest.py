"""Every test here has a time limit, and ranks compute with one thread: the machine may have two cores for all."""

import pytest

from cs336sys.parallel.ranks import launch

# Else its assertions, outside a test file, would not say what differs.
pytest.register_assert_rewrite("same_tensors")


@pytest.fixture(autouse=True)
def limits(time_limit, one_thread_a_rank):
    pass


@pytest.fixture
def two_gpus():
    """Ranks on two GPUs, started once for all tests of a process, and again after a failure."""
    return launch.kept(2, backend="nccl")
