"""What the ranks of test_optimizer_groups run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from cs336_basics.optimizer import AdamW
from optimizer_models import finish, network, sharded, train_step
from small_models import PartlyUsed, error_of, weights
from torch import nn

from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def groups_of(model):
    """Matrices that decay and vectors that do not, with options of their own."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [(name, p) for name, p in model.named_parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05, "betas": (0.8, 0.9)}]


def wait_for_parameters(optimizer):
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.wait_for_parameters()


def scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=8)


def train_groups(mode, overlap=False):
    """Weights and learning rates of training with groups and a scheduler that changes rates and betas."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, overlap=overlap, params=groups_of(model), lr=0.01)
    scheduler = scheduled(optimizer)
    rates = []
    for step in range(6):
        train_step(wrapped, optimizer, step, torch.float64)
        scheduler.step()
        rates.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])
    wait_for_parameters(optimizer)
    return weights(model), rates


def grow(mode, overlap=False):
    """Train, add a group, unfreeze a parameter of the first group, and go on; the same for any optimizer."""
    model = network(0, torch.float64)
    model.norm.requires_grad_(False)
    params = [*model.first.parameters(), *model.norm.parameters()]
    wrapped, optimizer = sharded(mode, model, lr=0.01, params=params, overlap=overlap)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
        if step == 4:
            model.norm.requires_grad_(True)
            for changed in (optimizer, wrapped):
                if hasattr(changed, "refresh"):
                    changed.refresh()
        train_step(wrapped, optimizer, step, torch.float64)
        wait_for_parameters(optimizer)
    return weights(model)


def failed_groups(mode):
    """Errors of adding a group that is no good here or on another rank; the groups after; a good step."""
    model = PartlyUsed()
    other = nn.Parameter(torch.ones(4))
    wrapped, optimizer = sharded(mode, model, AdamW, lr=0.01)
    first = dist.get_rank() == 0
    errors = [
        error_of(optimizer.add_param_group, {"params": [other], "lr": -1.0}),
        error_of(optimizer.add_param_group, {"params": [other], "lr": 0.1 if first else 0.2}),
        error_of(optimizer.add_param_group, {"params": [other if first else nn.Parameter(torch.ones(5))]}),
        error_of(optimizer.add_param_group, {"params": [other if first else "weight"]}),
        error_of(optimizer.add_param_group, {"params": [model.used]}),
    ]
    wrapped(1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    return errors, len(optimizer.param_groups)


def owners_of_groups(sizes_of_groups):
    """Default mode: elements that this rank owns of each parameter of groups that were added one after another."""
    groups = [[nn.Parameter(torch.ones(size)) for size in sizes] for sizes in sizes_of_groups]
    optimizer = ShardedOptimizer(groups[0], torch.optim.SGD, lr=1.0)
    for group in groups[1:]:
        optimizer.add_param_group({"params": group})
    owned = {id(parameter) for parameter in optimizer.own_tensors}
    return [[id(parameter) in owned for parameter in group] for group in groups]
