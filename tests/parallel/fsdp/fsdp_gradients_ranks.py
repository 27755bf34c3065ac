"""What the ranks of test_fsdp_gradients run: functions that spawned processes can import."""

import contextlib

import torch
import torch.distributed as dist
from fsdp_models import batch, gradients, loss_of, network, on_cpu, recorded, transformer, whole_gradients
from small_models import error_of, share
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP


class Sometimes(nn.Module):
    """A block with a layer that is used if so asked."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x, use):
        y = self.always(x)
        return y + self.sometimes(x) * self.gain if use else y


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Sometimes() for _ in range(3)])
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x, use, skip=False):
        for block in self.blocks[: 2 if skip else 3]:
            x = block(x, use)
        return x.sum()


def branching_gradients(model, rank, use, skip):
    """What one process computes on this rank's input."""
    model.zero_grad()
    model(torch.full((2, 3), rank + 1.0), use, skip).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unused(cases):
    """For each case, averaged gradients, and those that every rank computes alone: None where it has none."""
    sharded, alone = FSDP(Branching()), Branching()
    results = []
    for used_on, skip in cases:
        sharded.zero_grad()
        rank = dist.get_rank()
        sharded(torch.full((2, 3), rank + 1.0), rank in used_on, skip).backward()
        sharded.finish_gradient_synchronization()
        results.append((whole_gradients(sharded), branching_gradients(alone, rank, rank in used_on, skip)))
    return results


def unused_keeps_what_was_there():
    """A gradient of zeros, which zero_grad leaves, is none that disappears."""
    sharded = FSDP(Branching())
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sharded(torch.ones(2, 3), False).backward()
    sharded.finish_gradient_synchronization()
    return gradients(sharded)


def freeze_and_unfreeze():
    """Errors before refresh(), and gradients before and after."""
    model = Branching()
    model.blocks[0].always.requires_grad_(False)
    model.blocks[1].gain.requires_grad_(False)
    sharded = FSDP(model)
    x = torch.full((2, 3), dist.get_rank() + 1.0)

    def step():
        sharded.zero_grad()
        sharded(x, True).backward()
        sharded.finish_gradient_synchronization()
        return {name for name, gradient in gradients(sharded).items() if gradient is not None}

    before = step()
    model.blocks[0].always.requires_grad_(True)
    model.blocks[1].gain.requires_grad_(True)
    model.blocks[2].sometimes.requires_grad_(False)
    errors = [error_of(step)]
    sharded.refresh()
    after = step()
    whole = whole_gradients(sharded)
    model.blocks[2].always.requires_grad_(dist.get_rank() == 0)
    errors.append(error_of(sharded.refresh))
    return before, after, whole, errors


def used_in_the_second_of_three_passes():
    sharded = FSDP(Branching())
    for uses in (False, True, False):
        sharded(torch.full((2, 3), dist.get_rank() + 1.0), uses).backward()
    sharded.finish_gradient_synchronization()
    return gradients(sharded)


def through_frozen_layers():
    """Gradients of the inputs of frozen layers in two steps, and those of the plain layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).sum(), x)
    sharded, found = FSDP(layers), []
    for _ in range(2):
        sharded(x).sum().backward()
        sharded.finish_gradient_synchronization()
        found.append(x.grad)
        x.grad = None
    return found, expected


def accumulation():
    """Whole gradients of three passes: all but the last under no_sync, all under it, none; and of bf16 weights."""
    results = []
    for compute_dtype in (None, torch.bfloat16):
        for synchronized in ((False, False, True), (False, False, False), (True, True, True), (True, False, True)):
            sharded = FSDP(transformer(), compute_dtype)
            log = []
            with recorded(log):
                for step, synchronize in enumerate(synchronized):
                    with contextlib.nullcontext() if synchronize else sharded.no_sync():
                        loss_of(sharded, *map(share, batch(step, 30))).backward()
                sharded.finish_gradient_synchronization()
            reductions = sum(collective in ("reduce-scatter", "all-to-all") for collective, _ in log)
            results.append((compute_dtype, synchronized, reductions, whole_gradients(sharded)))
    return results


def clipped(norm_type, largest):
    """Norm and whole gradients after clipping, with our wrapper and in one process on the mean loss of all ranks."""
    sharded, alone = FSDP(network(0)), network(0)
    tokens, targets = batch(0)
    loss_of(sharded, share(tokens), share(targets)).backward()
    sharded.finish_gradient_synchronization()
    norm = sharded.clip_grad_norm_(largest, norm_type)
    loss_of(alone, *(rows.to(collectives.group_device()) for rows in (tokens, targets))).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), largest, norm_type)
    gradients_alone = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return norm.cpu(), expected.cpu(), whole_gradients(sharded), on_cpu(gradients_alone)


def not_a_number(value):
    """Norms, errors and gradients when one element of one rank's slice is not finite."""
    sharded = FSDP(network(0))
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == dist.get_world_size() - 1:
        sharded.module.blocks[0].up.weight.grad[0, 0] = value
    before = gradients(sharded)
    error = error_of(sharded.clip_grad_norm_, 1.0, error_if_nonfinite=True)
    after = gradients(sharded)
    infinite = sharded.clip_grad_norm_(1.0, float("inf"))
    return error, before, after, sharded.clip_grad_norm_(1.0), infinite
