"""Gradients that are accumulated, clipped or not finite are those of one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import batch, gradients, loss_of, network, on_cpu, recorded, transformer, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, share
from torch import nn

from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP


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
