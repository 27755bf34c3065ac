"""Losses that units keep beside their outputs train as in one process; gradients of gradients are refused."""

import dataclasses

import pytest
import torch
from fsdp_models import gathered_units, gradients_of, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, refusal_of, share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP

INPUTS = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)


@dataclasses.dataclass
class Kept:
    losses: tuple[Tensor, ...]


def keep_in_list(block, x, loss, losses):
    # Never emptied.
    block.all_losses.append(loss)


def keep_view(block, x, loss, losses):
    block.losses = torch.stack([loss, loss]).view(1, 2)
    block.losses *= 2


# How a block keeps its loss, and where it is found.
KINDS = {
    "attribute": (lambda block, x, loss, losses: setattr(block, "loss", loss), lambda block: block.loss),
    "list": (keep_in_list, lambda block: block.all_losses[-1]),
    "dict": (
        lambda block, x, loss, losses: setattr(block, "losses", {"balance": [loss], "count": 1}),
        lambda block: block.losses["balance"][0],
    ),
    "dataclass": (
        lambda block, x, loss, losses: setattr(block, "kept", Kept((loss, loss))),
        lambda block: block.kept.losses[1],
    ),
    "buffer": (lambda block, x, loss, losses: setattr(block, "buffered", loss), lambda block: block.buffered),
    "view": (keep_view, lambda block: block.losses.sum() / 4),
    "list of the caller": (lambda block, x, loss, losses: losses.append(loss), None),
    "checkpointed": (lambda block, x, loss, losses: setattr(block, "loss", loss), lambda block: block.loss),
}


class Block(nn.Module):
    """Computes an auxiliary loss after its output, with its own weights, and keeps it in a way to be chosen."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.all_losses = []
        self.register_buffer("buffered", None)

    def forward(self, x, losses):
        y = x + self.second(torch.tanh(self.first(x)))
        KINDS[self.kind][0](self, x, self.second(torch.relu(self.first(x))).square().mean(), losses)
        return y


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])
        self.to(group_device(), torch.float64)

    def forward(self, x):
        self.losses = []
        for block in self.blocks:
            if block.kind == "checkpointed":
                x = checkpoint(block, x, self.losses, use_reentrant=False)
            else:
                x = block(x, self.losses)
        return x.square().mean()

    def auxiliary(self):
        return sum(self.losses or [KINDS[block.kind][1](block) for block in self.blocks])


@on_ranks(2, gpus=True)
@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        *((kind, "both") for kind in KINDS),
        *((kind, passes) for kind in ("attribute", "view") for passes in ("auxiliary alone", "two passes forward")),
    ],
)
def test_auxiliary_losses_that_blocks_keep_are_trained(kind, passes):
    sharded, alone = FSDP(Blocks(kind)), Blocks(kind)
    for model, plain, x in ((sharded, sharded.module, share(INPUTS)), (alone, alone, INPUTS.to(group_device()))):
        for _ in range(3):
            model.zero_grad()
            loss = model(x)
            loss = (loss.detach() if passes == "auxiliary alone" else loss) + plain.auxiliary()
            if passes == "two passes forward":
                loss = loss + model(2 * x) + plain.auxiliary()
            loss.backward()
            if model is sharded:
                sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-12)
    assert gathered_units(sharded) == {}
    # Losses of earlier steps, which the list still has, are not watched again.
    assert {len(loss._backward_hooks) for block in sharded.module.blocks for loss in block.all_losses[-1:]} <= {1}
    assert passes == "two passes forward" or [unit.calls_ahead for unit in sharded.units] == [0, 0, 0]


@on_ranks(2)
def test_gradient_penalty_is_refused_on_every_rank_and_the_next_step_is_good():
    sharded, norms = FSDP(Blocks("attribute")), FSDP(nn.LayerNorm(5, dtype=torch.float64))
    x = share(INPUTS).requires_grad_()
    for backward in (
        lambda: torch.autograd.grad(sharded(x), x, create_graph=True),
        lambda: sharded(x).backward(create_graph=True),
    ):
        assert error_of(backward) == (
            "UsageError",
            "the backward pass through blocks.2 has create_graph=True, and FSDP frees the weights that a second one "
            "would need: take gradients of gradients with DDP or a ShardedOptimizer",
        )
    assert gathered_units(sharded).keys() <= {"blocks.2"}
    norms(x).square().sum().backward(create_graph=True)
    message = refusal_of(norms.finish_gradient_synchronization)
    assert message.startswith("weight got its gradient with create_graph=True, and the average over ranks is in")
    alone = Blocks("attribute")
    sharded.zero_grad()
    sharded(share(INPUTS)).backward()
    sharded.finish_gradient_synchronization()
    alone(INPUTS).backward()
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-12)
