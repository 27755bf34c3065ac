"""Checkpointed, compiled and copied modules train as others do, from the first rank's values."""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp_modes import MODES, each_mode, finish, gradients, recorded_launches
from on_ranks import on_ranks
from same_tensors import assert_same, dict_of
from small_models import PartlyUsed, error_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, uses):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.use_reentrant, self.uses = use_reentrant, uses

    def forward(self, x):
        for layer in self.layers:
            for _ in range(self.uses):
                if self.use_reentrant is None:
                    x = torch.tanh(layer(x))
                else:
                    x = torch.tanh(checkpoint(layer, x, use_reentrant=self.use_reentrant))
        return x


def checkpointed(mode, use_reentrant, uses):
    """Averaged gradients, or the error of the backward pass."""
    inputs = torch.linspace(-1, 1, 24).view(4, 6)[dist.get_rank() :].requires_grad_()
    wrapped = MODES[mode](Checkpointed(use_reentrant, uses))
    error = error_of(wrapped(inputs).square().sum().backward)
    finish(wrapped)
    return error or gradients(wrapped.module)


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("uses", [1, 2])
def test_checkpointing_changes_nothing(mode, uses):
    expected = checkpointed("naive", None, uses)
    assert_same(checkpointed(mode, False, uses), expected)
    if uses == 1:
        assert_same(checkpointed(mode, True, uses), expected)
    else:
        kind, message = checkpointed(mode, True, uses)
        assert (kind, "use_reentrant=False" in message) == ("UsageError", True)


class Buffers(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(number)).t())
        self.frozen = nn.Parameter(torch.full((4,), number, dtype=torch.int64), requires_grad=False)
        self.register_buffer("flag", torch.tensor(number == 1))
        self.register_buffer("row", torch.full((3, 1), float(number)).expand(3, 4))
        self.register_buffer("column", torch.full((3, 4), float(number))[:, 1])
        self.register_buffer("passing", torch.full((2,), float(number)), persistent=False)
        self.register_buffer("empty", torch.empty(0))


@on_ranks(2)
def test_start_values_are_those_of_the_first_rank():
    module, expected = NaiveDDP(Buffers(dist.get_rank() + 1)).module, Buffers(1)
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert_same(dict(tensors(module)), dict(tensors(expected)))


@on_ranks(1)
def test_module_whose_child_is_called_module_keeps_its_names():
    wrapped = NaiveDDP(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    wrapped.load_state_dict(wrapped.state_dict())
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("is_pickled", [False, True])
def test_copy_and_new_wrapper_average_once(mode, is_pickled):
    """A group of its own can be copied, but not pickled."""
    original = MODES[mode](PartlyUsed(), group=None if is_pickled else dist.new_group())
    original(1.0, True).backward()
    finish(original)
    copied = pickle.loads(pickle.dumps(original)) if is_pickled else copy.deepcopy(original)
    assert is_pickled or error_of(pickle.dumps, original)[0] == "UsageError"
    assert "would average the same gradients once more: use copy.deepcopy()" in error_of(copy.copy, original)[1]
    assert all(a is not b for a, b in zip(original.parameters(), copied.parameters(), strict=True))
    module = original.module
    del original
    gc.collect()
    wrapped = MODES[mode](module)
    for again in (copied, wrapped):
        again.zero_grad()
        with recorded_launches() as launches:
            again(2.0 * (dist.get_rank() + 1), True).backward()
            finish(again)
        assert_same(gradients(again.module), dict_of(used=3.0, sometimes=3.0, never=None))
    assert [len(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()] == [1, 1, 1]
    assert sorted(name for names, *_ in launches for name in names.split(", ")) == ["never", "sometimes", "used"]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def compiled(mode, target):
    """Launches before the first block's gradients were ready, and gradients of the second of two steps.

    Args:
        target: what is compiled: each of the blocks, the whole model, or what is around the wrapper; None: nothing.
    """
    x, model, seen = torch.linspace(-1, 1, 24).view(4, 6)[dist.get_rank() :], Blocks(), []
    for module in {"blocks": model.blocks, "model": [model]}.get(target, []):
        module.compile(backend="aot_eager", dynamic=False)
    with recorded_launches() as launches:
        # Before the wrapper's own, so it is called before.
        model.blocks[0][0].bias.register_post_accumulate_grad_hook(lambda _: seen.append(len(launches)))
        wrapped = MODES[mode](model)
        run = torch.compile(wrapped, backend="aot_eager", dynamic=False) if target == "around" else wrapped
        for _ in range(2):
            wrapped.zero_grad()
            launches.clear()
            run(x).square().sum().backward()
            finish(wrapped)
    return seen[-1], gradients(model)


@on_ranks(2)
@pytest.mark.parametrize("target", ["blocks", "model", pytest.param("around", marks=pytest.mark.nightly)])
def test_compiled_modules_give_the_same_and_blocks_overlap(target):
    for mode in MODES:
        launched, averaged = compiled(mode, target)
        assert_same(averaged, compiled(mode, None)[1], rtol=1e-6, atol=1e-6)
        if target == "blocks":
            # Three of four blocks, each with weight and bias; the first bucket ends in the third of them.
            assert launched == {"overlap": 6, "bucketed": 1}.get(mode, 0)
    torch.compiler.reset()


@on_ranks(2)
def test_module_without_anything_to_train():
    module = nn.Linear(2, 2).requires_grad_(False)
    for wrap in MODES.values():
        wrapped = wrap(module)
        wrapped(torch.ones(1, 2))
        finish(wrapped)
    finish(BucketedDDP(nn.Identity(), 1.0))
