"""What the ranks of test_ddp_order run: functions that spawned processes can import."""

import random
import time

import torch
import torch.distributed as dist
from ddp_modes import MODES, by_mode, finish, gradients, recorded_launches
from ddp_training_ranks import train
from small_models import Branches, batch, error_of, network

from cs336sys.parallel import collectives
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


@by_mode
def differently_ordered(wrap, order_of_rank):
    """By mode: gradients, the order in which they became ready, and the order of launches."""
    wrapped = wrap(Branches())
    ready = []
    for index, branch in enumerate(wrapped.module.branches):
        branch.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    with recorded_launches() as launches:
        wrapped(order_of_rank[dist.get_rank()], dist.get_rank() + 1.0).backward()
        finish(wrapped)
    return gradients(wrapped.module), ready, [names for names, *_ in launches]


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


@by_mode
def launches_in_time(wrap):
    """By mode: how many launches of how many happened before the last gradient was ready, and within the backward."""
    wrapped = wrap(network(0))
    first = wrapped.module.first.weight
    with recorded_launches() as launches:
        before_last = []
        first.register_hook(lambda _: before_last.append(len(launches)))
        inputs, _ = batch(0)
        wrapped(inputs).sum().backward()
        in_backward = len(launches)
        finish(wrapped)
    return before_last[0], in_backward, launches


# By rank, the branches of two modules that it uses.
USED = (((0, 1), (0,)), ((0,), (1, 0)))


def chain(first, second, rank):
    of_first, of_second = USED[rank]
    return second(of_second, first(of_first, rank + 1.0))


def chained_alone(rank):
    first, second = Branches(2), Branches(2)
    chain(first, second, rank).backward()
    return gradients(first), gradients(second)


def collective_between():
    """By mode: gradients of two modules in one graph, and a sum of the caller's, of as many elements.

    Each rank uses another branch of each. The last of all are flat sharded optimizers, whose weights have moved by the
    gradients.
    """
    results = {}
    for mode in [*MODES, "flat sharded"]:
        first, second = modules = Branches(2), Branches(2)
        if mode == "flat sharded":
            options = {"flat": True, "bucket_size_mb": 1e-5, "lr": 1.0}
            averaging = [ShardedOptimizer(module.parameters(), torch.optim.SGD, **options) for module in modules]
        else:
            first, second = averaging = [MODES[mode](module) for module in modules]
        steps = []
        for backwards in (False, True):
            loss = chain(first, second, dist.get_rank())
            loss.backward()
            total = loss.detach().expand(3).clone()
            dist.all_reduce(total)
            for one in averaging[::-1] if backwards else averaging:
                finish(one)
            if mode == "flat sharded":
                for optimizer in averaging:
                    optimizer.step()
                moved = [{name: 1.0 - one.detach() for name, one in module.named_parameters()} for module in modules]
                with torch.no_grad():
                    for module in modules:
                        for parameter in module.parameters():
                            parameter.fill_(1.0)
                averages = moved
            else:
                averages = [gradients(module) for module in modules]
            for one in averaging:
                one.zero_grad()
            steps.append((loss.detach(), total, averages))
        results[mode] = steps
    return results


@by_mode
def separate_passes(wrap):
    """By mode: errors of a second pass that reaches other parameters, and gradients with the first under no_sync."""
    wrapped = wrap(Branches())
    wrapped((0, 1), 1.0).backward()
    error = error_of(wrapped((2, 3), 1.0).backward)
    finish(wrapped)
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped((0, 1), dist.get_rank() + 1.0).backward()
    wrapped((2, 3), dist.get_rank() + 1.0).backward()
    finish(wrapped)
    return error, gradients(wrapped.module)
