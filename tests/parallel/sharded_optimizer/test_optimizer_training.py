"""Training with a sharded optimizer equals training with the class itself: steps, clipping, parameter groups."""

import pytest
import torch
import torch.distributed as dist
from cs336_basics.optimizer import AdamW
from on_ranks import on_ranks
from optimizer_models import (
    CLASSES,
    MODES,
    SMALL_MB,
    each_mode,
    finish,
    network,
    sharded,
    train,
    train_step,
    wait_for_parameters,
)
from same_tensors import assert_same, assert_same_state, dict_of
from small_models import PartlyUsed, Permuted, Products, batch, error_of, factors, refusal_of, weights
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


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_are_not_contiguous(mode, fused):
    """Saved and loaded in between, as they are and as another program may save them: in another order in memory.

    Fused optimizers take for granted that state is laid out as its parameter is, and that is without gaps.
    """
    alone, start, state, settings = Permuted(), Permuted().state_dict(), None, {"lr": 0.1, "fused": fused}
    alone.sliced.requires_grad_(not fused)
    plain = torch.optim.AdamW(alone.parameters(), **settings)
    for step in range(3):
        plain.zero_grad()
        alone(torch.tensor(1.0 + step)).backward()
        plain.step()
        model = Permuted()
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


@on_ranks(2)
@each_mode
def test_sparse_gradient_is_named(mode):
    """By default without a wrapper, which would refuse it."""
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, flat=mode == "flat")

    def step():
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    message = refusal_of(step)
    assert "has a sparse gradient" in message
    assert "choose sparse=False" in message


def train_groups(mode, overlap=False):
    """Weights and options of training matrices that decay and vectors that do not, with a scheduler for both."""
    model, options = network(0, torch.float64), []
    matrices, vectors = (
        [(name, p) for name, p in model.named_parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05, "betas": (0.8, 0.9)}]
    wrapped, optimizer = sharded(mode, model, overlap=overlap, params=groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=8)
    for step in range(6):
        train_step(wrapped, optimizer, step, torch.float64)
        scheduler.step()
        options.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])
    wait_for_parameters(optimizer)
    return weights(model), options


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("overlap", [False, True])
def test_groups_and_a_scheduler(mode, overlap):
    expected, expected_options = train_groups("alone")
    trained, options = train_groups(mode, overlap)
    assert_same(trained, expected, atol=1e-12)
    assert options == expected_options


@on_ranks(2)
@each_mode
def test_group_that_is_refused_leaves_the_optimizer_as_it_was(mode):
    model, other, is_first = PartlyUsed(), nn.Parameter(torch.ones(4)), dist.get_rank() == 0
    wrapped, optimizer = sharded(mode, model, AdamW, lr=0.01)
    rate = ("ValueError", "AdamW: lr is -1.0, but must be at least 0")
    assert error_of(optimizer.add_param_group, {"params": [other], "lr": -1.0}) == rate
    for group, difference in (
        ({"params": [other], "lr": 0.1 if is_first else 0.2}, "lr=0.1, weight_decay=0.01 on rank 0, group 1 with"),
        (
            {"params": [other if is_first else nn.Parameter(torch.ones(5))]},
            "(4,) strides (1,) trained on rank 0, parameter 3 of group 1 float32 (5,)",
        ),
        (
            {"params": [other if is_first else "weight"]},
            "TypeError: optimizer can only optimize Tensors, but one of the params is str on rank 1",
        ),
    ):
        assert difference in refusal_of(optimizer.add_param_group, group)
    assert error_of(optimizer.add_param_group, {"params": [model.used]})[0] == "ValueError"
    wrapped(1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_added_group_goes_where_least_is():
    groups = [[nn.Parameter(torch.ones(size)) for size in sizes] for sizes in ([5, 3, 3], [2], [4, 4])]
    optimizer = ShardedOptimizer(groups[0], torch.optim.SGD, lr=1.0)
    for group in groups[1:]:
        optimizer.add_param_group({"params": group})
    owned = {id(parameter) for parameter in optimizer.own_tensors}
    first, second = gather_objects([[id(parameter) in owned for parameter in group] for group in groups])
    # 5 against 3 + 3; then 5 + 2 against 6; then 7 + 4 against 6 + 4, the fuller one second.
    assert first == [[True, False, False], [True], [False, True]]
    assert second == [[False, True, True], [False], [True, False]]
