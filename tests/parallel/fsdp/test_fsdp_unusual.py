"""Modules that use weights and arguments in unusual ways, and unusual orders of passes, train as in one process."""

import pytest
import torch
import torch.distributed as dist
import unusual_models
from fsdp_models import WIDTH, Model, batch, gathered_units, gradients_of, loss_of, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, refusal_of, share
from torch import nn
from unusual_models import HeadBiasHeldTwice, TiedByHand, passes

from cs336sys.parallel.fsdp import FSDP

NAMES = [name for name, value in vars(unusual_models).items() if isinstance(value, type) and issubclass(value, Model)]
CASES = [(name, {}) for name in NAMES]
CASES += [
    (name, setting) for name in ("TiedByHand", "PenaltyOnAll") for setting in ({"keep_gathered": 2}, {"prefetch": 0})
]
EVALUATED = ("TiedByHand", "EncoderLayerAlone", "LongShortTermMemory")


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


class TwoModules(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2)]
        self.first, self.second = map(wrap, layers)

    def forward(self, x):
        return (self.first(x) * self.second(x)).mean() + self.first(self.second(x)).mean()


@on_ranks(2)
def test_two_wrapped_modules_in_one_graph():
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    sharded, alone = TwoModules(FSDP), TwoModules(lambda module: module)
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


@on_ranks(2)
@pytest.mark.parametrize("who", [*DROPPING, "one rank"])
def test_gradients_kept_under_no_sync_are_dropped_by_anybody_and_refresh_refuses_them_until_then(who):
    sharded, alone = FSDP(Model()), Model()
    with sharded.no_sync():
        loss_of(sharded, *map(share, batch(0))).backward()
    DROPPING.get(who, DROPPING["nobody" if dist.get_rank() else "wrapper"])(sharded)
    if who in ("nobody", "one rank"):
        assert "no_sync() have left gradients to average" in refusal_of(sharded.refresh)
    elif who == "wrapper":
        sharded.refresh()
    for step in (0, 1) if who == "nobody" else (1,):
        loss_of(alone, *batch(step)).backward()
    loss_of(sharded, *map(share, batch(1))).backward()
    sharded.finish_gradient_synchronization()
    if who != "one rank":
        assert_same(whole_gradients(sharded), gradients_of(alone), atol=1e-15)


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
def test_sparse_buffer_is_refused():
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    message = "sparse is sparse, which cannot be sent to other ranks: make it dense by to_dense()"
    assert error_of(FSDP, module) == ("UsageError", message)
