"""Training with a sharded optimizer equals training with the class itself, in either mode."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from optimizer_models import CLASSES, MODES, SMALL_MB, each_mode, finish, network, sharded, train, train_step
from same_tensors import assert_same, assert_same_state, dict_of
from small_models import PartlyUsed, Permuted, Products, batch, factors, weights
from torch import nn
from world_sizes import WORLD_SIZES

from cs336sys.parallel.collectives import gather_objects, group_device
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


@on_ranks(*WORLD_SIZES)
@each_mode
def test_training_equals_the_class_on_one_process(mode):
    for name in CLASSES if dist.get_world_size() == 2 else ("AdamW", "SGD"):
        if (name, mode) != ("Adafactor", "flat"):
            expected = train("alone", name, torch.float64)
            for overlap in (False, True):
                assert_same(train(mode, name, torch.float64, overlap=overlap), expected, atol=1e-12)


@on_ranks(2, gpus=True)
def test_both_modes_and_torch_train_to_bitwise_equal_weights():
    # Its import takes seconds.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network(0).to(group_device())
    wrapped = NaiveDDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for step in range(4):
        train_step(wrapped, optimizer, step)
    expected = gather_objects(weights(model))[0]
    for mode in MODES:
        for overlap in (False, True):
            assert_same(train(mode, overlap=overlap), expected)


@on_ranks(*WORLD_SIZES)
@each_mode
@pytest.mark.parametrize("size", [1e-9, SMALL_MB, None])
def test_step_along_integer_gradients_is_exact(mode, size):
    module, world_size = Products(), dist.get_world_size()
    wrapped, optimizer = sharded(mode, module, torch.optim.SGD, lr=1.0, bucket_size_mb=size)
    wrapped(factors(dist.get_rank())).backward()
    finish(wrapped)
    optimizer.step()
    for part, *parts in zip(module.parts, *map(factors, range(world_size)), strict=True):
        assert torch.equal(part, -sum(parts) / world_size)


@on_ranks(2)
@each_mode
def test_closure_runs_once_with_gradients_on_every_rank(mode):
    model, calls, factor = PartlyUsed(), [], 2.0 * (dist.get_rank() + 1)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = wrapped(factor, True)
        loss.backward()
        finish(wrapped)
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 6 * factor
    assert calls == [True]
    assert_same(weights(model), dict_of(used=-2.0, sometimes=-2.0, never=1.0))


class Scaled(torch.optim.SGD):
    """SGD whose step takes an argument and notes in its groups how often it was called."""

    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return super().step(closure)


@on_ranks(2)
@each_mode
def test_step_takes_the_class_arguments_and_calls_hooks(mode):
    model, seen = PartlyUsed(), []
    wrapped, optimizer = sharded(mode, model, Scaled, lr=1.0)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("pre", kwargs)))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("post", kwargs)))
    wrapped(2.0 * (dist.get_rank() + 1), True).backward()
    finish(wrapped)
    optimizer.step(factor=0.5)
    assert_same(weights(model), dict_of(used=-0.5, sometimes=-0.5, never=1.0))
    assert mode == "flat" or optimizer.param_groups[0]["calls"] == 1
    assert seen == [("pre", {"factor": 0.5}), ("post", {"factor": 0.5})]


@on_ranks(3)
@each_mode
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"foreach": True}])
def test_fewer_parameters_than_ranks(mode, options):
    model, alone = (nn.Linear(3, 1, bias=False) for _ in range(2))
    for module in (model, alone):
        nn.init.ones_(module.weight)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1, **options)
    wrapped, optimizer = sharded(mode, model, lr=0.1, **options)
    for step in range(1, 3):
        alone.weight.grad = torch.full((1, 3), 2.0 * step)
        plain.step()
        optimizer.zero_grad()
        (wrapped(torch.full((1, 3), float(step))) * (dist.get_rank() + 1)).sum().backward()
        finish(wrapped)
        optimizer.step()
    torch.testing.assert_close(model.weight, alone.weight, rtol=1e-6, atol=0)
    assert len(optimizer.state) == (1 if dist.get_rank() == 0 else 0)


@on_ranks(2)
@each_mode
def test_start_values_are_those_of_the_first_rank(mode):
    first = dist.get_rank() + 1.0
    parameters = [nn.Parameter(torch.full((5,), first + n), requires_grad=n != 1) for n in range(3)]
    optimizer = ShardedOptimizer(parameters[:2], torch.optim.SGD, lr=1.0, flat=mode == "flat")
    assert [parameter[0].item() for parameter in parameters] == [1.0, 2.0, first + 2]
    optimizer.add_param_group({"params": parameters[2:]})
    assert [parameter[0].item() for parameter in parameters] == [1.0, 2.0, 3.0]


def train_with_masters(resume_at):
    """bf16 weights, state and losses of training with fp32 master parameters, once left and resumed."""
    model, losses = network(0, torch.bfloat16), []
    _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.001)
    for step in range(5):
        if step == resume_at:
            start, state = model.state_dict(), gather_objects(optimizer.consolidated_state_dict())[0]
            model = network(1, torch.bfloat16)
            _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.5)
            model.load_state_dict(start)
            optimizer.load_state_dict(state)
        losses.append(train_step(model, optimizer, step, torch.bfloat16))
    return losses, weights(model), gather_objects(optimizer.consolidated_state_dict())[0]


def train_with_masters_by_hand(ranks=2):
    """fp32 parameters stepped along the mean of bf16 gradients, rounded to bf16."""
    model = network(0, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr=0.001)
    for step in range(5):
        gradients = []
        for x, y in zip(*(part.chunk(ranks) for part in batch(step, torch.bfloat16)), strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            gradients.append([parameter.grad for parameter in trained])
        for master, first, second in zip(masters, *gradients, strict=True):
            master.grad = ((first + second) / ranks).float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
    return weights(model), [master.detach() for master in masters]


@on_ranks(2)
def test_master_parameters_carry_what_bf16_rounds_away():
    expected, masters = train_with_masters_by_hand()
    losses, trained, state = train_with_masters(None)
    assert_same(trained, expected)
    for state_of_parameter, master in zip(state["state"].values(), masters, strict=True):
        assert state_of_parameter["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(state_of_parameter["master_parameter"], master, rtol=0, atol=0)
        assert not torch.equal(master, master.bfloat16().float())
    resumed_losses, resumed, _ = train_with_masters(2)
    assert resumed_losses == losses
    assert_same(resumed, trained)


@on_ranks(2, gpus=True)
@each_mode
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_are_not_contiguous(mode, fused):
    """Saved and loaded in between, as they are and as another program may save them: in another order in memory.

    Fused optimizers take for granted that state is laid out as its parameter is, and that is without gaps.
    """
    device, settings = group_device(), {"lr": 0.1, "fused": fused}
    alone, start, state = Permuted().to(device), Permuted().state_dict(), None
    alone.sliced.requires_grad_(not fused)
    plain = torch.optim.AdamW(alone.parameters(), **settings)
    for step in range(3):
        plain.zero_grad()
        alone(torch.tensor(1.0 + step)).backward()
        plain.step()
        model = Permuted().to(device)
        model.load_state_dict(start)
        model.sliced.requires_grad_(not fused)
        wrapped, optimizer = sharded(mode, model, **settings)
        if step == 1:
            for entries in state["state"].values():
                entries.update({key: value.contiguous() for key, value in entries.items()})
        if state is not None:
            optimizer.load_state_dict(state)
        wrapped(torch.tensor(1.0 + step)).backward()
        finish(wrapped)
        optimizer.step()
        start, state = weights(model), gather_objects(optimizer.consolidated_state_dict())[0]
        for index, kept in state["state"].items():
            strides = torch.empty_like(optimizer.param_groups[0]["params"][index]).stride()
            assert kept["exp_avg"].stride() == kept["exp_avg_sq"].stride() == strides
    assert_same(start, weights(alone), rtol=1e-6)
    assert_same_state(state, plain.state_dict(), rtol=1e-5, atol=1e-7)


def train_fused():
    return [train(mode, "AdamW fused", torch.float64, overlap=overlap) for mode in MODES for overlap in (False, True)]


@pytest.mark.gpu
def test_fused_step_on_one_gpu_equals_the_class():
    (result,) = launch.run(train_fused, world_size=1, backend="nccl")
    for trained in result:
        assert_same(trained, train("alone", "AdamW", torch.float64), atol=1e-10)
