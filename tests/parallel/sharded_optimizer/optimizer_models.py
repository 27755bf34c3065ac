"""Models, optimizer classes and training steps that the rank programs of this room share."""

import pytest
import small_models
import torch
import torch.distributed as dist
from cs336_basics.optimizer import AdamW
from small_models import batch, share, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

MODES = ("default", "flat")
each_mode = pytest.mark.parametrize("mode", MODES)

# 800 bytes hold one to four of the network's vectors in fp32, and no matrix.
SMALL_MB = 0.0008

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "AdamW per tensor": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "course": (AdamW, {"lr": 0.01}),
    # Row and column means of matrices: whole parameters only.
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class SwitchedNorm(torch.optim.SGD):
    """Scales a step by the norm of a whole parameter, as LAMB does, if a group asks for it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if group.get("by_norm") and parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class Network(small_models.Network):
    """As that, tied and frozen parameters, with a matrix of 2304 elements, which 1 to 4 ranks cut where it lies."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 48)
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 48)
        self.third = nn.Linear(48, 48, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(48, 5)
        self.last.bias.requires_grad_(False)


def network(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return Network().to(dtype)


def sharded(mode, model, optimizer_cls=torch.optim.AdamW, *, overlap=False, params=None, **options):
    """The module to run and the optimizer: in mode "alone" the class itself, by default with an averaging wrapper."""
    params = model.parameters() if params is None else params
    if mode == "alone":
        options.pop("bucket_size_mb", None)
        return model, optimizer_cls(params, **options)
    options = {"bucket_size_mb": SMALL_MB, "flat": mode == "flat", "module": model if overlap else None} | options
    optimizer = ShardedOptimizer(params, optimizer_cls, **options)
    return (model if mode == "flat" else NaiveDDP(model)), optimizer


def finish(wrapped):
    if isinstance(wrapped, NaiveDDP):
        wrapped.finish_gradient_synchronization()


def wait_for_parameters(optimizer):
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.wait_for_parameters()


def train_step(wrapped, optimizer, step, dtype=torch.float32, set_to_none=True):
    """One step on this rank's share, or in mode "alone" on the whole batch; returns the loss on it."""
    optimizer.zero_grad(set_to_none=set_to_none)
    is_alone = not isinstance(optimizer, ShardedOptimizer) and not isinstance(wrapped, NaiveDDP)
    inputs, targets = batch(step, dtype) if is_alone else map(share, batch(step, dtype))
    loss = nn.functional.mse_loss(wrapped(inputs), targets)
    loss.backward()
    finish(wrapped)
    optimizer.step()
    return loss.item()


def train(mode, name="AdamW", dtype=torch.float32, steps=4, overlap=False):
    """Weights after training from rank 0's start; ``zero_grad`` in both ways in turn."""
    is_sent = not (mode == "alone" or (mode == "flat" and not overlap))
    model = network(dist.get_rank() if is_sent else 0, dtype)
    optimizer_cls, settings = CLASSES[name]
    model = model if mode == "alone" else model.to(collectives.group_device())
    wrapped, optimizer = sharded(mode, model, optimizer_cls, overlap=overlap, **settings)
    for step in range(steps):
        train_step(wrapped, optimizer, step, dtype, set_to_none=step % 2 == 0)
    wait_for_parameters(optimizer)
    return weights(model)


# But for those of a wrapper.
LAUNCHED = (collectives.MeanScatter, collectives.SliceGather, collectives.Broadcasts)
