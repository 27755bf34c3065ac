"""Gradients that are missing, frozen, accumulated, clipped or not finite are those of one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import batch, gradients, loss_of, network, on_cpu, recorded, transformer, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, refusal_of, share
from torch import nn

from cs336sys.parallel.collectives import gather_objects, group_device
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


def mean(parts):
    """Over ranks; None counts as zero, and is the result if there is nothing else."""
    present = [part for part in parts if part is not None]
    return sum(present) / len(parts) if present else None


@on_ranks(2, 3)
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded, alone, x = FSDP(Branching()), Branching(), torch.full((2, 3), rank + 1.0)
    for used_on, skip in (
        (range(world_size), False),
        ((0,), False),
        ((world_size - 1,), False),
        ((), False),
        ((0,), True),
    ):
        for model in (sharded, alone):
            model.zero_grad()
            model(x, rank in used_on, skip).backward()
        sharded.finish_gradient_synchronization()
        of_ranks = gather_objects({name: parameter.grad for name, parameter in alone.named_parameters()})
        expected = {name: mean([part[name] for part in of_ranks]) for name in of_ranks[0]}
        assert expected["blocks.0.never.weight"] is None
        assert (expected["blocks.0.sometimes.weight"] is None) == (used_on == ())
        assert (expected["blocks.2.always.weight"] is None) == skip
        assert_same(whole_gradients(sharded), expected)


@on_ranks(2)
def test_parameter_unfrozen_is_an_error_until_refresh():
    names = {f"blocks.{block}.{part}" for block in range(3) for part in ("always.weight", "sometimes.weight", "gain")}
    model = Branching()
    model.blocks[0].always.requires_grad_(False)
    model.blocks[1].gain.requires_grad_(False)
    sharded = FSDP(model)

    def trained():
        sharded.zero_grad()
        sharded(torch.full((2, 3), dist.get_rank() + 1.0), True).backward()
        sharded.finish_gradient_synchronization()
        return {name for name, gradient in whole_gradients(sharded).items() if gradient is not None}

    assert trained() == names - {"blocks.0.always.weight", "blocks.1.gain"}
    model.blocks[0].always.requires_grad_(True)
    model.blocks[1].gain.requires_grad_(True)
    model.blocks[2].sometimes.requires_grad_(False)
    message = "blocks.0.always.weight was unfrozen after it was wrapped: call refresh() on every rank"
    assert error_of(trained) == ("UsageError", message)
    sharded.refresh()
    assert trained() == names - {"blocks.2.sometimes.weight"}
    model.blocks[2].always.requires_grad_(dist.get_rank() == 0)
    assert "blocks.2.always.weight float32 (3, 3) strides (3, 1) trained on rank 0, " in refusal_of(sharded.refresh)


@on_ranks(2)
def test_gradients_pass_through_layers_that_have_none():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).sum(), x)
    sharded = FSDP(layers)
    for _ in range(2):
        sharded(x).sum().backward()
        sharded.finish_gradient_synchronization()
        assert torch.equal(x.grad, expected)
        x.grad = None


@on_ranks(2, gpus=True)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_no_sync_sends_nothing_until_the_last_pass_or_finish(compute_dtype):
    expected = None
    for synchronized in ((True, True, True), (False, False, True), (False, False, False), (True, False, True)):
        sharded = FSDP(transformer(), compute_dtype)
        with recorded([]) as log:
            for step, synchronize in enumerate(synchronized):
                with contextlib.nullcontext() if synchronize else sharded.no_sync():
                    loss_of(sharded, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
        # Units: the embedding, three blocks, the head.
        reductions = [collective for collective, _ in log if collective in ("reduce-scatter", "all-to-all")]
        assert len(reductions) == 5 * max(1, sum(synchronized))
        expected = expected or whole_gradients(sharded)
        # Kept gradients are summed in fp32 here and by autograd: the order of additions differs.
        rtol, atol = (1e-5, 1e-7) if group_device().type == "cpu" else (1e-3, 1e-5)
        assert_same(whole_gradients(sharded), expected, rtol=rtol, atol=atol)


@on_ranks(2, 3, gpus=True)
@pytest.mark.parametrize(("norm_type", "largest"), [(2.0, 0.1), (1.0, 0.5), (float("inf"), 0.01), (2.0, 1e9)])
def test_clipping_is_that_of_the_whole_gradient(norm_type, largest):
    sharded, alone, device = FSDP(network(0)), network(0), group_device()
    tokens, targets = batch(0)
    loss_of(sharded, share(tokens), share(targets)).backward()
    sharded.finish_gradient_synchronization()
    norm = sharded.clip_grad_norm_(largest, norm_type)
    loss_of(alone, tokens.to(device), targets.to(device)).backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), largest, norm_type))
    expected = on_cpu({name: parameter.grad for name, parameter in alone.named_parameters()})
    rtol, atol = (1e-10, 1e-12) if device.type == "cpu" else (1e-8, 1e-10)
    assert_same(whole_gradients(sharded), expected, rtol=rtol, atol=atol)


@on_ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(value):
    sharded = FSDP(network(0))
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == dist.get_world_size() - 1:
        sharded.module.blocks[0].up.weight.grad[0, 0] = value
    before = gradients(sharded)
    message = f"the norm of the gradients is {value}: some are NaN or infinite, on some rank"
    assert error_of(sharded.clip_grad_norm_, 1.0, error_if_nonfinite=True) == ("RuntimeError", message)
    assert_same(gradients(sharded), before, equal_nan=True)
    assert not sharded.clip_grad_norm_(1.0, float("inf")).isfinite()
    assert not sharded.clip_grad_norm_(1.0).isfinite()
