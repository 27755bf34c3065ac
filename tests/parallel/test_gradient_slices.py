"""Ranks that hold slices of gradients clip by their common norm and skip a step together, or are refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, share
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

# By name, as scripts do, before there are any slices.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from cs336sys.errors import UsageError
from cs336sys.kernels.adamw import AdamW
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
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


# Times the loss scale, the largest is more than fp32 holds.
FACTORS = (1.0, 1e38, 2.0, 3.0)
SCALE = 8.0


class Rows(nn.Module):
    """The gradient of the last row alone has a given factor: with two ranks it is in the slice of the last."""

    def __init__(self):
        super().__init__()
        # Of 256 elements, so that ranks that hold slices of memory share them as those that hold rows.
        self.wide = nn.Linear(16, 16, bias=False)
        # With a row for the first rank alone.
        self.narrow = nn.Linear(16, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x, factor):
        factors = torch.ones(17, device=x.device)
        factors[15] = factor
        return (torch.cat([self.wide(x), self.narrow(x)], 1) * factors).sum(1).mean()


def rows(step):
    """Integers, the same on every rank, so that the means of shares are exact."""
    return torch.randint(-3, 4, (4, 16), generator=torch.Generator().manual_seed(step)).float()


# The module to call, and how optimizers of it are built.
KINDS = {
    "alone": (lambda plain: plain, torch.optim.AdamW),
    "fsdp": (FSDP, torch.optim.AdamW),
    "default": (NaiveDDP, lambda p, **options: ShardedOptimizer(p, torch.optim.AdamW, **options)),
    "flat": (
        lambda plain: plain,
        lambda p, **options: ShardedOptimizer(p, torch.optim.AdamW, flat=True, bucket_size_mb=0.0001, **options),
    ),
}


def train(kind, clips, settings):
    """Weights and scale after each of four steps, of which the second overflows.

    Args:
        clips: whether gradients are unscaled first and clipped, by one optimizer, or there are two.
    """
    wrap, build = KINDS[kind]
    plain, device, history = Rows().to(group_device()), group_device(), []
    wrapped = wrap(plain)
    optimizers = [build(part.parameters(), **settings) for part in ([plain] if clips else [plain.wide, plain.narrow])]
    scaler_class = torch.amp.GradScaler if kind == "alone" else ShardedGradScaler
    scaler = scaler_class(device.type, init_scale=SCALE)
    clipping = wrapped if kind == "fsdp" else optimizers[0]
    for step, factor in enumerate(FACTORS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = rows(step).to(device) if kind == "alone" else share(rows(step))
        scaler.scale(wrapped(inputs, factor)).backward()
        if kind in ("fsdp", "default"):
            wrapped.finish_gradient_synchronization()
        for optimizer in optimizers:
            if clips:
                scaler.unscale_(optimizer)
                if kind == "alone":
                    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                else:
                    clipping.clip_grad_norm_(1.0)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.wait_for_parameters()
        named = wrapped.gather_full_params() if kind == "fsdp" else dict(plain.named_parameters())
        history.append(({name: weight.detach().clone() for name, weight in named.items()}, scaler.get_scale()))
    return history


@on_ranks(2, gpus=True)
@pytest.mark.parametrize("kind", list(KINDS)[1:])
@pytest.mark.parametrize(
    ("clips", "settings"), [(False, {"lr": 0.5}), (False, {"lr": 0.5, "fused": True}), (True, {"lr": 0.5})]
)
def test_overflow_on_one_rank_is_skipped_by_all_and_the_next_steps_equal_one_process(kind, clips, settings):
    expected = train("alone", clips, settings)
    assert [scale for _, scale in expected] == [8.0, 4.0, 4.0, 4.0]
    assert torch.equal(expected[0][0]["wide.weight"], expected[1][0]["wide.weight"])
    for (weights, scale), (weights_alone, scale_alone) in zip(train(kind, clips, settings), expected, strict=True):
        assert scale == scale_alone
        assert_same(weights, weights_alone, rtol=1e-6, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "scaler_class"),
    [*((kind, torch.amp.GradScaler) for kind in ("fsdp", "fused", "flat")), ("fused", TorchShardedGradScaler)],
)
def test_scalers_that_decide_alone_are_refused_before_anything_is_changed(kind, scaler_class):
    plain = Rows()
    wrapped = plain if kind == "flat" else FSDP(plain)
    if kind == "flat":
        optimizer = ShardedOptimizer(plain.parameters(), torch.optim.SGD, flat=True, lr=1.0)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1.0, fused=kind == "fused")
    scaler = scaler_class("cpu", init_scale=SCALE)
    scaler.scale(wrapped(share(rows(0)), FACTORS[1])).backward()
    if kind != "flat":
        wrapped.finish_gradient_synchronization()
    name = "GradScaler" if scaler_class is torch.amp.GradScaler else "ShardedGradScaler"
    refusal = (
        "UsageError",
        f"{name} would skip a step on the rank that finds an overflow and not on the others, because each has slices "
        "of the gradients: choose cs336sys.parallel.gradient_slices.ShardedGradScaler, or bf16",
    )
    for call in (scaler.step, scaler.unscale_):
        if call == scaler.step or name == "GradScaler":
            assert error_of(call, optimizer) == refusal
    whole = plain.state_dict() if kind == "flat" else wrapped.gather_full_params()
    assert all((weight == 1.0).all() for weight in whole.values())


@on_ranks(2)
def test_scaler_that_is_off_steps_slices_whose_gradients_are_finished():
    wrapped, off = FSDP(Rows()), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    off.scale(wrapped(share(rows(0)), 1.0)).backward()
    assert error_of(off.step, optimizer)[1].startswith("gradients lack those of other ranks: call finish_gradient_sync")
    wrapped.finish_gradient_synchronization()
    off.unscale_(optimizer)
    off.step(optimizer)
    assert any((weight != 1.0).any() for weight in wrapped.gather_full_params().values())


@on_ranks(2)
def test_plain_scaler_steps_whole_gradients():
    """Of a plain module, and of a sharded optimizer by default."""
    plain = Rows()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=SCALE), torch.optim.SGD(plain.parameters(), lr=1.0)
    sharded = ShardedOptimizer(Rows().parameters(), torch.optim.SGD, lr=1.0)
    scaler.scale(plain(rows(0), FACTORS[1])).backward()
    for parameter, copied in zip(sharded.param_groups[0]["params"], plain.parameters(), strict=True):
        parameter.grad = copied.grad.clone()
    for stepped in (optimizer, sharded):
        scaler.step(stepped)
    scaler.update()
    sharded.wait_for_parameters()
    assert scaler.get_scale() == SCALE / 2
    assert all((weight == 1.0).all() for weight in [*plain.parameters(), *sharded.param_groups[0]["params"]])


def test_scaler_without_a_process_group_is_refused_unless_it_is_off():
    with pytest.raises(UsageError, match="ShardedGradScaler needs a process group"):
        ShardedGradScaler("cpu")
    assert not ShardedGradScaler("cpu", enabled=False).is_enabled()
