"""Every change of what a module holds is named, and what changes nothing is accepted."""

import contextlib

import pytest
import torch
from small_models import Network, network
from torch import nn
from torch.nn.utils import parametrizations

from cs336sys.errors import UsageError
from cs336sys.parallel.wrapped_modules import HeldParameters


def load_by_assigning(module):
    state = {name: value.clone() for name, value in module.first.state_dict().items()}
    module.first.load_state_dict(state, assign=True)


def exchange(module):
    module.first, module.last = module.last, module.first


def exchange_attributes(module):
    weight, bias = module.norm.weight, module.norm.bias
    del module.norm.weight, module.norm.bias
    module.norm.bias, module.norm.weight = weight, bias


def own_again(module):
    again = nn.Linear(7, 13)
    again.weight, again.bias = module.first.weight, module.first.bias
    module.first = again


def tied_head(module):
    module.head = nn.Linear(13, 13, bias=False)
    module.head.weight = module.second.weight


def tie(module):
    module.third.bias = module.second.bias


def unfreeze(module):
    module.last.bias.requires_grad_(True)


def copy_of(parameter):
    return nn.Parameter(parameter.detach().clone())


ASSIGNED = "was replaced (as load_state_dict() with assign=True does)"
# Each with what it is called, and whether it is accepted without gradients: only tensors from outside are, in the place
# of parameters.
CHANGES = {
    "norm.adapter.weight was added": (lambda module: module.norm.add_module("adapter", nn.Linear(2, 2)), False),
    "extra was added": (lambda module: setattr(module, "extra", nn.Parameter(torch.ones(1))), False),
    "third.bias was added": (lambda module: setattr(module.third, "bias", nn.Parameter(torch.ones(13))), False),
    "head.weight was tied to second.weight": (tied_head, False),
    "norm.weight was removed": (lambda module: delattr(module, "norm"), False),
    "last.bias was removed": (lambda module: setattr(module.last, "bias", None), False),
    f"first.weight {ASSIGNED}": (load_by_assigning, True),
    f"extra_scale.value {ASSIGNED}": (
        lambda module: setattr(module.extra_scale, "value", copy_of(module.extra_scale.value)),
        True,
    ),
    f"first.weight {ASSIGNED} ": (exchange, False),
    f"norm.bias {ASSIGNED}": (exchange_attributes, False),
    "norm.0.weight was moved from norm.weight": (
        lambda module: setattr(module, "norm", nn.Sequential(module.norm)),
        False,
    ),
    "first.weight was moved into another module": (own_again, False),
    "third.bias was tied to second.bias": (tie, False),
    "third.weight was untied from second.weight": (
        lambda module: setattr(module.third, "weight", copy_of(module.third.weight)),
        True,
    ),
    "first.bias was changed from (13,) to (1,)": (
        lambda module: setattr(module.first.bias, "data", torch.zeros(1)),
        False,
    ),
    "first.weight was changed from torch.float32 to torch.float64": (lambda module: module.first.double(), False),
    "last.bias was unfrozen": (unfreeze, False),
    "first.parametrizations.weight.original0 was added": (
        lambda module: parametrizations.weight_norm(module.first),
        False,
    ),
}


def held(module):
    module.extra_scale = nn.Module()
    module.extra_scale.value = nn.Parameter(torch.ones(()))
    return HeldParameters(module)


@pytest.mark.parametrize("text", CHANGES)
def test_changed_parameter_is_named(text):
    module, (change, is_accepted) = network(0), CHANGES[text]
    snapshot = held(module)
    snapshot.require_unchanged()
    change(module)
    message = f"{text.strip()} after it was wrapped: call refresh() on every rank"
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            snapshot.require_unchanged()
        assert str(caught.value) == message
    with contextlib.nullcontext() if is_accepted else pytest.raises(UsageError):
        snapshot.require_unchanged(allows_exchanged=True)
    HeldParameters(module).require_unchanged()


def test_forward_pass_that_changes_no_parameter_is_accepted():
    module = network(0)
    snapshot = held(module)
    module.last.weight.requires_grad_(False)
    snapshot.require_unchanged()
    module.activation = nn.Sequential(nn.GELU(), nn.Dropout())
    snapshot.require_unchanged()
    assert snapshot._is_unchanged()
    module.last.weight.requires_grad_(True)
    module.first.weight.data = torch.ones(13, 7)
    module.load_state_dict(Network().state_dict(), strict=False)
    module.register_buffer("other", torch.ones(1))
    module.first.bias.grad = torch.ones(13)
    snapshot.require_unchanged()
    unfreeze(module)
    with pytest.raises(UsageError, match=r"^last\.bias was unfrozen"):
        snapshot.require_unchanged()


def test_child_of_a_wrapper_is_named_without_the_wrapper():
    wrapper = nn.Module()
    wrapper.module = network(0)
    snapshot = HeldParameters(wrapper, "module.")
    tie(wrapper.module)
    with pytest.raises(UsageError, match=r"^third\.bias was tied to second\.bias after"):
        snapshot.require_unchanged()
    wrapper.module = network(0)
    with pytest.raises(UsageError, match=r"was replaced"):
        snapshot.require_unchanged()


@pytest.mark.gpu
def test_moved_module_is_named():
    module = network(0)
    snapshot = HeldParameters(module)
    module.cuda()
    with pytest.raises(UsageError, match="was changed from cpu to cuda:0"):
        snapshot.require_unchanged()
