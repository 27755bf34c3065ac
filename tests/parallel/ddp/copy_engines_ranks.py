"""What the ranks of test_copy_engines run: functions that spawned processes can import."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.parallel import mean_kernel
from cs336sys.parallel.ddp import BucketedDDP


class Branching(nn.Module):
    """Twelve layers of uneven sizes; one that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 + 3 * number, 67 + 3 * number) for number in range(12))
        self.sometimes = nn.Linear(100, 7)

    def forward(self, x, with_branch):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() + (self.sometimes(x).mean() if with_branch else 0.0)


def refused():
    try:
        BucketedDDP(nn.Linear(2, 2), None, copy_engines=True)
    except Exception as error:
        return type(error).__name__, str(error)


def gradients_beside_collectives(gradient_dtype, slow):
    """Largest difference from NCCL's means over the largest mean, and all gradients, after steps with a slow rank.

    Args:
        slow: which rank is late, and with what: ``push`` or ``average``.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branching().cuda()
    # About a layer to a bucket: more buckets than boxes.
    by_collectives = BucketedDDP(copy.deepcopy(model), 0.02, gradient_dtype=gradient_dtype)
    by_copies = BucketedDDP(model, 0.02, gradient_dtype=gradient_dtype, copy_engines=True)
    average = mean_kernel.average_

    def late(own, other):
        torch.cuda._sleep(3_000_000)
        average(own, other)

    if slow == (rank, "average"):
        mean_kernel.average_ = late
    found, worst = [], 0.0
    try:
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(16, 64, device="cuda")
            for wrapped in (by_collectives, by_copies):
                wrapped.zero_grad(set_to_none=step % 2 == 0)
                loss = wrapped(x, with_branch=rank == 0 or step % 3 > 0)
                if slow == (rank, "push"):
                    torch.cuda._sleep(30_000_000)
                loss.backward()
                wrapped.finish_gradient_synchronization()
            for expected, parameter in zip(by_collectives.parameters(), by_copies.parameters(), strict=True):
                difference = (parameter.grad - expected.grad).abs().max() / expected.grad.abs().max()
                worst = max(worst, difference.item())
                found.append(parameter.grad.cpu())
            with torch.no_grad():
                for wrapped in (by_collectives, by_copies):
                    for parameter in wrapped.parameters():
                        parameter -= 0.1 * parameter.grad
    finally:
        mean_kernel.average_ = average
    return worst, len(by_copies.buckets), found
