"""Ranks that hold slices of the gradients do not clip each by the norm of its own."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from on_ranks import on_ranks
from small_models import error_of
from torch import nn

# By name, as scripts do, before there are any slices.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from cs336sys.kernels.adamw import AdamW
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel

ALONE = (
    "UsageError",
    "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients: call "
    "clip_grad_norm_() of the FSDP or TensorParallel module, or of the sharded optimizer, on every rank",
)


def layer():
    return nn.Linear(4, 4)


def trained(module):
    """With gradients."""
    module(torch.ones(2, 4)).sum().backward()
    if hasattr(module, "finish_gradient_synchronization"):
        module.finish_gradient_synchronization()
    return list(module.parameters())


def clip_values(slices):
    clip_grad_value_(slices, 0.5)
    assert max(parameter.grad.max().item() for parameter in slices) == 0.5
    # A rank may have none.
    clip_grad_value_([nn.Parameter(torch.ones(2))], 0.5)


def clip_whole(parameters):
    # Of a layer's gradients, all 2: 16 weights and 4 biases.
    assert clip_grad_norm_(parameters, 0.01).item() == pytest.approx((20 * 4) ** 0.5)


@on_ranks(2)
def test_slices_of_fsdp_are_clipped_by_their_common_norm_alone():
    slices = trained(FSDP(layer()))
    assert error_of(clip_grad_norm_, slices, 0.01) == ALONE
    assert error_of(partial(AdamW, slices), max_grad_norm=0.01) == (
        "ValueError",
        "AdamW: max_grad_norm 0.01 would clip by the norm of this rank's share of the gradients: leave it out, and "
        "call clip_grad_norm_() of the module that shares them before step()",
    )
    AdamW(slices)
    clip_values(slices)
    clip_whole(trained(NaiveDDP(layer())))


@on_ranks(2)
def test_slices_of_optimizers_are_clipped_by_their_common_norm_alone():
    flat = layer()
    optimizer = ShardedOptimizer(flat.parameters(), torch.optim.SGD, flat=True, lr=0.1)
    assert error_of(clip_grad_norm_, trained(flat), 0.01) == ALONE
    assert error_of(clip_grad_value_, flat.parameters(), 0.5) == (
        "UsageError",
        "torch.nn.utils.clip_grad_value_ would clip nothing, because backward passes leave no gradients with these "
        "parameters: give it own_tensors of the sharded optimizer, or call its clip_grad_norm_()",
    )
    assert error_of(ShardedOptimizer, layer().parameters(), AdamW, max_grad_norm=0.01) == (
        "UsageError",
        "max_grad_norm 0.01 would clip by the norm of this rank's share: leave it out, and call clip_grad_norm_() of "
        "the sharded optimizer before step()",
    )
    ShardedOptimizer(layer().parameters(), AdamW, max_grad_norm=None)
    optimizer.finish_gradient_synchronization()
    clip_values(optimizer.own_tensors)
    optimizer.zero_grad()
    del optimizer
    clip_whole(trained(flat))
    plain = layer()
    ShardedOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    clip_whole(trained(plain))


@on_ranks(2)
def test_parts_of_tensor_parallel_layers_are_clipped_by_their_common_norm_alone():
    model = BasicsTransformerLM(10, 4, d_model=8, num_layers=1, num_heads=2, d_ff=16, rope_theta=10000.0)
    shared = TensorParallel(model)
    assert error_of(clip_grad_norm_, list(shared.parameters()), 0.01) == ALONE
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert error_of(FSDP(shared.module, group=group).clip_grad_norm_, 0.01) == (
        "UsageError",
        "other ranks have other parts of these layers, whose gradients count, too: call clip_grad_norm_(max_norm, "
        "sharded=...) of the TensorParallel module",
    )
