"""Random programs under every wrapper and optimizer equal one process on the whole batch, action by action."""

import time
from collections import Counter

import pytest
from random_programs import Program, random_program
from running_programs import failures, report

# Programs that failed once, as they were printed.
REGRESSIONS: tuple[Program, ...] = ()


def test_random_programs_equal_one_process(ranks, request):
    """Draw --random-programs programs from --random-seed; add what fails, as it is printed, to ``REGRESSIONS``."""
    count, first = request.config.getoption("--random-programs"), request.config.getoption("--random-seed") or 0
    _check(ranks, [*REGRESSIONS, *map(random_program, range(first, first + count))])


@pytest.mark.nightly
def test_thousands_of_random_programs_equal_one_process(ranks, request):
    """Draw others every day, for ``--nightly-programs``."""
    first = request.config.getoption("--random-seed")
    first = int(time.strftime("%Y%m%d")) * 10_000 if first is None else first
    count = request.config.getoption("--nightly-programs")
    print(f"repeat with -m nightly --random-seed {first} --nightly-programs {count}")
    _check(ranks, [random_program(seed) for seed in range(first, first + count)])


def _check(ranks, programs):
    counts = Counter()
    failed = failures(ranks, programs, counts)
    for what, count in sorted(counts.items()):
        print(f"{count:7} {what}")
    deadline = time.monotonic() + 30
    shown = [report(ranks, program, text, deadline) for program, text in list(failed.items())[:5]]
    assert not failed, f"{len(failed)} of {len(programs)} programs fail, such as:\n" + "\n".join(shown)
