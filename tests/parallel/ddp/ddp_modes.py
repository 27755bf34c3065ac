"""Every way to average gradients, and what tests see of it."""

import contextlib
import functools

from torch.nn.parallel import DistributedDataParallel

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

# 400 bytes hold two to four of the small tensors below and not the larger ones.
MODES = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "bucketed": lambda module, **options: BucketedDDP(module, 0.0004, **options),
    "one bucket": lambda module, **options: BucketedDDP(module, None, **options),
}

EVERY_MODE = list(MODES)

TORCH_MODES = {
    "torch": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torch, small buckets": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.0001),
}


def by_mode(function):
    """Let a function of a way to average, and of other arguments, return its results for every way."""

    @functools.wraps(function)
    def in_every_mode(*args):
        return {mode: function(wrap, *args) for mode, wrap in MODES.items()}

    return in_every_mode


def finish(wrapped):
    if not isinstance(wrapped, DistributedDataParallel):
        wrapped.finish_gradient_synchronization()


def gradients(module):
    return {
        name: None if parameter.grad is None else parameter.grad.detach().cpu().clone()
        for name, parameter in module.named_parameters()
    }


@contextlib.contextmanager
def recorded_launches(delay=None):
    """The names that each all-reduce of gradients averages, in launch order; ``delay()`` is called before each."""
    launches = []
    start = collectives.MeanReduction.start

    def record(reduction, tensors):
        if delay:
            delay()
        names = reduction.contents.removeprefix("gradients of ")
        launches.append((names, [tensor.numel() for tensor in tensors], tensors[0].dtype))
        start(reduction, tensors)

    collectives.MeanReduction.start = record
    try:
        yield launches
    finally:
        collectives.MeanReduction.start = start
