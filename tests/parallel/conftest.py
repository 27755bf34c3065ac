"""Every test here has a time limit, and ranks compute with one thread: the machine may have two cores for all."""

import signal

import pytest
import torch

from cs336sys.parallel.ranks import launch

# The slowest tests start ranks two or three times, at 2 to 5 s each on two busy cores.
TEST_LIMIT_S = 90


@pytest.fixture(autouse=True)
def time_limit():
    """Fail a test that hangs, from wherever it is: the error leaves through the code that ends the ranks."""

    def give_up(*_):
        raise TimeoutError(f"the test is not done after {TEST_LIMIT_S} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_rank():
    """What tests compute without ranks, too: sums over threads are rounded otherwise, and results compared exactly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks():
    """``ranks(world_size)`` are Gloo ranks that all tests share, started when first asked for and after a failure."""
    started = {}

    def get(world_size):
        if world_size not in started or not started[world_size].alive:
            started[world_size] = launch.start(world_size, backend="gloo", timeout_s=30)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.__exit__(None, None, None)
