"""What the ranks of test_optimizer_training run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from optimizer_models import CLASSES, MODES, finish, network, sharded, train_step
from small_models import PartlyUsed, Products, batch, factors, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def train(mode, name, dtype=torch.float32, steps=4, overlap=False, **options):
    """Weights after training from rank 0's start; ``zero_grad`` in both ways in turn."""
    model = network(0 if mode == "flat" and not overlap else dist.get_rank(), dtype).to(collectives.group_device())
    optimizer_cls, settings = CLASSES[name]
    wrapped, optimizer = sharded(mode, model, optimizer_cls, overlap=overlap, **settings, **options)
    for step in range(steps):
        train_step(wrapped, optimizer, step, dtype, set_to_none=step % 2 == 0)
    optimizer.wait_for_parameters()
    return weights(model)


def train_all(names, modes=MODES, dtype=torch.float32, steps=4):
    """By class, mode and whether parameters arrive during the next forward pass."""
    return {
        (name, mode, overlap): train(mode, name, dtype, steps, overlap)
        for name in names
        for mode in modes
        for overlap in (False, True)
    }


def train_alone(name, dtype=torch.float32, steps=4):
    """The oracle: one process, the whole batch. Weights and the optimizer's state dict."""
    model = network(0, dtype)
    optimizer_cls, settings = CLASSES[name]
    optimizer = optimizer_cls(model.parameters(), **settings)
    for step in range(steps):
        train_step(model, optimizer, step, dtype)
    return weights(model), optimizer.state_dict()


def torch_zero(steps):
    """Weights after training with torch's ZeroRedundancyOptimizer."""
    # Its import takes seconds.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network(0).to(collectives.group_device())
    wrapped = NaiveDDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for step in range(steps):
        train_step(wrapped, optimizer, step)
    return weights(model)


def step_of_integers(mode, buckets_mb):
    """Parameters after one step of 1 from 0 along the mean of integer gradients, by bucket size."""
    results = {}
    for size in buckets_mb:
        wrapped, optimizer = sharded(mode, Products(), torch.optim.SGD, lr=1.0, bucket_size_mb=size)
        wrapped(factors(dist.get_rank())).backward()
        finish(wrapped)
        optimizer.step()
        results[size] = [part.detach().clone() for part in optimizer.param_groups[0]["params"]]
    return results


def closure_step(mode):
    """What a closure returned and how often it ran; parameters."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = wrapped(2.0 * (dist.get_rank() + 1), True)
        loss.backward()
        finish(wrapped)
        return loss.item()

    with torch.no_grad():
        loss = optimizer.step(closure)
    return loss, calls, weights(model)


class Scaled(torch.optim.SGD):
    """SGD whose step takes an argument and notes in its groups how often it was called."""

    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return super().step(closure)


def step_arguments_and_hooks(mode):
    """Parameters and the group's count after steps with an argument, and what hooks saw."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, Scaled, lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("pre", kwargs)))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("post", kwargs)))
    wrapped(2.0 * (dist.get_rank() + 1), True).backward()
    finish(wrapped)
    optimizer.step(factor=0.5)
    return weights(model), optimizer.param_groups[0]["calls"], seen


def few_parameters(mode, options):
    """Weights of a model with one parameter after two steps, and how many states this rank has."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    wrapped, optimizer = sharded(mode, model, lr=0.1, **options)
    for step in range(2):
        optimizer.zero_grad()
        (wrapped(torch.ones(1, 3) * (step + 1)) * (dist.get_rank() + 1)).sum().backward()
        finish(wrapped)
        optimizer.step()
    return model.weight.detach().clone(), len(optimizer.state)


def start_values(mode):
    """Parameters after construction from this rank's values, and after adding a group."""
    parameters = [
        nn.Parameter(torch.full((5,), float(dist.get_rank() + 1 + n)), requires_grad=n != 1) for n in range(3)
    ]
    _, optimizer = (None, ShardedOptimizer(parameters[:2], torch.optim.SGD, lr=1.0, flat=mode == "flat"))
    first = [parameter[0].item() for parameter in parameters]
    optimizer.add_param_group({"params": parameters[2:]})
    return first, [parameter[0].item() for parameter in parameters]


def with_masters(steps, resume_at):
    """bf16 weights, masters and losses of training with fp32 master parameters, once left and resumed."""
    model = network(0, torch.bfloat16)
    _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.001)
    losses = []
    for step in range(steps):
        if step == resume_at:
            start, state = model.state_dict(), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
            model = network(1, torch.bfloat16)
            _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.5)
            model.load_state_dict(start)
            optimizer.load_state_dict(state)
        losses.append(train_step(model, optimizer, step, torch.bfloat16))
    return losses, weights(model), optimizer.consolidated_state_dict()


def with_masters_by_hand(steps):
    """What the ranks above should hold: fp32 parameters stepped along the mean of bf16 gradients, rounded to bf16."""
    world_size = 2
    model = network(0, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr=0.001)
    for step in range(steps):
        inputs, targets = batch(step, torch.bfloat16)
        gradients = []
        for x, y in zip(inputs.chunk(world_size), targets.chunk(world_size), strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            gradients.append([parameter.grad for parameter in trained])
        for master, first, second in zip(masters, *gradients, strict=True):
            master.grad = ((first + second) / world_size).float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
    return weights(model), [master.detach() for master in masters]


class Permuted(nn.Module):
    """Parameters that are not contiguous: transposed, channels last, and every other column of a larger tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transposed = nn.Parameter(torch.randn(64, 6).t())
        self.image = nn.Conv2d(2, 4, (4, 4)).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(6, 128)[:, ::2])

    def forward(self, x):
        image = self.image(x.expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        return (self.transposed.square() * x).sum() + image.square().sum() + (self.sliced * x).square().sum()


def permuted_parameters(mode):
    """Weights and consolidated state after two steps of parameters that are not contiguous, loaded in between."""
    start, state = Permuted().state_dict(), None
    for step in range(2):
        model = Permuted()
        model.load_state_dict(start)
        wrapped, optimizer = sharded(mode, model, lr=0.1)
        if state is not None:
            # As another program may save it: in another order in memory.
            for kept in state["state"].values():
                kept.update({key: value.contiguous() for key, value in kept.items()})
            optimizer.load_state_dict(state)
        wrapped(torch.tensor(1.0 + step)).backward()
        finish(wrapped)
        optimizer.step()
        start, state = weights(model), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    return start, state


def permuted_alone():
    model = Permuted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor(1.0 + step)).backward()
        optimizer.step()
    return weights(model), optimizer.state_dict()
