"""Modules that use weights, arguments, losses and passes in unusual ways train as in one process."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
import unusual_models
from fsdp_models import WIDTH, Model, batch, gathered_units, loss_of, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, gradients, refusal_of, share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unusual_models import HeadBiasHeldTwice, TiedByHand, passes

from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP

NAMES = [name for name, value in vars(unusual_models).items() if isinstance(value, type) and issubclass(value, Model)]
CASES = [(name, {}) for name in NAMES]
CASES += [
    (name, setting) for name in ("TiedByHand", "PenaltyOnAll") for setting in ({"keep_gathered": 2}, {"prefetch": 0})
]


def ids(module):
    return {name: id(parameter) for name, parameter in module.named_parameters()}


@on_ranks(2)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_module_gets_the_gradients_of_one_process(name, settings):
    model = getattr(unusual_models, name)
    sharded = FSDP(model(), **settings)
    before = ids(sharded)
    assert_same(*passes(sharded, model()), atol=1e-14)
    assert gathered_units(sharded) == {}
    assert ids(sharded) == before


def run_backward_twice(model, tokens, targets):
    first, second = loss_of(model, tokens, targets), loss_of(model, tokens, targets)
    second.backward(retain_graph=True)
    second.backward()
    return first


@on_ranks(2)
def test_weight_used_outside_of_its_layer_in_several_passes():
    assert_same(*passes(FSDP(TiedByHand()), TiedByHand(), run=run_backward_twice), atol=1e-14)


def run_under_autocast(model, tokens, targets):
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, tokens, targets).backward()
        loss_of(model, tokens, targets).backward()
        return loss_of(model, tokens, targets)


@on_ranks(2)
def test_passes_in_one_autocast_context_leave_no_gradient_behind():
    sharded, alone = FSDP(Model().float()), Model().float()
    assert_same(*passes(sharded, alone, steps=1, run=run_under_autocast), atol=1e-2, rtol=3e-2)


@on_ranks(2)
def test_bias_held_twice_has_the_dtype_of_its_weight():
    sharded = FSDP(HeadBiasHeldTwice().float(), torch.bfloat16)
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


DROPPING = {
    "wrapper": lambda sharded: sharded.zero_grad(),
    "module": lambda sharded: sharded.module.zero_grad(),
    "optimizer": lambda sharded: torch.optim.SGD(sharded.parameters(), lr=0.1).zero_grad(),
    "zeros": lambda sharded: sharded.zero_grad(set_to_none=False),
    "nobody": lambda sharded: None,
}


@on_ranks(2)
@pytest.mark.parametrize("who", [*DROPPING, "one rank"])
def test_gradients_kept_under_no_sync_are_dropped_by_anybody_and_refresh_refuses_them_until_then(who):
    sharded, alone = FSDP(Model()), Model()
    with sharded.no_sync():
        loss_of(sharded, *map(share, batch(0))).backward()
    DROPPING.get(who, DROPPING["nobody" if dist.get_rank() else "wrapper"])(sharded)
    if who in ("nobody", "one rank"):
        assert "no_sync() have left gradients to average" in refusal_of(sharded.refresh)
        if next(sharded.parameters()).grad is not None:
            assert "lack those of other ranks" in refusal_of(torch.optim.SGD(sharded.parameters()).step)
    elif who == "wrapper":
        sharded.refresh()
    for step in (0, 1) if who == "nobody" else (1,):
        loss_of(alone, *batch(step)).backward()
    loss_of(sharded, *map(share, batch(1))).backward()
    sharded.finish_gradient_synchronization()
    if who != "one rank":
        assert_same(whole_gradients(sharded), gradients(alone), atol=1e-15)


@on_ranks(2)
@pytest.mark.parametrize("keep_gathered", [0, 2])
def test_layers_called_alone_use_slices_that_changed_after_a_forward_pass(keep_gathered):
    sharded, alone = FSDP(Model(), keep_gathered=keep_gathered), Model()
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for is_data in (True, False):
        for model in (sharded, alone):
            loss_of(model, *batch(0))
            with torch.no_grad():
                for parameter in model.parameters():
                    (parameter.data if is_data else parameter).mul_(1.1)
        with torch.no_grad():
            computed = [(root.blocks[0](x), root.blocks[2](x), root.head(x)) for root in (sharded.module, alone)]
        torch.testing.assert_close(*computed, rtol=0, atol=1e-14)
    for model, root in ((sharded, sharded.module), (alone, alone)):
        (loss_of(model, *batch(1)) + root.blocks[2](x).square().sum()).backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients(alone), atol=1e-14)


@on_ranks(2)
def test_sparse_buffer_is_refused():
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    message = "sparse is sparse, which cannot be sent to other ranks: make it dense by to_dense()"
    assert error_of(FSDP, module) == ("UsageError", message)


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
    assert_same(whole_gradients(sharded), gradients(alone), atol=1e-12)
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
    assert_same(whole_gradients(sharded), gradients(alone), atol=1e-12)


@on_ranks(2)
def test_second_loss_after_a_failed_backward_pass_keeps_its_gradients():
    sharded, alone = FSDP(Model()), Model()
    before = ids(sharded)
    for model, root in ((sharded, sharded.module), (alone, alone)):
        tokens, targets = map(share, batch(0)) if model is sharded else batch(0)
        good = loss_of(model, tokens, targets)
        handle = root.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
        bad = loss_of(model, tokens, targets)
        with contextlib.suppress(ZeroDivisionError):
            bad.backward()
        assert ids(sharded) == before
        handle.remove()
        model.zero_grad()
        good.backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients(alone), atol=1e-15)
