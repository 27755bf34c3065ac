"""What the ranks of test_ddp_order run: functions that spawned processes can import."""

import random
import time

import torch
import torch.distributed as dist
from ddp_modes import MODES, finish, gradients, recorded_launches
from ddp_training_ranks import train
from small_models import Branches, batch, network

from cs336sys.parallel import collectives


def differently_ordered(order_of_rank):
    """By mode: gradients, the order in which they became ready, and the order of launches."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Branches())
        ready = []
        for index, branch in enumerate(wrapped.module.branches):
            branch.register_post_accumulate_grad_hook(lambda _, ready=ready, index=index: ready.append(index))
        with recorded_launches() as launches:
            wrapped(order_of_rank[dist.get_rank()], dist.get_rank() + 1.0).backward()
            finish(wrapped)
        results[mode] = gradients(wrapped.module), ready, [names for names, *_ in launches]
    return results


def train_with_delays(seed):
    """Every rank comes late to other collectives than its peers; on GPUs both with launches and with gradients."""
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def delay():
        time.sleep(chance.choice((0.0, 0.0, 0.005, 0.02)))
        if collectives.group_device().type == "cuda":
            # Cycles: up to 50 ms, in which a collective that did not wait for this stream would read old gradients.
            torch.cuda._sleep(chance.choice((0, 0, 100_000_000)))

    with recorded_launches(delay):
        return {mode: train(mode, torch.float32, 2) for mode in MODES}


def launches_in_time():
    """By mode: how many launches of how many happened before the last gradient was ready, and within the backward."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(network(0))
        first = wrapped.module.first.weight
        with recorded_launches() as launches:
            before_last = []
            first.register_hook(lambda _, seen=before_last, launches=launches: seen.append(len(launches)))
            inputs, _ = batch(0)
            wrapped(inputs).sum().backward()
            in_backward = len(launches)
            finish(wrapped)
        results[mode] = before_last[0], in_backward, launches
    return results
