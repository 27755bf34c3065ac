"""What the ranks of test_ddp_gradients run: functions that spawned processes can import."""

import contextlib
import copy

import torch
import torch.distributed as dist
from ddp_modes import MODES, by_mode, finish, gradients, recorded_launches
from small_models import PartlyUsed, WithoutGradient, batch, error_of, network, penalized_loss, share, weights
from torch import nn

from cs336sys.parallel import collectives


@by_mode
def unused_on_some_ranks(wrap):
    """By mode: gradients of three steps: one parameter used on all ranks, then on rank 0 alone, then on none."""
    wrapped = wrap(PartlyUsed().to(collectives.group_device()))
    steps = []
    for used_on in (range(dist.get_world_size()), (0,), ()):
        wrapped.zero_grad()
        wrapped(12.0 * (dist.get_rank() + 1), dist.get_rank() in used_on).backward()
        finish(wrapped)
        steps.append(gradients(wrapped.module))
    return steps


@by_mode
def none_gradients(wrap):
    """A backward function that returns None on rank 1 alone."""
    wrapped = wrap(PartlyUsed())
    through = WithoutGradient.apply if dist.get_rank() == 1 else torch.clone
    loss = (through(wrapped.module.sometimes) * 4.0).sum() + (wrapped.module.used * 2.0).sum()
    loss.backward()
    finish(wrapped)
    return gradients(wrapped.module)


@by_mode
def second_backward(wrap):
    """By mode: the error of a second pass, that of one under no_sync after a synchronized one, then a good step."""
    errors = []
    wrapped = wrap(PartlyUsed())
    for context in (contextlib.nullcontext, wrapped.no_sync):
        wrapped(1.0, True).backward()
        with context():
            errors.append(error_of(wrapped(1.0, True).backward))
        finish(wrapped)
        wrapped.zero_grad()
    wrapped(2.0 * (dist.get_rank() + 1), True).backward()
    finish(wrapped)
    return errors, gradients(wrapped.module)


@by_mode
def accumulate_without_the_last_pass(wrap):
    """Gradients of a step whose passes were all under no_sync; before it, an error that leaves the context.

    The first of the results is what a second backward pass then raises.
    """
    wrapped = wrap(PartlyUsed())
    with contextlib.suppress(KeyError), wrapped.no_sync():
        raise KeyError
    wrapped(1.0, True).backward()
    error = error_of(wrapped(1.0, True).backward)
    finish(wrapped)
    wrapped.zero_grad()
    wrapped(12.0 * (dist.get_rank() + 1), True).backward()
    finish(wrapped)
    once = gradients(wrapped.module)
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped(12.0 * (dist.get_rank() + 1), True).backward()
        alone = gradients(wrapped.module)
    finish(wrapped)
    return error, once, alone, gradients(wrapped.module)


class MixedDtypes(nn.Module):
    DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(3, dtype=dtype) for dtype in self.DTYPES])

    def forward(self, factor):
        return sum((part * factor).double().sum() for part in self.parts)


@by_mode
def mixed_dtypes(wrap, factor):
    wrapped = wrap(MixedDtypes())
    with recorded_launches() as launches:
        wrapped(factor * (dist.get_rank() + 1)).backward()
        finish(wrapped)
    return [part.grad for part in wrapped.module.parts], [dtype for *_, dtype in launches]


class Permuted(nn.Module):
    """Parameters that are not contiguous: transposed, channels last, and every other column of a larger tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(3, 8)[:, ::2])

    def forward(self, x):
        image = self.image(x.expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        return (self.transposed.square() * x).sum() + image.square().sum() + (self.sliced * x).square().sum()


def permuted_parameters():
    """By mode: the averaged gradients, the local ones that every rank computed from rank 0's weights, the weights."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Permuted())
        x = torch.tensor(dist.get_rank() + 1.0)
        alone = copy.deepcopy(wrapped.module)
        alone(x).backward()
        wrapped(x).backward()
        if dist.get_rank() == 1 and mode in ("naive", "flat"):
            # As a caller may leave it: the same numbers in another order in memory.
            parameter = wrapped.module.transposed
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        finish(wrapped)
        results[mode] = gradients(wrapped.module), gradients(alone), weights(wrapped.module)
    return results


@by_mode
def smaller_traffic(wrap, gradient_dtype):
    """By mode: averaged gradients, local ones, and the dtypes and elements that were sent."""
    wrapped = wrap(network(0), gradient_dtype=gradient_dtype)
    inputs = batch(dist.get_rank())[0]
    alone = copy.deepcopy(wrapped.module)
    alone(inputs).sum().backward()
    with recorded_launches() as launches:
        for _ in range(2):
            wrapped.zero_grad()
            launches.clear()
            wrapped(inputs).sum().backward()
            finish(wrapped)
    return gradients(wrapped.module), gradients(alone), launches


@by_mode
def not_a_number(wrap):
    wrapped = wrap(PartlyUsed())
    wrapped(float("nan") if dist.get_rank() == 1 else 1.0, True).backward()
    finish(wrapped)
    return gradients(wrapped.module)


@by_mode
def sparse_gradient(wrap):
    wrapped = wrap(nn.Embedding(5, 3, sparse=True))

    def step():
        wrapped(torch.tensor([1, 2])).sum().backward()
        finish(wrapped)

    return error_of(step)


@by_mode
def gradient_penalty(wrap):
    """By mode: averaged gradients of a loss with a penalty; errors of gradients that are parts of a graph.

    These are those of the backward pass, of one under no_sync, and of finishing with such a gradient set by hand.
    """
    wrapped = wrap(network(0, torch.float64).to(collectives.group_device()))
    penalized_loss(wrapped, *map(share, batch(0, torch.float64))).backward()
    finish(wrapped)
    penalized = gradients(wrapped.module)
    partly = wrap(PartlyUsed().to(collectives.group_device()))
    errors = [error_of(partly(1.0, True).backward, create_graph=True)]
    partly.zero_grad()
    with partly.no_sync():
        errors.append(error_of(partly(1.0, True).square().backward, create_graph=True))
    partly.zero_grad()
    used = partly.module.used
    (used.grad,) = torch.autograd.grad(used.square().sum(), used, create_graph=True)
    errors.append(error_of(finish, partly))
    return penalized, errors


def penalized_alone():
    model = network(0, torch.float64)
    penalized_loss(model, *batch(0, torch.float64)).backward()
    return gradients(model)
