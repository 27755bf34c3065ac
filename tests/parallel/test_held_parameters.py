"""Every change of what a module holds is named, and what changes nothing is accepted."""

import pytest
import torch
from small_models import Network, network
from torch import nn
from torch.nn.utils import parametrizations

from cs336sys.errors import UsageError
from cs336sys.parallel.held_parameters import HeldParameters


def add(module):
    module.norm.adapter = nn.Linear(2, 2)


def add_weight(module):
    module.extra = nn.Parameter(torch.ones(1))


def add_bias(module):
    module.third.bias = nn.Parameter(torch.ones(13))


def add_tied(module):
    module.head = nn.Linear(13, 13, bias=False)
    module.head.weight = module.second.weight


def remove(module):
    del module.norm


def remove_weight(module):
    module.last.bias = None


def replace(module):
    state = {name: value.clone() for name, value in module.first.state_dict().items()}
    module.first.load_state_dict(state, assign=True)


def replace_equal_scalar(module):
    module.extra_scale.value = nn.Parameter(module.extra_scale.value.detach().clone())


def exchange(module):
    module.first, module.last = module.last, module.first


def exchange_attributes(module):
    weight, bias = module.norm.weight, module.norm.bias
    del module.norm.weight, module.norm.bias
    module.norm.bias, module.norm.weight = weight, bias


def rename(module):
    module.norm = nn.Sequential(module.norm)


def own_again(module):
    again = nn.Linear(7, 13)
    again.weight, again.bias = module.first.weight, module.first.bias
    module.first = again


def tie(module):
    module.third.bias = module.second.bias


def untie(module):
    module.third.weight = nn.Parameter(module.third.weight.detach().clone())


def reshape(module):
    module.first.bias.data = torch.zeros(1)


def convert(module):
    module.first.double()


def unfreeze(module):
    module.last.bias.requires_grad_(True)


def parametrize(module):
    parametrizations.weight_norm(module.first)


CHANGES = {
    add: "norm.adapter.weight was added",
    add_weight: "extra was added",
    add_bias: "third.bias was added",
    add_tied: "head.weight was tied to second.weight",
    remove: "norm.weight was removed",
    remove_weight: "last.bias was removed",
    replace: "first.weight was replaced (as load_state_dict() with assign=True does)",
    replace_equal_scalar: "extra_scale.value was replaced (as load_state_dict() with assign=True does)",
    exchange: "first.weight was replaced (as load_state_dict() with assign=True does)",
    exchange_attributes: "norm.bias was replaced (as load_state_dict() with assign=True does)",
    rename: "norm.0.weight was moved from norm.weight",
    own_again: "first.weight was moved into another module",
    tie: "third.bias was tied to second.bias",
    untie: "third.weight was untied from second.weight",
    reshape: "first.bias was changed from (13,) to (1,)",
    convert: "first.weight was changed from torch.float32 to torch.float64",
    unfreeze: "last.bias was unfrozen",
    parametrize: "first.parametrizations.weight.original0 was added",
}


def held(module):
    module.extra_scale = nn.Module()
    module.extra_scale.value = nn.Parameter(torch.ones(()))
    return HeldParameters(module)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_parameter_is_named(change):
    module = network(0)
    snapshot = held(module)
    snapshot.require_unchanged()
    change(module)
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            snapshot.require_unchanged()
        assert str(caught.value) == f"{CHANGES[change]} after it was wrapped: call refresh() on every rank"
    HeldParameters(module).require_unchanged()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_without_gradients_only_tensors_from_outside_are_accepted_in_the_place_of_parameters(change):
    module = network(0)
    snapshot = held(module)
    change(module)
    if change in (replace, replace_equal_scalar, untie):
        snapshot.require_unchanged(allows_exchanged=True)
    else:
        with pytest.raises(UsageError):
            snapshot.require_unchanged(allows_exchanged=True)


def test_other_values_may_be_given_without_gradients():
    module = network(0)
    snapshot = held(module)
    averages = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    accepted = []

    def compare(*_):
        snapshot.require_unchanged(allows_exchanged=True)
        accepted.append(module.first.weight is averages["first.weight"])

    module.register_forward_pre_hook(compare)
    with torch.no_grad():
        torch.func.functional_call(module, averages, torch.ones(2, 7))
    snapshot.require_unchanged()
    assert accepted == [True]
    assert snapshot._is_unchanged()


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
