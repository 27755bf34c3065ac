"""Gathers come ahead of use and reductions during the backward pass, in one order on all ranks, whoever comes late."""

import pytest
import torch
from fsdp_models import batch, gathered_units, loss_of, recorded, train, transformer, whole_gradients
from launches import delays
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import gradients, share
from torch import nn

from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP

UNITS = ["token_embeddings", "layers.0", "layers.1", "lm_head"]
NORMS = ", ".join([*(f"layers.{layer}.ln{n}.weight" for layer in (0, 1) for n in (1, 2)), "ln_final.weight"])


def launches(compute_dtype):
    """What a transformer of two blocks launches in the backward pass of its third step, and after it."""
    sharded = FSDP(transformer(layers=2), compute_dtype)
    tokens, targets = map(share, batch(0, 30))
    with recorded([]) as log:
        for _ in range(3):
            loss = loss_of(sharded, tokens, targets)
            log.clear()
            loss.backward()
            in_backward = len(log)
            sharded.finish_gradient_synchronization()
    return log[:in_backward], log[in_backward:]


def units_of(log, collective):
    return [unit for launched, unit in log if launched == collective]


@on_ranks(2, gpus=True)
@pytest.mark.parametrize(("compute_dtype", "reduction"), [(None, "reduce-scatter"), (torch.bfloat16, "all-to-all")])
def test_reductions_come_in_the_backward_pass(compute_dtype, reduction):
    """In the order of figures.txt."""
    backward, late = launches(compute_dtype)
    # Every rank finishes a step, but not every backward pass comes through a unit that could tell its end.
    assert late == [("all-reduce", NORMS)]
    assert units_of(backward, reduction) == UNITS[::-1]


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


@on_ranks(2)
@pytest.mark.parametrize(("prefetch", "keep_gathered"), [(1, 0), (2, 0), (1, 2), (0, 9)])
def test_order_of_units_may_change(prefetch, keep_gathered):
    """What was fetched in vain is freed, gradients are right, and each unit reduces once, however often it is used."""
    sharded = FSDP(Shuffled().double(), prefetch=prefetch, keep_gathered=keep_gathered)
    alone, counts = Shuffled().double(), []
    for block in sharded.module.blocks:
        block.register_forward_hook(lambda *_: counts.append(len(gathered_units(sharded))))
        block.register_full_backward_hook(lambda *_: counts.append(len(gathered_units(sharded))))
    inputs = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4)
    for order in ("012345", "543210", "5432", "0", "010123", "012345", "012345", "024", "135"):
        order = [int(index) for index in order]
        with recorded([]) as log:
            for model, x in ((sharded, share(inputs)), (alone, inputs)):
                model.zero_grad()
                model(x, order).backward()
            sharded.finish_gradient_synchronization()
        assert max(counts) <= 1 + prefetch + (1 + keep_gathered if keep_gathered else 0)
        assert_same(whole_gradients(sharded), gradients(alone), atol=1e-14)
        assert sorted(units_of(log, "reduce-scatter")) == [f"blocks.{index}" for index in sorted(set(order))]
        # Weights that were not gathered anew would be those of the step before.
        for model in (sharded, alone):
            torch.optim.SGD(model.parameters(), lr=0.5).step()


@on_ranks(2, gpus=True)
def test_delays_change_nothing():
    """Every rank comes late to other launches and waits than its peers."""
    on_gpu = group_device().type == "cuda"
    for settings in ({}, {"dtype": torch.float32, "compute_dtype": torch.bfloat16}):
        expected = train("sgd", steps=2, **settings)
        for delay in delays():
            with recorded([], delay):
                delayed = train("sgd", steps=2, **settings)
            # On GPUs sums by atomic additions differ in the last places, here and there by one rounding to half
            # precision.
            assert_same(delayed, expected, **({"rtol": 1e-3, "atol": 1e-4} if on_gpu else {}))


@on_ranks(2, gpus=True)
def test_lateness_is_told_for_every_gather():
    sharded = FSDP(transformer(layers=2))
    tokens, targets = map(share, batch(0, 30))
    for _ in range(2):
        with sharded.watched_gathers() as watch:
            loss_of(sharded, tokens, targets).backward()
        sharded.finish_gradient_synchronization()
    loss_of(sharded, tokens, targets).backward()
    timings = watch.timings()
    assert [(timing.unit, timing.is_backward) for timing in timings] == [
        *((name, False) for name in UNITS),
        *((name, True) for name in UNITS[-2::-1]),
    ]
    if group_device().type == "cpu":
        assert all(timing.late_ms >= 0 for timing in timings)
    else:
        assert all(abs(timing.late_ms) < 1000 for timing in timings)
