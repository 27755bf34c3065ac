"""What the ranks of test_collective_timing run."""

import itertools
import time
from functools import partial
from unittest import mock

import torch.distributed as dist

from cs336sys.commands.allreduce import measure as collectives
from cs336sys.commands.allreduce.measure import time_collective


def time_all(workloads):
    return [time_collective(workload) for workload in workloads]


def nothing(*tensors, **options):
    """A collective that returns at once and has moved nothing."""


def swapped(collective, tensor, *rest, **options):
    """A collective that delivers two neighbours in each other's place, on rank 1 only."""
    collective(tensor, *rest, **options)
    if dist.get_rank() == 1:
        tensor[2:4] = tensor[2:4].flip(0)


def not_a_number(collective, tensor, *rest, **options):
    collective(tensor, *rest, **options)
    tensor[-1] = float("nan")


FAULTS = {"nothing": nothing, "swapped": swapped, "nan": not_a_number}


def time_faulty(workload, fault):
    """Wrong elements and number of times, with a collective that is at fault."""
    places = {
        "all_reduce": (dist, "all_reduce"),
        "broadcast": (dist, "broadcast"),
        "all_gather": (collectives, "all_gather_single"),
        "reduce_scatter": (collectives, "reduce_scatter_single"),
    }
    module, name = places[workload.collective]
    faulty = FAULTS[fault]
    if fault != "nothing":
        faulty = partial(faulty, getattr(module, name))
    with mock.patch.object(module, name, faulty):
        times = time_collective(workload)
    return times.wrong_elements, len(times.back_to_back_us), len(times.synchronized_us)


def times_with_a_late_rank(workload, sleep_s):
    """The times of a collective to which rank 1 comes later than rank 0 by ``sleep_s`` in every call."""
    call, numbers = dist.all_reduce, itertools.count()
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())

    def late(tensor):
        has_come = f"rank 0 at call {next(numbers)}"
        if dist.get_rank() == 0:
            store.set(has_come, "")
        else:
            store.wait([has_come])
            time.sleep(sleep_s)
        call(tensor)

    with mock.patch.object(dist, "all_reduce", late):
        return time_collective(workload)
