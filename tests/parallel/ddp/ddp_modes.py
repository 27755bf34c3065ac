"""Every way to average gradients, and what tests see of it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from launches import on_start
from small_models import batch, network, share, weights
from torch import nn
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

TORCH_MODES = {
    "torch": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torch, small buckets": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.0001),
}

each_mode = pytest.mark.parametrize("mode", MODES)


def finish(wrapped):
    if not isinstance(wrapped, DistributedDataParallel):
        wrapped.finish_gradient_synchronization()


def train_alone(dtype=torch.float32, steps=4):
    """The oracle: one process, the whole batch."""
    model = network(0, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def train(mode, dtype=torch.float32, steps=4):
    """Weights after training from rank 0's start; ``zero_grad`` in both modes in turn."""
    model = network(dist.get_rank(), dtype).to(collectives.group_device())
    wrapped = (MODES | TORCH_MODES)[mode](model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
        finish(wrapped)
        optimizer.step()
    return weights(model)


@contextlib.contextmanager
def recorded_launches(delay=lambda: None):
    """The names that each all-reduce of gradients averages, in launch order; ``delay()`` is called before each."""
    launches = []

    def record(reduction, start, tensors):
        delay()
        names = reduction.contents.removeprefix("gradients of ")
        launches.append((names, [tensor.numel() for tensor in tensors], tensors[0].dtype))
        start(tensors)

    with on_start(record, [collectives.MeanReduction]):
        yield launches
