"""What the ranks of test_bucket_optimizer run: functions that spawned processes can import."""

import copy

import pytest
import torch
import torch.distributed as dist
from small_models import batch, network, share, weights
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel import collectives
from cs336sys.parallel.bucket_optimizer import BucketOptimizer
from cs336sys.parallel.ddp import BucketedDDP

BUCKET_MB = 0.0004


def _groups(model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]


def train(by_bucket, steps=5):
    """Weights and optimizer state after training; a scheduler, accumulated gradients, parameters without a gradient."""
    model = network(dist.get_rank()).to(collectives.group_device())
    wrapped = BucketedDDP(model, BUCKET_MB)
    if by_bucket:
        optimizer = BucketOptimizer(wrapped, _groups(model), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(_groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(steps):
        x, y = map(share, batch(step))
        with wrapped.no_sync():
            nn.functional.mse_loss(wrapped(x), y).backward()
        out = wrapped(x)
        if step == 3:
            # No rank has a gradient of the norm, and only rank 0 of the first layer.
            first = model.first if dist.get_rank() == 0 else copy.deepcopy(model.first)
            optimizer.zero_grad()
            out = model.last(torch.tanh(model.second(torch.relu(first(x)))))
        nn.functional.mse_loss(out, y).backward()
        if not by_bucket:
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return weights(model), optimizer.state_dict()


def train_both():
    return train(False), train(True)


class CountsInGroup(torch.optim.Optimizer):
    """Steps get smaller by a count that is an option of the group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


def counted():
    """Weights after steps of that class, plain and by bucket, and the count."""
    results = []
    for by_bucket in (False, True):
        model = network(0).to(collectives.group_device())
        wrapped = BucketedDDP(model, BUCKET_MB)
        if by_bucket:
            optimizer = BucketOptimizer(wrapped, _groups(model), CountsInGroup, lr=0.01)
        else:
            optimizer = CountsInGroup(_groups(model), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            x, y = map(share, batch(step))
            nn.functional.mse_loss(wrapped(x), y).backward()
            if not by_bucket:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        results.append((weights(model), [group["count"] for group in optimizer.param_groups]))
    return results


def resume():
    """Trained on from a checkpoint of the plain class, beside the plain class itself."""
    _, state = train(False, 2)
    found = []
    for by_bucket in (False, True):
        model = network(0).to(collectives.group_device())
        wrapped = BucketedDDP(model, BUCKET_MB)
        groups = _groups(model)
        if by_bucket:
            optimizer = BucketOptimizer(wrapped, groups, torch.optim.AdamW, lr=0.5)
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.5)
        optimizer.load_state_dict(copy.deepcopy(state))
        nn.functional.mse_loss(wrapped(share(batch(0)[0])), share(batch(0)[1])).backward()
        if not by_bucket:
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        found.append((weights(model), optimizer.state_dict()))
    return found


def order_of_events():
    """What happens in a step after the backward pass, as (event, number of the bucket)."""
    model = network(0)
    wrapped = BucketedDDP(model, BUCKET_MB)
    optimizer = BucketOptimizer(wrapped, model.parameters(), torch.optim.SGD, lr=0.1)
    events = []
    for number, (bucket, part) in enumerate(zip(wrapped.buckets, optimizer._parts, strict=True)):
        for name, target, method in (("wait", bucket, bucket.wait), ("update", part, part.step)):

            def recorded(name=name, number=number, method=method):
                events.append((name, number))
                method()

            setattr(target, "wait" if name == "wait" else "step", recorded)
    x, y = map(share, batch(0))
    nn.functional.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    return events


def refreshed():
    """A layer that is unfrozen between steps is updated with the rest."""
    model = network(0)
    wrapped = BucketedDDP(model, BUCKET_MB)
    optimizer = BucketOptimizer(wrapped, model.parameters(), torch.optim.SGD, lr=0.1)
    before = model.last.bias.detach().clone()
    model.last.bias.requires_grad_(True)
    wrapped.refresh()
    x, y = map(share, batch(0))
    nn.functional.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    return not torch.equal(before, model.last.bias)


def refusals():
    model = network(0)
    wrapped = BucketedDDP(model, BUCKET_MB)
    messages = []

    def refused(run):
        with pytest.raises(UsageError) as raised:
            run()
        messages.append(str(raised.value))

    parameters = list(model.parameters())
    optimizer = BucketOptimizer(wrapped, parameters, torch.optim.SGD, lr=0.1)
    refused(lambda: BucketOptimizer(wrapped, parameters, torch.optim.LBFGS))
    refused(lambda: BucketOptimizer(wrapped, [*parameters, nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1))
    refused(lambda: optimizer.step(lambda: 0.0))
    refused(lambda: copy.deepcopy(optimizer))
    x, y = map(share, batch(0))
    scaler = torch.amp.GradScaler(collectives.group_device().type)
    scaler.scale(nn.functional.mse_loss(wrapped(x), y)).backward()
    refused(lambda: scaler.step(optimizer))
    wrapped.finish_gradient_synchronization()
    return messages
