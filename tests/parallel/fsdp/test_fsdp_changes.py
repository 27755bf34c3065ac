"""Modules hold slices between passes; what was changed is refused by name until refresh() takes it up."""

import pytest
import torch
import torch.distributed as dist
from fsdp_models import WIDTH, Block, Model, batch, gradients_of, loss_of, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, share
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm, parametrizations, parametrize
from unusual_models import TiedByHand

from cs336sys.parallel.fsdp import FSDP

TOKENS = batch(0)[0]


def require_error(error, beginning, part=""):
    kind, message = error
    assert kind == "UsageError"
    assert message.startswith(beginning)
    assert part in message


class Scales(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return super().forward(x)


class Assigns(Block):
    def forward(self, x):
        self.up.weight.data = self.up.weight.data * 0.9
        return super().forward(x)


class ReturnsItsWeight(Model):
    def forward(self, tokens):
        return super().forward(tokens), self.embedding.weight


class GivesOtherWeights(Model):
    def body(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            others = {name: torch.zeros(parameter.shape) for name, parameter in block.named_parameters()}
            x = torch.func.functional_call(block, others, x)
        return self.norm(x)


class FreezesItself(Model):
    def forward(self, tokens):
        self.head.weight.requires_grad_(False)
        return super().forward(tokens)


class ShortensRows(Model):
    def add_parts(self):
        self.embedding.max_norm = 0.5


class ScalesInABlock(Model):
    def add_parts(self):
        self.blocks[0].__class__ = Scales


class AssignsInABlock(Model):
    def add_parts(self):
        self.blocks[0].__class__ = Assigns


REPLACED = " is no longer the parameter that was wrapped (assigned, or given to functional_call)"


@on_ranks(2)
@pytest.mark.parametrize(
    ("model", "beginning", "part"),
    [
        (
            ScalesInABlock,
            "blocks.0.up.weight was changed in the forward pass, which is lost when its rows are free",
            "",
        ),
        (AssignsInABlock, "blocks.0.up.weight was changed in the forward pass, which is lost when its rows are fr", ""),
        (ShortensRows, "embedding.weight was changed in the forward pass", ""),
        (
            ReturnsItsWeight,
            "the module returns a weight, or a view of one, of shape (11, 6), whose memory is freed",
            "",
        ),
        (GivesOtherWeights, "blocks.0.", REPLACED),
        (FreezesItself, "head.weight is frozen or unfrozen in the forward pass: do it between two steps", ""),
    ],
)
def test_changes_that_a_forward_pass_would_lose_are_refused_by_name(model, beginning, part):
    require_error(error_of(FSDP(model()), TOKENS), beginning, part)


class KeepsItsWeight(TiedByHand):
    def forward(self, tokens):
        self.kept = [self.embedding.weight]
        return self.body(tokens)


MADE = {}


class Late(Model):
    """Computes something from a weight once, where nobody sees it."""

    def forward(self, tokens):
        if not MADE:
            MADE["scale"] = self.blocks[2].up.weight.sum() * 1
        return super().forward(tokens) * MADE["scale"]


@on_ranks(2)
def test_weights_that_outlive_their_pass_are_refused_by_name():
    keeps = FSDP(KeepsItsWeight())
    keeps(TOKENS)
    beginning = "a weight of embedding was kept from a forward pass and is used after it"
    require_error(error_of(keeps.module.kept[0].sum), beginning)
    cached = Model()
    parametrizations.weight_norm(cached.head)
    sharded = FSDP(cached)
    with parametrize.cached():
        sharded(TOKENS)
        require_error(error_of(sharded, TOKENS), "parametrize.cached() has kept a weight of another forward pass")
    late, errors = FSDP(Late()), []
    for step in range(2):
        loss_of(late, *batch(step)).backward(retain_graph=True)
        errors.append(error_of(late.finish_gradient_synchronization))
    assert errors[0] is None
    require_error(errors[1], "blocks.2.up.weight got a gradient after the backward pass had left blocks.2")
    late.finish_gradient_synchronization()  # It was discarded.


@on_ranks(2)
def test_transformed_and_replaced_passes_are_refused():
    sharded, ones = FSDP(Model()), torch.ones(2, 4)
    beginning = "FSDP cannot see the backward pass of a function that torch.func transforms (vmap, jvp, grad)"
    require_error(error_of(torch.func.vmap(sharded), TOKENS[None]), beginning)
    require_error(error_of(torch.func.jvp, FSDP(nn.Linear(4, 4)), (ones,), (ones,)), beginning)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in sharded.named_parameters()}
    require_error(error_of(torch.func.functional_call, sharded, zeros, TOKENS), "embedding.weight was replaced")
    block = sharded.module.blocks[0]
    block.up.weight = nn.Parameter(torch.zeros(15, WIDTH, dtype=torch.float64))
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    require_error(error_of(block, x), f"blocks.0.up.weight{REPLACED}")


@on_ranks(2)
def test_gradients_and_steps_at_the_wrong_moment_are_refused():
    sharded = FSDP(Model())
    part = " got a gradient outside of the forward pass, where this rank holds a slice of it"
    penalty = sum(parameter.square().sum() for parameter in sharded.parameters())
    require_error(error_of(penalty.backward), "", part)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    loss_of(sharded, *batch(0)).backward()
    sharded.finish_gradient_synchronization()
    parameters = [*sharded.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    beginning = "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients"
    require_error(error_of(clip_grads_with_norm_, parameters, 1.0, get_total_norm(gradients)), beginning)
    loss = loss_of(sharded, *batch(0))
    optimizer.step()
    require_error(error_of(loss.backward), "head.", " was changed between the forward and the backward pass")


@on_ranks(2)
def test_hooks_that_would_not_be_called_are_refused():
    beginning = "head.weight has a hook, which would not be called"
    hooked = Model()
    hooked.head.weight.register_hook(lambda gradient: gradient)
    require_error(error_of(FSDP, hooked), beginning)
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        sharded = FSDP(Model())
        getattr(sharded.module.head.weight, kind)(lambda _: None)
        require_error(error_of(sharded, TOKENS), beginning)


@on_ranks(2)
def test_attributes_of_parameters_are_those_of_slices():
    """In the forward pass and in a hook, too."""
    model, seen = Model(), []
    model.head.weight.no_decay = model.norm.weight.no_decay = True
    sharded = FSDP(model)

    def note(*_):
        seen.append([name for name, parameter in model.named_parameters() if hasattr(parameter, "no_decay")])

    note()
    model.blocks[0].register_forward_hook(note)
    model.head.register_forward_hook(note)
    sharded(TOKENS)
    assert seen == [["norm.weight", "head.weight"]] * 3


class Raises(TiedByHand):
    def forward(self, tokens):
        out = super().forward(tokens)
        return out if self.training else 1 / 0


@on_ranks(2)
def test_module_holds_its_slices_after_every_pass():
    sharded, (tokens, targets) = FSDP(Raises(), keep_gathered=2), batch(0)
    before, block = dict(sharded.named_parameters()), sharded.module.blocks[0]

    def require_slices():
        assert all(parameter is before[name] for name, parameter in sharded.named_parameters())

    loss = loss_of(sharded, tokens, targets)
    require_slices()
    handle = sharded.module.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
    assert error_of(loss_of(sharded, tokens, targets).backward)[0] == "ZeroDivisionError"
    require_slices()
    handle.remove()
    loss.backward()
    require_slices()
    sharded.finish_gradient_synchronization()
    assert error_of(sharded.eval(), tokens)[0] == "ZeroDivisionError"
    require_slices()
    with torch.no_grad():
        assert error_of(sharded, tokens)[0] == "ZeroDivisionError"
        require_slices()
        block(torch.ones(2, WIDTH, dtype=torch.float64))
        require_slices()
        # A layer that is called alone, and fails.
        assert error_of(block, torch.ones(2, WIDTH + 1, dtype=torch.float64))[0] == "RuntimeError"
        require_slices()


def add_block(model, seed):
    torch.manual_seed(seed)
    model.blocks.append(Block().double())


def tie(model, seed):
    model.head.weight = model.embedding.weight


def untie(model, seed):
    pass


def remove_block(model, seed):
    del model.blocks[1]


def freeze(model, seed):
    model.blocks[0].up.weight.requires_grad_(False)


def unfreeze(model, seed):
    model.blocks[0].up.weight.requires_grad_(True)


# Each with its refusal, and how many slices are lost by it.
CHANGES = (
    (add_block, "blocks.3.up.weight was added", 0),
    (tie, "head.weight was tied to embedding.weight", 1),
    (untie, "head.weight was untied from embedding.weight", 0),
    (remove_block, "blocks.", 6),
    (freeze, None, 0),
    (unfreeze, "blocks.0.up.weight was unfrozen", 0),
)


@on_ranks(2, 3)
def test_refresh_takes_up_what_was_added_removed_tied_and_frozen():
    torch.manual_seed(dist.get_rank())
    sharded, alone = FSDP(Model()), Model()
    for change, beginning, lost in CHANGES:
        before = {id(parameter) for parameter in sharded.parameters()}
        if change is untie:
            weight = sharded.gather_full_params()["embedding.weight"]
            sharded.module.head.weight = nn.Parameter(weight.clone())
            alone.head.weight = nn.Parameter(alone.embedding.weight.detach().clone())
        # The ranks' own have other values, but that of rank 0.
        change(sharded.module, 5 + dist.get_rank())
        change(alone, 5)
        if beginning is not None:
            for call in (
                lambda: sharded(TOKENS),
                sharded.finish_gradient_synchronization,
                lambda: sharded.module(TOKENS),
            ):
                require_error(error_of(call), beginning, "after it was wrapped: call refresh() on every rank")
        sharded.refresh()
        for model, inputs in ((sharded, map(share, batch(0))), (alone, batch(0))):
            model.zero_grad()
            loss_of(model, *inputs).backward()
        sharded.finish_gradient_synchronization()
        assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-14)
        assert len(before - {id(parameter) for parameter in sharded.parameters()}) == lost
    sharded.module.head.weight = nn.Parameter(sharded.module.head.weight.detach().clone())
    part = "was replaced (as load_state_dict() with assign=True does)"
    require_error(error_of(sharded, TOKENS), "head.weight ", part)
    part = "was replaced by a tensor of the shape of a slice: copy slices into those that are there"
    require_error(error_of(sharded.refresh), "head.weight ", part)
    require_error(error_of(sharded.module, TOKENS), "head.weight was replaced")
