"""What the ranks of test_optimizer_faults run: functions that spawned processes can import."""

import copy
import time

import torch
import torch.distributed as dist
from optimizer_models import sharded
from small_models import PartlyUsed, error_of, wait_at_most
from torch import nn

from cs336sys.machine.lazy_dynamo import importing_no_compiler
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def wrong_arguments():
    """Errors of constructions that are wrong on every rank."""
    parameter = nn.Parameter(torch.ones(4))
    whole = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return {
        "no tensor": error_of(ShardedOptimizer, ["weight"], torch.optim.SGD, lr=1.0),
        "a tensor": error_of(ShardedOptimizer, parameter, torch.optim.SGD, lr=1.0),
        "nothing": error_of(ShardedOptimizer, [], torch.optim.SGD, lr=1.0),
        "no leaf": error_of(ShardedOptimizer, [parameter * 2], torch.optim.SGD, lr=1.0),
        "no class": error_of(ShardedOptimizer, [parameter], "AdamW"),
        "a module": error_of(ShardedOptimizer, [parameter], nn.Linear),
        "LBFGS": error_of(ShardedOptimizer, [parameter], torch.optim.LBFGS),
        "twice": error_of(
            ShardedOptimizer, [{"params": [("w", parameter), ("v", parameter)]}], torch.optim.SGD, lr=1.0
        ),
        "rate": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=-1.0),
        "flat rate": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, flat=True, lr=-1.0),
        "option": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, speed=2),
        "bucket": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, bucket_size_mb=0),
        "master": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, master_dtype=torch.float32),
        "master int": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, flat=True, master_dtype=torch.int32),
        "module": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, module="model"),
        "not element-wise": error_of(ShardedOptimizer, [parameter], torch.optim.Adafactor, flat=True),
        "complex": error_of(ShardedOptimizer, [whole], torch.optim.SGD, flat=True, lr=1.0),
    }


def differing_construction(mode, what):
    """The error on this rank when the last rank builds something else."""
    differs = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params, optimizer_cls, options = list(model.parameters()), torch.optim.AdamW, {"lr": 0.1, "flat": mode == "flat"}
    if differs:
        if what == "shape":
            params[2] = nn.Parameter(torch.ones(5, 4))
        elif what == "order":
            params.reverse()
        elif what == "missing":
            params.pop()
        elif what == "groups":
            params = [{"params": params[:2]}, {"params": params[2:]}]
        elif what == "frozen":
            params[1].requires_grad_(False)
        elif what == "no tensor":
            params[1] = None
        elif what == "class":
            optimizer_cls = torch.optim.Adam
        elif what == "option":
            options["lr"] = 0.2
        elif what == "mode":
            options["flat"] = not options["flat"]
        elif what == "bucket":
            options["bucket_size_mb"] = 1.0
    return error_of(ShardedOptimizer, params, optimizer_cls, **options)


def misuse(mode):
    """Errors of what a sharded optimizer refuses while it is used."""
    model = PartlyUsed()
    model.never.requires_grad_(False)
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)
    errors = {"copy": error_of(copy.deepcopy, optimizer)}
    model.never.requires_grad_(True)
    errors["unfrozen"] = error_of(optimizer.step)
    model.never.requires_grad_(False)
    optimizer.zero_grad()
    if mode == "flat":
        model(1.0, True).backward()
        group = {"params": [("late", nn.Parameter(torch.ones(2)))]}
        errors["under way"] = error_of(optimizer.add_param_group, group)
        optimizer.zero_grad()
        both = PartlyUsed()
        wrapper = NaiveDDP(both)
        errors["wrapped"] = error_of(ShardedOptimizer, wrapper.module.named_parameters(), torch.optim.SGD, flat=True)
    else:
        errors["no_sync"] = error_of(lambda: optimizer.no_sync().__enter__())
        errors["finish"] = error_of(optimizer.finish_gradient_synchronization)
    if dist.get_rank() == 1:
        model.used.data = model.used.data.clone()
    errors["clipped, moved on one rank"] = error_of(optimizer.clip_grad_norm_, 1.0)
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        model.used.data = model.used.data.clone()
    errors["moved"] = error_of(optimizer.step)
    return errors


class FailingSGD(torch.optim.SGD):
    """Raises in its steps, once that is switched on."""

    fails = False

    def step(self, *args, **kwargs):
        if self.fails:
            raise KeyError("sum")
        return super().step(*args, **kwargs)


def failing_class(mode):
    """Error of a step in which the class raises on the rank with the parameter; a sum afterwards; the next step."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([parameter], FailingSGD, flat=mode == "flat", lr=0.5)
    errors = []
    for fails in (True, False):
        parameter.sum().backward()
        FailingSGD.fails = fails
        errors.append(error_of(optimizer.step))
        total = torch.ones(())
        dist.all_reduce(total)
        optimizer.zero_grad()
    return errors, total.item(), parameter.tolist()


def lost_peer(mode):
    """One rank does not come to a step."""
    # These ranks do nothing else: to import it would take as long as all the rest.
    for method in ("add_param_group", "zero_grad"):
        importing_no_compiler(getattr(torch.optim.Optimizer, method))
    model = PartlyUsed()
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_at_most(0.5)
    if mode == "flat":
        model(1.0, True).backward()
    optimizer.step()
