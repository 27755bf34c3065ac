"""What the ranks of test_gradient_scaler run: functions that spawned processes can import."""

import torch
from small_models import error_of, share
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

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


def train(model, optimizers, scaler, *, finish, take, clip, weights):
    """Weights and scale after each of four steps, of which the second overflows."""
    history = []
    for step, factor in enumerate(FACTORS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(take(rows(step)), factor)).backward()
        finish()
        for optimizer in optimizers:
            if clip:
                scaler.unscale_(optimizer)
                clip(1.0)
            scaler.step(optimizer)
        scaler.update()
        history.append((weights(), scaler.get_scale()))
    return history


def alone(settings, clips, device="cpu"):
    """One process, the whole batch, torch's own scaler."""
    model = Rows().to(device)
    optimizers = [torch.optim.AdamW(part.parameters(), **settings) for part in (model.wide, model.narrow)]
    if clips:
        optimizers = [torch.optim.AdamW(model.parameters(), **settings)]
    return train(
        model,
        optimizers,
        torch.amp.GradScaler(device, init_scale=SCALE),
        finish=lambda: None,
        take=lambda rows: rows.to(device),
        clip=(lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)) if clips else None,
        weights=lambda: _copies(dict(model.named_parameters())),
    )


def fully_sharded(settings, clips):
    sharded = FSDP(Rows().to(collectives.group_device()))
    parts = [sharded] if clips else [sharded.module.wide, sharded.module.narrow]
    return train(
        sharded,
        [torch.optim.AdamW(part.parameters(), **settings) for part in parts],
        ShardedGradScaler(collectives.group_device().type, init_scale=SCALE),
        finish=sharded.finish_gradient_synchronization,
        take=share,
        clip=sharded.clip_grad_norm_ if clips else None,
        weights=lambda: _copies(sharded.gather_full_params()),
    )


def optimizer_sharded(flat, settings, clips, bucket_size_mb=None):
    plain = Rows().to(collectives.group_device())
    parts = [plain] if clips else [plain.wide, plain.narrow]
    optimizers = [
        ShardedOptimizer(
            part.parameters(), torch.optim.AdamW, flat=flat, bucket_size_mb=bucket_size_mb, module=part, **settings
        )
        for part in parts
    ]
    wrapped = plain if flat else NaiveDDP(plain)

    def whole():
        for optimizer in optimizers:
            optimizer.wait_for_parameters()
        return _copies(dict(plain.named_parameters()))

    return train(
        wrapped,
        optimizers,
        ShardedGradScaler(collectives.group_device().type, init_scale=SCALE),
        finish=(lambda: None) if flat else wrapped.finish_gradient_synchronization,
        take=share,
        clip=optimizers[0].clip_grad_norm_ if clips else None,
        weights=whole,
    )


def train_all(cases):
    """By wrapper, settings of AdamW and whether gradients are clipped."""
    return [
        {
            "fsdp": fully_sharded(settings, clips),
            "default": optimizer_sharded(False, settings, clips),
            "flat": optimizer_sharded(True, settings, clips, bucket_size_mb=0.0001),
            "flat, one bucket": optimizer_sharded(True, settings, clips),
        }
        for settings, clips in cases
    ]


def refusals():
    """Errors of scalers that decide alone, and whether weights are as before; then what plain models do with them."""
    sharded = FSDP(Rows())
    plain = Rows()
    flat = ShardedOptimizer(plain.parameters(), torch.optim.SGD, flat=True, lr=1.0)
    cases = {
        "fsdp": (sharded, torch.optim.SGD(sharded.parameters(), lr=1.0), torch.amp.GradScaler),
        "fused": (sharded, torch.optim.AdamW(sharded.parameters(), fused=True), torch.amp.GradScaler),
        "fused, torch's": (sharded, torch.optim.AdamW(sharded.parameters(), fused=True), TorchShardedGradScaler),
        "flat": (plain, flat, torch.amp.GradScaler),
    }
    errors = {}
    for what, (model, optimizer, scaler_class) in cases.items():
        scaler = scaler_class("cpu", init_scale=SCALE)
        optimizer.zero_grad()
        scaler.scale(model(share(rows(0)), FACTORS[1])).backward()
        if model is sharded:
            sharded.finish_gradient_synchronization()
        errors[what] = error_of(scaler.step, optimizer)
        errors[f"{what}, unscaled"] = error_of(scaler.unscale_, optimizer) if what != "fused, torch's" else errors[what]
    flat.zero_grad()
    sharded.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(sharded(share(rows(0)), 1.0)).backward()
    sharded.finish_gradient_synchronization()
    off.unscale_(optimizer)
    before = _copies(sharded.gather_full_params())
    off.step(torch.optim.SGD(sharded.parameters(), lr=1.0))
    after = _copies(sharded.gather_full_params())
    return (
        errors,
        all((weight == 1.0).all() for weight in before.values()),
        before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before),
    )


def _copies(named):
    return {name: parameter.detach().cpu().clone() for name, parameter in named.items()}
