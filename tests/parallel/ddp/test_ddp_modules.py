"""Compiled and copied modules train as others do; all-reduces run in one order, beside the passes."""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp_modes import MODES, each_mode, finish, recorded_launches, train
from launches import delays
from on_ranks import on_ranks
from same_tensors import assert_same, dict_of
from small_models import Branches, PartlyUsed, batch, error_of, gradients, network
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


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


MEANS = {f"branches.{i}": torch.full((3,), 1.5 * (i + 1)) for i in range(4)}


@on_ranks(2)
@each_mode
def test_launch_order_is_the_same_when_gradients_become_ready_in_another(mode):
    """A hook that launches at once would add one branch's gradient to another's without an error."""
    rank = dist.get_rank()
    wrapped, ready = MODES[mode](Branches()), []
    for index, branch in enumerate(wrapped.module.branches):
        branch.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    with recorded_launches() as launches:
        wrapped([(0, 1, 2, 3), (2, 0, 3, 1)][rank], rank + 1.0).backward()
        finish(wrapped)
    assert ready == [[3, 2, 1, 0], [1, 3, 0, 2]][rank]
    assert ", ".join(names for names, *_ in launches) == ", ".join(f"branches.{i}" for i in (3, 2, 1, 0))
    assert_same(gradients(wrapped.module), MEANS)


@on_ranks(2, gpus=True)
def test_delays_change_nothing():
    """Every rank comes late to other collectives than its peers; on GPUs both with launches and with gradients."""
    expected = {mode: train(mode, steps=2) for mode in MODES}
    for delay in delays():
        with recorded_launches(delay):
            for mode in MODES:
                assert_same(train(mode, steps=2), expected[mode])


# In backward order: last.weight, second.bias, second.weight (tied), norm.bias, norm.weight, first.bias, first.weight:
# 260, 52, 676, 52, 52, 52 and 364 bytes. Flat: one tensor, every gradient from a multiple of 64 elements on.
LAUNCHED = {
    "naive": [[65], [13], [169], [13], [13], [13], [91]],
    "flat": [[128 + 64 + 192 + 64 + 64 + 64 + 128]],
    "overlap": [[65], [13], [169], [13], [13], [13], [91]],
    "bucketed": [[65 + 13], [169], [13 + 13 + 13], [91]],
    "one bucket": [[65 + 13 + 169 + 13 + 13 + 13 + 91]],
}


@on_ranks(2)
@each_mode
def test_launches_overlap_the_backward_pass_where_they_should(mode):
    wrapped, before_last = MODES[mode](network(0)), []
    with recorded_launches() as launches:
        wrapped.module.first.weight.register_hook(lambda _: before_last.append(len(launches)))
        wrapped(batch(0)[0]).sum().backward()
        in_backward = len(launches)
        finish(wrapped)
    assert [[sum(elements)] for _, elements, _ in launches] == LAUNCHED[mode]
    assert mode != "flat" or [len(elements) for _, elements, _ in launches] == [1]
    assert before_last[0] >= {"overlap": 5, "bucketed": 2}.get(mode, 0)
    assert in_backward == (0 if mode in ("naive", "flat") else len(launches))
    assert mode in ("overlap", "bucketed") or before_last == [0]


# By rank, the branches of two modules that it uses.
USED = (((0, 1), (0,)), ((0,), (1, 0)))


def chain(first, second, rank):
    of_first, of_second = USED[rank]
    return second(of_second, first(of_first, rank + 1.0))


def chained_alone(rank):
    first, second = Branches(2), Branches(2)
    chain(first, second, rank).backward()
    return gradients(first), gradients(second)


@on_ranks(2)
def test_collective_of_the_caller_comes_in_order_though_ranks_lack_other_gradients():
    """A sum of the caller's, of as many elements; flat sharded optimizers move weights by the gradients."""
    expected = [
        {name: sum(0 if part[name] is None else part[name] for part in of_ranks) / 2 for name in of_ranks[0]}
        for of_ranks in zip(*map(chained_alone, range(2)), strict=True)
    ]
    for mode in [*MODES, "flat sharded"]:
        first, second = modules = Branches(2), Branches(2)
        if mode == "flat sharded":
            options = {"flat": True, "bucket_size_mb": 1e-5, "lr": 1.0}
            averaging = [ShardedOptimizer(module.parameters(), torch.optim.SGD, **options) for module in modules]
        else:
            first, second = averaging = [MODES[mode](module) for module in modules]
        for order in (1, -1):
            loss = chain(first, second, dist.get_rank())
            loss.backward()
            dist.all_reduce(total := loss.detach().expand(3).clone())
            assert (total == sum(collectives.gather_objects(loss.item()))).all(), mode
            for wrapped in averaging[::order]:
                finish(wrapped)
            averages = [gradients(module) for module in modules]
            if mode == "flat sharded":
                for optimizer in averaging:
                    optimizer.step()
                averages = [{name: 1.0 - weight.detach() for name, weight in m.named_parameters()} for m in modules]
                with torch.no_grad():
                    for parameter in [*first.parameters(), *second.parameters()]:
                        parameter.fill_(1.0)
            for wrapped, average, wanted in zip(averaging, averages, expected, strict=True):
                assert_same(average, wanted)
                wrapped.zero_grad()


@on_ranks(2)
@each_mode
def test_second_pass_over_other_parameters_is_refused_where_the_first_has_launched(mode):
    wrapped, factor = MODES[mode](Branches()), dist.get_rank() + 1.0
    wrapped((0, 1), 1.0).backward()
    error = error_of(wrapped((2, 3), 1.0).backward)
    if mode in ("naive", "flat"):
        assert error is None
    else:
        assert error[0] == "UsageError"
        assert "run all passes of a step but the last under no_sync()" in error[1]
    finish(wrapped)
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped((0, 1), factor).backward()
    wrapped((2, 3), factor).backward()
    finish(wrapped)
    assert_same(gradients(wrapped.module), MEANS)
