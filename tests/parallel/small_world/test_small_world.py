"""Every short program of every data parallel class equals one process, or is refused alike, and none hangs."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import planted_faults
import pytest
import torch.distributed as dist
from lockstep import Lockstep
from planted_faults import Fault
from random_programs import DDP
from small_models import error_of
from small_programs import CALLS, CONDITIONS, OPTIONS, SmallProgram, groups, run_programs

from cs336sys.parallel import ddp
from cs336sys.parallel.wrapped_modules import SynchronizationSwitch

# The nights after which every program has been run.
NIGHTS = 8

# Words that are run every day, with every seventh option in turn; of all others one in so many, with one option.
DAILY_WORDS = (
    *("FBDSF", "FBSFB", "FBSZF", "FBCSF", "FBSLF", "FNFBS", "FNFNC", "FNSFB", "FBZFB", "XFBSF", "FBXSF", "FBSSZ"),
    *("FBSF", "FNFB", "FBFB", "FBCS", "FBSL", "FNCS", "FNDS", "XFBS", "LFBS", "FNFN", "FNZS"),
)
EVERYDAY = 1000


@functools.cache
def everyday_programs():
    everything = groups()
    daily = [
        (*group, names[number % 7 :: 7]) for number, (*group, names) in enumerate(everything) if group[0] in DAILY_WORDS
    ]
    others = [(*group, (names[number % len(names)],)) for number, (*group, names) in enumerate(everything[::EVERYDAY])]
    return [SmallProgram.of(*group, name) for *group, names in daily + others for name in names]


def test_programs_equal_one_process(ranks, tier):
    """``-m nightly --nightly-share 8`` runs all of them, and by default a part that depends on the seed."""
    if tier.is_nightly:
        step = max(1, round(NIGHTS / tier.share))
        programs = [
            SmallProgram.of(*group, name) for *group, names in groups()[tier.seed % step :: step] for name in names
        ]
    else:
        programs = everyday_programs()
    counts, wrong = Counter(), {}
    for start in range(0, len(programs), 1000):
        for rank_counts, rank_wrong in ranks(2).run(run_programs, programs[start : start + 1000]):
            counts += rank_counts
            wrong |= rank_wrong
    for end, count in counts.most_common():
        print(f"{count:8} {end}")
    shown = sorted(wrong.items(), key=lambda item: item[0].index(" "))[:5]
    assert not wrong, f"{len(wrong)} of {counts.total()} programs, such as:\n" + "\n".join(map(": ".join, shown))


def test_everyday_programs_have_every_call_option_and_condition():
    programs = everyday_programs()
    assert {letter for program in programs for letter in program.word} == set(CALLS)
    assert {program.options for program in programs} == set(OPTIONS)
    assert {program.condition for program in programs} == {"", *CONDITIONS}


def test_rank_that_waits_alone_is_noticed():
    with Lockstep(2) as world:
        raised, _ = world.run(lambda rank: error_of(dist.barrier) if rank == 0 else None)
    assert raised == ("HangError", "ranks [0] wait for a collective that others do not launch")


def test_error_of_a_rank_reaches_the_caller():
    def fail_on_rank_1(rank):
        return [][rank] if rank else None

    with Lockstep(2) as world, pytest.raises(IndexError):
        world.run(fail_on_rank_1)


_divide_into_buckets = ddp.divide_into_buckets
_uses = planted_faults._uses
FAULTS = planted_faults.FAULTS | {
    "no_sync is ignored": Fault(
        SynchronizationSwitch,
        "no_sync",
        lambda switch: contextlib.nullcontext(),
        planted_faults._uses(*DDP, "optimizer-flat"),
    ),
    "the last rank launches in reverse order": Fault(
        ddp,
        "divide_into_buckets",
        lambda named, rule: _divide_into_buckets(named, rule)[:: -1 if dist.get_rank() else 1],
        _uses("overlap", "bucketed"),
    ),
}


@pytest.mark.parametrize(
    "fault_name", [name for name, fault in FAULTS.items() if any(map(fault.fits, everyday_programs()))]
)
def test_everyday_programs_find_a_planted_fault(ranks, fault_name):
    fits = FAULTS[fault_name].fits
    fitting = [program for program in everyday_programs() if program.world_size == 2 and fits(program)]
    ((_, wrong),) = ranks(1).run(run_with_fault, fault_name, fitting)
    print(wrong)
    assert wrong


def run_with_fault(fault_name, programs):
    fault = FAULTS[fault_name]
    with mock.patch.object(fault.owner, fault.name, fault.replacement):
        return run_programs(programs, stops=True)
