"""Without a GPU, Triton kernels run in Triton's interpreter, and tests that need one are skipped with the reason.

The fixtures are for tests that start ranks.
"""

import atexit
import fcntl
import gc
import os
import signal
import time
from dataclasses import dataclass

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that share the cores wait for one another if each has a thread for every core; torch reads this when
    # imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Of what is imported and collected nothing becomes garbage: to look for it takes a fifth of the time.
    gc.disable()

import cs336_basics.model
import hypothesis
import pytest
import torch

# Of a figure that is another, the difference is shown.
pytest.register_assert_rewrite("written_figures")

# Who builds a model with another attention leaves that in the module; this is read before any test runs.
OWN_ATTENTION = cs336_basics.model.scaled_dot_product_attention

# Of a test that hangs: the slowest take 10 s on two quiet cores.
TEST_LIMIT_S = 180
NIGHTLY_LIMIT_S = 4 * 3600

# Run first: it compiles for a minute or two in one process, for which the other worker would wait in the end.
LONGEST = "test_attention_compile_gate.py"

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before the first import of a kernel module.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Else each process that compiles for the CPU starts another, which imports the compiler, too, to call g++.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@dataclass(frozen=True)
class Tier:
    """How much a test that draws at random draws, and from which seed."""

    is_nightly: bool
    seed: int
    share: float

    def choose(self, default, nightly):
        """The first, or with ``-m nightly`` the second: a number is multiplied by ``--nightly-share``."""
        if not self.is_nightly:
            return default
        return max(default, type(nightly)(nightly * self.share)) if isinstance(nightly, int | float) else nightly


def pytest_addoption(parser):
    group = parser.getgroup("nightly")
    group.addoption("--seed", type=int, help="The first seed of nightly tests: by default the date.")
    group.addoption("--nightly-share", type=float, default=1.0, help="How much of what they draw to draw.")


# Examples are the same every day, and others every night.
hypothesis.settings.register_profile("default", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None, database=None)


def is_nightly(config):
    return "nightly" in config.option.markexpr and "not nightly" not in config.option.markexpr


def pytest_configure(config):
    if config.option.seed is None:
        config.option.seed = int(time.strftime("%Y%m%d"))
    hypothesis.settings.load_profile("nightly" if is_nightly(config) else "default")
    if is_nightly(config):
        config.option.hypothesis_seed = config.option.hypothesis_seed or config.option.seed


def pytest_report_header(config):
    if not is_nightly(config):
        return None
    return f"nightly seed: {config.option.seed} (repeat with -m nightly --seed {config.option.seed})"


@pytest.fixture(scope="session", params=["default", pytest.param("nightly", marks=pytest.mark.nightly)])
def tier(request):
    """Runs a test twice: by default with a small budget from seed 0, with ``-m nightly`` with all from the date's."""
    is_nightly = request.param == "nightly"
    options = request.config.option
    return Tier(is_nightly, options.seed if is_nightly else 0, options.nightly_share)


def pytest_make_parametrize_id(val):
    """Shorten long texts in names of tests: of those that are hostile to a parser one has 33 million characters."""
    if isinstance(val, str | bytes) and len(val) > 80:
        return f"{val[:60]!a}... of {len(val)}"
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != LONGEST)
    count = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs, found {count}"))


def pytest_collection_finish():
    """Else each ``gc.collect()`` of what is tested goes through all modules and tests, for 0.2 to 0.4 s."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # What is frozen is not freed at the end, and triton's bindings would write what they leak. Not before pytest is
    # done, which looks for garbage five times.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Draw what a test draws from one seed, whatever ran before it in its worker."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gpus_alone(request, tmp_path_factory):
    """No other test uses a GPU beside one that needs several: what these time and hide would take longer."""
    kinds = [kind for kind in ("gpu", "multigpu") if request.node.get_closest_marker(kind)]
    if not kinds:
        yield
        return
    # The parent of all workers' folders, where there are several.
    folder = tmp_path_factory.getbasetemp().parent
    with (folder / "gpus").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if "multigpu" in kinds else fcntl.LOCK_SH)
        yield


@pytest.fixture
def own_attention(monkeypatch):
    """The model's attention is its own, whatever an earlier test of this process has built."""
    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", OWN_ATTENTION)


@pytest.fixture
def time_limit(request):
    """Fail a test that hangs, from wherever it is: the error leaves through the code that ends the ranks."""
    limit_s = TEST_LIMIT_S if request.node.get_closest_marker("nightly") is None else NIGHTLY_LIMIT_S

    def give_up(*_):
        # No Exception, which the code under test might take for a fault that it handles: TimeoutError is an OSError.
        pytest.fail(f"the test is not done after {limit_s} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture(scope="module")
def one_thread_a_rank():
    """What tests compute without ranks, too: sums over threads are rounded otherwise, and results compared exactly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def forked_processes():
    """Fork ranks and workers where there is no GPU."""
    from forked_processes import forked

    with forked():
        yield


@pytest.fixture
def real_processes():
    """Ranks and workers are started as users' are."""
    from forked_processes import started_as_by_users

    with started_as_by_users():
        yield


@pytest.fixture(scope="session")
def ranks(forked_processes):
    """``ranks(world_size)`` are Gloo ranks that all tests share, started when first asked for and after a failure."""
    from cs336sys.parallel.ranks import launch

    started = {}

    def get(world_size):
        if world_size not in started or not started[world_size].alive:
            started[world_size] = launch.start(world_size, backend="gloo", timeout_s=60)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.__exit__(None, None, None)
