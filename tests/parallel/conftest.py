"""Every test here has a time limit, and ranks compute with one thread: the machine may have two cores for all."""

import pytest


@pytest.fixture(autouse=True)
def limits(time_limit, one_thread_a_rank):
    pass
