"""Modules hold slices between passes; what was changed, or cannot work, is refused by name on every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import WIDTH, Block, Model, batch, loss_of
from on_ranks import on_ranks
from small_models import error_of, refusal_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm, parametrizations, parametrize
from unusual_models import TiedByHand

from cs336sys.parallel.ddp import OverlappedDDP
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


@on_ranks(2, 3)
def test_parameter_replaced_by_a_slice_is_refused_by_refresh_and_before_by_every_pass():
    """Random programs refresh what was added, tied and removed."""
    sharded = FSDP(Model())
    up = sharded.module.blocks[0].up
    up.weight = nn.Parameter(up.weight.detach().clone())
    part = "was replaced (as load_state_dict() with assign=True does)"
    for call in (lambda: sharded(TOKENS), sharded.finish_gradient_synchronization):
        require_error(error_of(call), "blocks.0.up.weight ", part)
    part = "was replaced by a tensor of the shape of a slice: copy slices into those that are there"
    require_error(error_of(sharded.refresh), "blocks.0.up.weight ", part)
    require_error(error_of(sharded.module, TOKENS), "blocks.0.up.weight was replaced")


@on_ranks(2)
def test_unit_modules_may_come_from_a_generator():
    pairs = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert [unit.name for unit in FSDP(pairs, unit_modules=pairs.children()).units] == ["0", "1"]


@on_ranks(2)
def test_impossible_combination_is_refused_by_name():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded, sparse = FSDP(plain), FSDP(nn.Embedding(5, 3, sparse=True))
    wrapped = "is wrapped already: wrap the plain module"
    for error, beginning in (
        (error_of(FSDP, sharded), f"the module (FSDP) {wrapped}"),
        (error_of(FSDP, nn.Sequential(plain)), f"0 (Sequential) {wrapped}"),
        (error_of(FSDP, nn.Sequential(OverlappedDDP(nn.Linear(2, 2)))), f"0 (OverlappedDDP) {wrapped}"),
        (error_of(FSDP, fully_shard(nn.Sequential(nn.Linear(2, 2)))), f"the module (FSDPSequential) {wrapped}"),
        (error_of(FSDP, nn.Linear(2, 2), prefetch=-1), "prefetch -1: must be a whole number, at least 0"),
        (error_of(FSDP, nn.Linear(2, 2), keep_gathered=0.5), "keep_gathered 0.5: must be a whole number, at least 0"),
        (error_of(FSDP, nn.Linear(2, 2), unit_modules=["0"]), "unit_modules: '0' is not in the wrapped module"),
        (error_of(FSDP, nn.Linear(2, 2), unit_modules=5), "unit_modules 5: must be modules in a list, or None"),
        (
            error_of(FSDP, nn.Linear(2, 2), torch.int8),
            "compute_dtype torch.int8: choose torch.float64, ",
        ),
        (
            error_of(FSDP, nn.Linear(2, 2), gradient_dtype=torch.float8_e5m2),
            "gradient_dtype torch.float8_e5m2: choose torch.float64, ",
        ),
        (
            error_of(sharded.to, torch.float16),
            "an FSDP module cannot be moved or converted: do it before it is wrapped",
        ),
        (error_of(copy.deepcopy, sharded), "an FSDP module cannot be copied or pickled"),
        (
            error_of(sparse(torch.tensor([1, 2])).sum().backward),
            "weight has a sparse gradient, which cannot be averaged: choose sparse=False",
        ),
    ):
        assert error[0] == "UsageError"
        assert error[1].startswith(beginning)
    assert error_of(FSDP, nn.Linear(2, 2), device=torch.float16)[0] == "TypeError"  # It would convert the weights.


@on_ranks(2)
def test_passes_in_another_group_or_outside_of_one_are_refused():
    sharded = FSDP(nn.Linear(2, 2))
    world_size = dist.get_world_size()
    for name, replacement in (("get_world_size", lambda: world_size + 1), ("is_initialized", lambda: False)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(dist, name, replacement)
            message = refusal_of(sharded, torch.ones(1, 2))
            assert message.startswith("this FSDP module was built in another process group")


@on_ranks(2)
def test_ranks_that_build_something_else_are_told_on_every_rank():
    is_first = dist.get_rank() == 0
    for outputs, prefetch, difference in (
        (5, 1, "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5"),
        (4, 2, "gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, prefetch=2, keep_g"),
    ):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 if is_first else outputs))
        message = refusal_of(FSDP, module, prefetch=1 if is_first else prefetch)
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message
