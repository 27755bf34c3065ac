"""What a program changes between steps is used, as in one process, or refused by name on every rank."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from launches import on_start, on_wait
from on_ranks import on_ranks
from optimizer_models import SwitchedNorm, each_mode, finish, network, sharded, train_step, wait_for_parameters
from same_tensors import assert_same
from small_models import PartlyUsed, batch, error_of, refusal_of, share, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

NOT_DROPPED = (
    "UsageError",
    "used still has the gradient of the last step, which is kept in slices: call zero_grad() of the optimizer, or of "
    "the model, on every rank after each step()",
)


@on_ranks(2)
def test_passes_of_one_rank_are_dropped_and_what_cannot_be_dropped_is_refused():
    model, is_first = PartlyUsed(), dist.get_rank() == 0
    _, optimizer = sharded("flat", model, torch.optim.SGD, params=model.named_parameters(), lr=1.0)

    def step(factor=2.0):
        model(factor, False).backward()
        optimizer.step()
        return model.used[0].item()

    def require_error(call, sentence):
        assert sentence in refusal_of(call)

    if is_first:
        model(100.0, True).backward()
    optimizer.zero_grad()
    assert step() == -1.0
    for who, moved in ((model, -3.0), (optimizer, -5.0)):
        # As a generator's loss gives gradients to a discriminator, on one rank.
        if is_first:
            model(100.0, True).backward()
        who.zero_grad()
        assert step() == moved
    assert error_of(step, 1.0) == NOT_DROPPED
    optimizer.zero_grad()
    assert step() == -7.0
    for parameter in model.parameters():
        parameter.grad = None
    assert error_of(step, 1.0) == NOT_DROPPED
    model.zero_grad()
    model(1.0, False).backward()
    model.zero_grad()
    require_error(optimizer.step, "call zero_grad() of the optimizer instead, on every rank")
    optimizer.zero_grad()
    assert model.used[0].item() == -7.0
    model(100.0, False).backward()
    optimizer.clip_grad_norm_(1.0)
    if not is_first:
        with optimizer.no_sync():
            model(1.0, False).backward()
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        require_error(call, "a parameter got a gradient after the gradients of this step were completed")
    optimizer.zero_grad()
    before = model.used[0].item()
    assert step() == before - 2.0


@on_ranks(2)
@each_mode
def test_slices_are_refused(mode):
    fully = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    options = {"flat": mode == "flat", "lr": 1.0}
    message = refusal_of(ShardedOptimizer, fully.named_parameters(), torch.optim.SGD, **options)
    assert message.startswith("module.0.weight is a slice that this rank has of a parameter, made by FSDP or")


@on_ranks(2)
@pytest.mark.parametrize("how", ["in place", "loaded"])
def test_weights_set_between_steps_are_what_master_copies_become(how):
    model = nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    _, optimizer = sharded("flat", model, torch.optim.SGD, master_dtype=torch.float32, lr=0.001)
    for step in range(2):
        if step == 1 and how == "in place":
            nn.init.constant_(model.weight, 2.0)
        elif step == 1:
            model.load_state_dict({"weight": torch.full((4, 64), 2.0)})
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    assert torch.equal(state["state"][0]["master_parameter"], torch.full((4, 64), 2.0) - 0.001)


@on_ranks(2)
def test_options_that_mix_elements_are_refused():
    first, second, third = ([parameter] for parameter in PartlyUsed().parameters())
    refusal = (
        "UsageError",
        "flat=True cannot shard SwitchedNorm, whose update is not computed element by element: choose flat=False",
    )
    groups = [{"params": first}, {"params": second, "by_norm": True}]
    assert error_of(ShardedOptimizer, groups, SwitchedNorm, flat=True, lr=1.0) == refusal
    optimizer = ShardedOptimizer([{"params": first}, {"params": second}], SwitchedNorm, flat=True, lr=1.0)
    assert error_of(optimizer.add_param_group, {"params": third, "by_norm": True}) == refusal
    saved = optimizer.consolidated_state_dict() or {"state": {}, "param_groups": []}
    saved = copy.deepcopy(collectives.gather_objects(saved)[0])
    saved["param_groups"][1]["by_norm"] = True
    assert error_of(optimizer.load_state_dict, saved) == refusal
    optimizer.param_groups[1]["by_norm"] = True
    assert error_of(optimizer.step) == refusal


@on_ranks(2)
@each_mode
def test_options_that_differ_between_ranks_are_refused(mode):
    wrapped, optimizer = sharded(mode, PartlyUsed(), lr=0.1)
    wrapped(1.0, True).backward()
    finish(wrapped)
    optimizer.param_groups[0]["lr"] = 0.1 if dist.get_rank() == 0 else 0.2
    message = "ranks differ in what they train: nothing on rank 0, group 0 with lr=0.2 on rank 1"
    assert error_of(optimizer.step) == ("UsageError", message)


def two_groups(mode):
    model = network(0, torch.float64)
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
    return model, *sharded(mode, model, torch.optim.SGD, overlap=True, params=groups, lr=0.1)


@on_ranks(2)
@each_mode
def test_parameters_that_come_and_go_are_refused_or_taken_up(mode):
    model, wrapped, optimizer = two_groups(mode)

    def step():
        inputs, targets = map(share, batch(0, torch.float64))
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        finish(wrapped)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait_for_parameters()

    model.adapter = nn.Linear(5, 5, dtype=torch.float64)
    nn.init.constant_(model.adapter.weight, dist.get_rank() + 1.0)
    message = "adapter.weight was added after it was wrapped: call refresh() on every rank"
    assert error_of(optimizer.step) == ("UsageError", message)
    optimizer.zero_grad()
    optimizer.refresh()
    assert (model.adapter.weight == 1.0).all()
    if hasattr(wrapped, "refresh"):
        wrapped.refresh()
    step()
    optimizer.param_groups[0]["params"].append(model.norm.weight)
    message = "parameters were put into a group after it was sharded: call refresh() on every rank"
    assert error_of(optimizer.step) == ("UsageError", message)
    optimizer.zero_grad()
    optimizer.refresh()
    before = model.norm.weight.detach().clone()
    step()
    assert not torch.equal(before, model.norm.weight)
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    assert error_of(optimizer.step) == (
        "UsageError",
        "first.weight was replaced (as load_state_dict() with assign=True does) after it was wrapped: call refresh() "
        "on every rank",
    )
    message = "first.weight was replaced in the module by a parameter that is in no group: build the optimizer anew"
    assert error_of(optimizer.refresh) == ("UsageError", message)


@on_ranks(2)
@each_mode
def test_parameter_taken_out_of_its_group_is_refused(mode):
    _, _, optimizer = two_groups(mode)
    optimizer.param_groups[0]["params"].pop()
    assert error_of(optimizer.step) == (
        "UsageError",
        "parameter 1 was taken out of its group after it was sharded: freeze it by requires_grad_(False), or build the "
        "optimizer anew",
    )


@on_ranks(2)
def test_adapter_whose_gradients_nothing_averages_is_refused():
    model, errors = PartlyUsed(), []
    optimizer = ShardedOptimizer([("used", model.used)], torch.optim.SGD, flat=True, module=model, lr=0.1)
    other = torch.optim.SGD([model.sometimes], lr=0.1)
    for _ in range(2):
        model(1.0 + dist.get_rank(), True).backward()
        errors.append(error_of(optimizer.step))
        other.step()
        optimizer.zero_grad()
    first, (kind, message) = errors
    assert first is None
    assert kind == "UsageError"
    assert message.startswith("sometimes of the module is in no group and was changed, by a gradient that nothing ")


@contextlib.contextmanager
def late_updates(mode):
    """Within this, updates of parameters travel no sooner than they are awaited."""
    pending = {}

    def start_and_wait(operation, wait):
        if operation in pending:
            pending.pop(operation)()
        wait()

    launcher = collectives.SliceGather if mode == "flat" else collectives.Broadcasts
    with on_start(pending.__setitem__, [launcher]), on_wait(start_and_wait):
        yield


@on_ranks(2)
@each_mode
def test_part_that_is_saved_or_loaded_after_a_step_waits_for_its_parameters(mode):
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, overlap=True, lr=0.1)
    with late_updates(mode):
        train_step(wrapped, optimizer, 0, torch.float64)
        part = {name: value.clone() for name, value in model.second.state_dict().items()}
        optimizer.wait_for_parameters()
        assert_same(part, weights(model.second))
        train_step(wrapped, optimizer, 1, torch.float64)
        model.second.load_state_dict(part)
        optimizer.wait_for_parameters()
    assert_same(part, weights(model.second))


@on_ranks(2)
@each_mode
def test_layer_added_with_its_group_is_that_of_the_first_rank_and_waits_for_its_parameters(mode):
    trained = []
    for trained_by, seed in ((mode, dist.get_rank()), ("alone", 0)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 6)).double()
        wrapped, optimizer = sharded(trained_by, model, torch.optim.SGD, overlap=True, lr=0.1)
        added = nn.Linear(6, 5).double()
        added.register_buffer("offset", torch.rand(3))
        model.append(added)
        optimizer.add_param_group({"params": list(added.parameters())})
        if hasattr(wrapped, "refresh"):
            wrapped.refresh()
        with late_updates(mode):
            for step in range(2):
                train_step(wrapped, optimizer, step, torch.float64)
            after_step = {name: parameter.detach().clone() for name, parameter in added.named_parameters()}
            wait_for_parameters(optimizer)
        trained.append(weights(model))
        is_late = error_of(assert_same, after_step, dict(added.named_parameters())) is not None
        assert any(collectives.gather_objects(is_late)) == (trained_by == mode)
    assert_same(*trained, atol=1e-12)


@on_ranks(2)
@each_mode
def test_weights_changed_while_updates_arrive_are_refused(mode):
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, overlap=True, lr=0.1)
    train_step(wrapped, optimizer, 0, torch.float64)
    nn.init.ones_(model.first.weight)
    message = refusal_of(model, batch(0, torch.float64)[0])
    assert "was changed while the last step's updates arrived: call wait_for_parameters()" in message
