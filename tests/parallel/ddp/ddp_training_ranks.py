"""What the ranks of test_ddp_training run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from ddp_modes import MODES, TORCH_MODES, by_mode, finish
from small_models import Products, batch, factors, network, share, weights
from torch import nn

from cs336sys.parallel import collectives


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


def train_all(modes, *args):
    return {mode: train(mode, *args) for mode in modes}


@by_mode
def average_integers(wrap):
    wrapped = wrap(Products())
    wrapped(factors(dist.get_rank())).backward()
    finish(wrapped)
    return [part.grad for part in wrapped.module.parts]
