"""What the ranks of test_ddp_faults run: functions that spawned processes can import."""

import time

import torch
import torch.distributed as dist
from ddp_modes import finish
from small_models import PartlyUsed, error_of, wait_at_most
from torch import nn

from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP


def differing_layout(what):
    """The error on this rank when rank 1 (or the last of 3) builds something else."""
    module, wrap = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), NaiveDDP
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "shape":
            module[1] = nn.Linear(4, 5)
        elif what == "name":
            module = nn.Sequential(module[0], nn.Identity(), module[1])
        elif what == "dtype":
            module[1].weight = nn.Parameter(module[1].weight.int(), requires_grad=False)
            module[1].weight.requires_grad_(False)
        elif what == "requires_grad":
            module[0].bias.requires_grad_(False)
        elif what == "strides":
            module[0].weight = nn.Parameter(module[0].weight.detach().t())
        elif what == "tie":
            module[1].weight = module[0].weight
        elif what == "missing":
            module = module[:1]
        elif what == "buffer":
            module.register_buffer("extra", torch.zeros(2))
        elif what == "mode":
            wrap = OverlappedDDP
    if what == "cap":
        return error_of(BucketedDDP, module, 1.0 + dist.get_rank())
    if what == "gradient_dtype":
        return error_of(NaiveDDP, module, gradient_dtype=(None, torch.bfloat16)[dist.get_rank()])
    return error_of(wrap, module)


def wrong_arguments():
    return [error_of(BucketedDDP, nn.Linear(2, 2), size) for size in (0, -1.0, float("nan"))] + [
        error_of(NaiveDDP, nn.Linear(2, 2), gradient_dtype=torch.int32)
    ]


def lost_peer():
    """One rank does not come to the synchronization of a step."""
    wrapped = OverlappedDDP(PartlyUsed())
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_at_most(0.5)
    wrapped(1.0, True).backward()
    finish(wrapped)
