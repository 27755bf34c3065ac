"""What the ranks of test_optimizer_gradients run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from optimizer_models import finish, network, sharded
from small_models import PartlyUsed, WithoutGradient, batch, error_of, penalized_loss, share, weights
from torch import nn

from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def unused_parameters(mode):
    """Parameters and step counters after three steps: one parameter used on all ranks, on rank 0 alone, on none."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, lr=0.25, weight_decay=0.5)
    history = []
    for used_on in (range(dist.get_world_size()), (0,), ()):
        optimizer.zero_grad()
        wrapped(12.0 * (dist.get_rank() + 1), dist.get_rank() in used_on).backward()
        finish(wrapped)
        optimizer.step()
        history.append(weights(model))
    return history, {
        name: optimizer.state[p].get("step") for name, p in model.named_parameters() if p in optimizer.state
    }


def none_gradient(mode):
    """A backward function that returns None on rank 1 alone; parameters after a step of 1."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    through = WithoutGradient.apply if dist.get_rank() == 1 else torch.clone
    ((through(model.sometimes) * 4.0).sum() + (model.used * 2.0).sum()).backward()
    finish(wrapped)
    optimizer.step()
    return weights(model)


def second_backward():
    """Flat: the error of a second pass without no_sync, parameters after the next good step."""
    model = PartlyUsed()
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=1.0)
    model(1.0, True).backward()
    error = error_of(model(1.0, True).backward)
    optimizer.zero_grad()
    model(2.0 * (dist.get_rank() + 1), True).backward()
    optimizer.step()
    return error, weights(model)


def sparse_gradient(mode):
    model = nn.Embedding(5, 3, sparse=True)
    _, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0) if mode == "flat" else (None, None)
    if mode == "default":
        # Without a wrapper, which would refuse it.
        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0)

    def step():
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    return error_of(step)


def scaled_steps():
    """Default mode under a gradient scaler: weights after a good step and one with an overflow on rank 1 alone."""
    model = PartlyUsed()
    wrapped, optimizer = sharded("default", model, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    results = []
    for factor in (2.0, float("inf") if dist.get_rank() == 1 else 1.0):
        optimizer.zero_grad()
        scaler.scale(wrapped(factor, True)).backward()
        finish(wrapped)
        scaler.step(optimizer)
        scaler.update()
        results.append((weights(model)["used"], scaler.get_scale()))
    return results


def clipped(mode, max_norm):
    """The norm, and weights after a clipped step; then the norm when one rank has NaN, and weights after skipping."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, lr=0.1, optimizer_cls=torch.optim.SGD)
    inputs, targets = batch(0, torch.float64)
    nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
    finish(wrapped)
    norm = optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    after = weights(model)
    optimizer.zero_grad()
    inputs[-1] = torch.nan
    nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
    finish(wrapped)
    bad = optimizer.clip_grad_norm_(max_norm)
    if bad.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.mse_loss(wrapped(share(targets).new_zeros(3, 7)), share(targets)[:3]).backward()
    finish(wrapped)
    good = optimizer.clip_grad_norm_(max_norm)
    return norm.item(), after, bad.item(), weights(model), good.item()


def clipped_alone(max_norm):
    model = network(0, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(0, torch.float64)
    nn.functional.mse_loss(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item(), weights(model)


def not_a_number(mode):
    """Weights after a step in which one rank has NaN."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    wrapped(float("nan") if dist.get_rank() == 1 else 1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    return weights(model)["used"]


def gradient_penalty(mode):
    """Weights after a step along the gradient of a loss with a penalty; the error of gradients that are in a graph."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=0.1)
    penalized_loss(wrapped, *map(share, batch(0, torch.float64))).backward()
    finish(wrapped)
    optimizer.step()
    optimizer.zero_grad()
    return weights(model), error_of(wrapped(share(batch(0, torch.float64)[0])).sum().backward, create_graph=True)


def penalized_alone():
    model = network(0, torch.float64)
    penalized_loss(model, *batch(0, torch.float64)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return weights(model)
