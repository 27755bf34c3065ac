"""Modules that use weights and arguments in unusual ways, and unusual orders of passes, train as in one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import unusual_models
from fsdp_models import gathered_units, gradients_of, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, share
from torch import nn
from unusual_models import WIDTH, BlockChangesItsInput, HeadBiasHeldTwice, Model, TiedByHand, batch, loss_of, passes

from cs336sys.parallel.fsdp import FSDP

NAMES = [name for name, value in vars(unusual_models).items() if isinstance(value, type) and issubclass(value, Model)]
CASES = [(name, {}) for name in NAMES]
CASES += [
    (name, setting) for name in ("TiedByHand", "PenaltyOnAll") for setting in ({"keep_gathered": 2}, {"prefetch": 0})
]
EVALUATED = ("TiedByHand", "LayerReturnsAView", "WeightsInAList", "EncoderLayerAlone", "LongShortTermMemory")


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


@on_ranks(2)
@pytest.mark.parametrize("name", EVALUATED)
def test_module_evaluates_as_one_process_does(name):
    model, (tokens, _) = getattr(unusual_models, name), batch(0)
    sharded, alone = FSDP(model()).eval(), model().eval()
    with torch.no_grad():
        for run in (sharded, sharded.module):
            torch.testing.assert_close(run(tokens), alone(tokens), rtol=0, atol=1e-14)
    assert gathered_units(sharded) == {}


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


@on_ranks(2)
def test_inputs_that_are_converted_may_be_changed_in_place():
    sharded, alone = FSDP(BlockChangesItsInput().float(), torch.bfloat16), BlockChangesItsInput()
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    loss_of(alone, *batch(0)).backward()
    whole = {name: gradient.double() for name, gradient in whole_gradients(sharded).items()}
    assert_same(whole, gradients_of(alone), atol=3e-2, rtol=1e-1)


class TwoModules(nn.Module):
    def __init__(self, wrap, in_a_row):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2)]
        self.first, self.second = map(wrap, layers)
        self.in_a_row = in_a_row

    def forward(self, x):
        if self.in_a_row:
            return self.second(self.first(x)).square().mean()
        return (self.first(x) * self.second(x)).mean() + self.first(self.second(x)).mean()


@on_ranks(2)
@pytest.mark.parametrize("in_a_row", [True, False])
def test_two_wrapped_modules_in_one_graph(in_a_row):
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    sharded, alone = TwoModules(FSDP, in_a_row), TwoModules(lambda module: module, in_a_row)
    for _ in range(2):
        sharded.zero_grad()
        alone.zero_grad()
        sharded(share(inputs)).backward()
        for part in (sharded.first, sharded.second):
            part.finish_gradient_synchronization()
        alone(inputs).backward()
    for part, plain in ((sharded.first, alone.first), (sharded.second, alone.second)):
        assert_same(whole_gradients(part), gradients_of(plain), atol=1e-15)


DROPPING = {
    "wrapper": lambda sharded: sharded.zero_grad(),
    "module": lambda sharded: sharded.module.zero_grad(),
    "optimizer": lambda sharded: torch.optim.SGD(sharded.parameters(), lr=0.1).zero_grad(),
    "zeros": lambda sharded: sharded.zero_grad(set_to_none=False),
    "nobody": lambda sharded: None,
}


def run_under_no_sync(sharded, drop):
    with sharded.no_sync():
        loss_of(sharded, *map(share, batch(0))).backward()
    drop(sharded)


def assert_next_pass_is_right(sharded, is_dropped):
    alone = Model()
    for step in (1,) if is_dropped else (0, 1):
        loss_of(alone, *batch(step)).backward()
    loss_of(sharded, *map(share, batch(1))).backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-15)


@on_ranks(2)
@pytest.mark.parametrize("who", DROPPING)
def test_whoever_drops_gradients_drops_those_kept_under_no_sync(who):
    sharded = FSDP(Model())
    run_under_no_sync(sharded, DROPPING[who])
    assert_next_pass_is_right(sharded, who != "nobody")


@on_ranks(2)
@pytest.mark.parametrize("who", ["wrapper", "zeros", "one rank", "nobody"])
def test_refresh_refuses_gradients_kept_under_no_sync_until_they_are_dropped(who):
    sharded = FSDP(Model())
    run_under_no_sync(sharded, DROPPING.get(who, DROPPING["nobody" if dist.get_rank() else "wrapper"]))
    error = error_of(sharded.refresh)
    if who in ("wrapper", "zeros"):
        assert error is None
        assert_next_pass_is_right(sharded, is_dropped=True)
    else:
        assert "no_sync() have left gradients to average" in error[1]


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
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-14)


@on_ranks(2)
@pytest.mark.parametrize("who", ["wrapper", "module"])
def test_gradients_dropped_between_forward_and_backward_are_gone(who):
    sharded, alone = FSDP(Model(), keep_gathered=1), Model()
    for step in range(2):
        losses = loss_of(sharded, *map(share, batch(step))), loss_of(alone, *batch(step))
        DROPPING[who](sharded)
        alone.zero_grad()
        for loss in losses:
            loss.backward()
        sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-15)


class WithSpare(Model):
    uses_spare = True

    def add_parts(self):
        self.spare = nn.Linear(WIDTH, unusual_models.VOCABULARY)

    def forward(self, tokens):
        x = self.body(tokens)
        return self.head(x) + (self.spare(x) if self.uses_spare else 0)


@on_ranks(2)
def test_discarded_pass_leaves_no_zeros():
    sharded = FSDP(WithSpare())
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.zero_grad()
    sharded.module.uses_spare = False
    loss_of(sharded, *map(share, batch(1))).backward()
    sharded.finish_gradient_synchronization()
    assert sharded.module.spare.weight.grad is None


@on_ranks(2)
def test_discriminator_that_is_frozen_meanwhile_gets_no_zeros():
    generator, discriminator = FSDP(nn.Linear(3, 4)), FSDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    for _ in range(2):
        made = generator(torch.ones(2, 3))
        for is_trained, x in ((True, made.detach()), (False, made)):
            discriminator.requires_grad_(is_trained)
            discriminator(x).sum().backward()
            for part in (discriminator,) if is_trained else (generator, discriminator):
                part.finish_gradient_synchronization()
            assert [parameter.grad is not None for parameter in discriminator.parameters()] == [is_trained] * 4
            discriminator.zero_grad()


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
    assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-15)


DTYPES = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16)


@on_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_all_dtypes_are_rank_0s(dtype):
    module, number = nn.Linear(2, 2), 1 + dist.get_rank()
    module.register_buffer("numbers", torch.full((3, 2), number).to(dtype))
    module.register_buffer("columns", torch.full((2, 3), number).to(dtype).t()[:, :1])
    module.register_buffer("number", torch.tensor(number).to(dtype))
    FSDP(module)
    assert all((buffer.to(torch.complex64) == 1).all() for buffer in module.buffers())


@on_ranks(2)
def test_sparse_buffer_is_refused():
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    message = "sparse is sparse, which cannot be sent to other ranks: make it dense by to_dense()"
    assert error_of(FSDP, module) == ("UsageError", message)
