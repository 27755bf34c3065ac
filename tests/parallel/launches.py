"""Watching and delaying what ranks launch."""

import contextlib
import functools
import random
import time
from unittest import mock

import torch
import torch.distributed as dist

from cs336sys.parallel import collectives

LAUNCHERS = (
    collectives.MeanReduction,
    collectives.MeanScatter,
    collectives.SliceGather,
    collectives.SliceExchange,
    collectives.Broadcasts,
)


@contextlib.contextmanager
def on_start(call, launchers=LAUNCHERS):
    """``call(operation, start, *arguments)`` takes the place of every launch."""

    def replacement(start):
        return lambda operation, *args: call(operation, functools.partial(start, operation), *args)

    with contextlib.ExitStack() as stack:
        for launcher in launchers:
            stack.enter_context(mock.patch.object(launcher, "start", replacement(launcher.start)))
        yield


def on_wait(call):
    """``call(operation, wait)`` takes the place of every wait."""
    wait = collectives._Launched.wait
    return mock.patch.object(
        collectives._Launched, "wait", lambda operation: call(operation, functools.partial(wait, operation))
    )


def delays():
    """For each of some seeds a function that makes this rank late, at other times than its peers."""
    on_gpu = collectives.group_device().type == "cuda"
    for seed in range(5 if on_gpu else 3):
        chance = random.Random(f"{seed} {dist.get_rank()}")

        def delay(chance=chance):
            time.sleep(chance.choice((0.0, 0.0, 0.0, 0.005, 0.02)))
            if on_gpu:
                # Cycles: up to 50 ms, in which a collective that did not wait for this stream would read old memory.
                torch.cuda._sleep(chance.choice((0, 0, 0, 100_000_000)))

        yield delay
