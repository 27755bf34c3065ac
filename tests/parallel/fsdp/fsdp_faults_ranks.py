"""What the ranks of test_fsdp_faults run: functions that spawned processes can import."""

import copy
import time

import torch
import torch.distributed as dist
from fsdp_models import batch, gathered_units, loss_of, network, on_cpu, transformer
from small_models import error_of, share, wait_at_most
from torch import nn
from torch.distributed.fsdp import fully_shard

from cs336sys.parallel.ddp import OverlappedDDP
from cs336sys.parallel.fsdp import FSDP


def recovers():
    """Whole weights after a step that failed in forward, and one that failed in backward, and then good ones."""
    results = []
    for where in ("forward", "backward", None):
        sharded = FSDP(network(0))
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

        def fail(*_):
            raise ArithmeticError

        errors = []
        if where == "forward":
            handle = sharded.module.blocks[1].norm.register_forward_hook(fail)
            errors.append(error_of(loss_of, sharded, *map(share, batch(0))))
            handle.remove()
        elif where == "backward":
            handle = sharded.module.blocks[1].norm.register_full_backward_hook(fail)
            errors.append(error_of(loss_of(sharded, *map(share, batch(0))).backward))
            handle.remove()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(sharded, *map(share, batch(step))).backward()
            sharded.finish_gradient_synchronization()
            optimizer.step()
        results.append((errors, on_cpu(sharded.gather_full_params()), gathered_units(sharded)))
    return results


def refusals():
    """The errors of what cannot work, by what it is."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded = FSDP(plain)
    errors = {
        "again": error_of(FSDP, sharded),
        "the inside again": error_of(FSDP, nn.Sequential(plain)),
        "over DDP": error_of(FSDP, nn.Sequential(OverlappedDDP(nn.Linear(2, 2)))),
        "over torch's": error_of(FSDP, fully_shard(nn.Sequential(nn.Linear(2, 2)))),
        "prefetch": error_of(FSDP, nn.Linear(2, 2), prefetch=-1),
        "compute_dtype": error_of(FSDP, nn.Linear(2, 2), torch.int8),
        "gradient_dtype": error_of(FSDP, nn.Linear(2, 2), gradient_dtype=torch.int8),
        "moved": error_of(sharded.to, torch.float16),
        "copied": error_of(copy.deepcopy, sharded),
        "assigned": error_of(sharded.load_state_dict, sharded.state_dict(), assign=True),
    }
    sparse = FSDP(nn.Embedding(5, 3, sparse=True))
    errors["sparse"] = error_of(sparse(torch.tensor([1, 2])).sum().backward)
    world_size = dist.get_world_size
    dist.get_world_size = lambda: world_size() + 1
    try:
        errors["another group"] = error_of(sharded, torch.ones(1, 2))
    finally:
        dist.get_world_size = world_size
    return errors


def outside_the_group():
    """The error of a forward pass after this process has left the group. It must be the last that these ranks do."""
    sharded = FSDP(nn.Linear(2, 2))
    initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        return error_of(sharded, torch.ones(1, 2)), error_of(FSDP, nn.Linear(2, 2))
    finally:
        dist.is_initialized = initialized


def differing_layout(what):
    """The error on this rank when rank 1 builds something else."""
    is_other = dist.get_rank() == 1
    model, settings = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}
    if what == "shape" and is_other:
        model[1] = nn.Linear(4, 5)
    elif what == "settings":
        settings = {"prefetch": 1 + is_other}
    elif what == "units" and is_other:
        settings = {"unit_modules": [model]}
    return error_of(FSDP, model, **settings)


def lost_peer():
    """One rank does not come to a gather of the second step."""
    sharded = FSDP(transformer())
    tokens, targets = map(share, batch(0, 30))
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_at_most(0.5)
    loss_of(sharded, tokens, targets).backward()
