"""What the ranks of test_fsdp_training run: functions that spawned processes can import."""

import contextlib

import torch
import torch.distributed as dist
from fsdp_models import OPTIMIZERS, batch, loss_of, network, on_cpu, on_rank, transformer, whole_gradients
from small_models import share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp import unit as fsdp_gradients


def train_alone(optimizer="adamw", steps=4, dtype=torch.float64):
    """The oracle: one process, the whole batch."""
    model = network(0, dtype)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        stepper.zero_grad()
        loss_of(model, *batch(step)).backward()
        stepper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(
    optimizer="adamw",
    steps=4,
    dtype=torch.float64,
    micro_batches=1,
    no_sync=True,
    checkpoints=False,
    evaluates=False,
    host=False,
    **settings,
):
    """Whole weights after training from rank 0's start; ``zero_grad`` in both modes in turn.

    Args:
        evaluates: before weights change, run a forward pass with gradients and no backward pass.
        host: communicate as Gloo does what is on GPUs.
    """
    if host:
        with sent_through_the_host():
            return train(optimizer, steps, dtype, **settings)
    model = network(dist.get_rank(), dtype)
    model.checkpoints = checkpoints
    sharded = FSDP(model, **settings)
    stepper = OPTIMIZERS[optimizer](sharded.parameters())
    for step in range(steps):
        inputs, targets = map(share, batch(step))
        stepper.zero_grad(set_to_none=step % 2 == 0)
        parts = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for part, (x, y) in enumerate(parts):
            is_last = part == len(parts) - 1
            with contextlib.nullcontext() if is_last or not no_sync else sharded.no_sync():
                (loss_of(sharded, x, y) / micro_batches).backward()
        sharded.finish_gradient_synchronization()
        if evaluates:
            sharded(inputs)
        stepper.step()
    return on_cpu(sharded.gather_full_params())


@contextlib.contextmanager
def sent_through_the_host():
    modules = (collectives, fsdp_gradients)
    through_host = collectives.through_host
    for module in modules:
        module.through_host = lambda tensor: True
    try:
        yield
    finally:
        for module in modules:
            module.through_host = through_host


def train_all(variants):
    return {name: train(**settings) for name, settings in variants.items()}


class Products(nn.Module):
    """The gradient of each weight is a given tensor, so that sums are exact."""

    SHAPES = ((1, 4), (3, 1), (7, 15), (15, 3), (8, 2), (5, 1))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Product(shape) for shape in self.SHAPES])
        self.gain = nn.Parameter(torch.zeros(3))

    def forward(self, factors):
        products = [layer(factor) for layer, factor in zip(self.layers, factors, strict=False)]
        return sum(product.double() for product in products) + (self.gain.double() * factors[-1]).sum()


class Product(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, factor):
        return (self.weight * factor).sum()


def factors(rank, largest):
    """Integers that 1 to 4 ranks divide."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (*Products.SHAPES, (3,))
    return [12.0 * torch.randint(-largest, largest, shape, generator=generator) for shape in shapes]


def average_integers(settings):
    """Gradients of integers in fp32 and half precision, over two passes."""
    results = {}
    for name, (largest, options) in settings.items():
        sharded = FSDP(Products(), **options)
        for _ in range(2):
            sharded(factors(dist.get_rank(), largest)).backward()
        sharded.finish_gradient_synchronization()
        results[name] = whole_gradients(sharded)
    return results


def mixed_precision(compute_dtype):
    """Gradients of a step, and the mean of those that ranks compute alone from weights in ``compute_dtype``."""
    tokens, targets = map(share, batch(0, 30))
    sharded = FSDP(transformer(), compute_dtype)
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()

    alone = transformer()
    for part in alone.modules():
        if type(part).__name__ in ("Linear", "Embedding"):
            part.to(compute_dtype)
    loss_of(alone, tokens, targets).backward()
    means = {}
    for name, parameter in alone.named_parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, parameter.grad)
        means[name] = sum(part.cpu().float() for part in parts) / dist.get_world_size()
    dtypes = {parameter.grad.dtype for parameter in sharded.parameters()}
    return whole_gradients(sharded), means, dtypes, {parameter.dtype for parameter in sharded.parameters()}


class WithoutNorms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 7)) for _ in range(3)])
        self.head = nn.Linear(7, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard_like_torch(model, parts, compute_dtype):
    # Else it is of GPUs wherever there are any.
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def beside_fully_shard(compute_dtype):
    """Whole weights after training with our wrapper and with torch's."""
    ours = FSDP(on_rank(WithoutNorms()), compute_dtype)
    theirs = on_rank(WithoutNorms())
    shard_like_torch(theirs, [*theirs.blocks, theirs.embedding, theirs.head], compute_dtype)
    results = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, *map(share, batch(step))).backward()
            if model is ours:
                model.finish_gradient_synchronization()
            optimizer.step()
    results.append(on_cpu(ours.gather_full_params()))
    full = {name: parameter.full_tensor() for name, parameter in theirs.named_parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in theirs.parameters())
    results.append(on_cpu(full))
    return results
