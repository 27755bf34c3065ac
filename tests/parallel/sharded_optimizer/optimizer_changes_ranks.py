"""What the ranks of test_optimizer_changes run: functions that spawned processes can import."""

import contextlib
import copy
import itertools

import torch
import torch.distributed as dist
from optimizer_models import MODES, Network, finish, network, replaced, sharded, train_step
from small_models import Branches, PartlyUsed, batch, error_of, share, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}

# Who drops gradients, whether to None, and whether before the backward pass or after the step.
ZEROING = list(itertools.product(("optimizer", "model"), (True, False), (True, False)))


def _factor(step):
    return 4.0 * (step + 1)


def zero_in_turn(model, optimizer, who, set_to_none, first, backward):
    """Weights after each of three steps; ``sometimes`` has a gradient in the first alone."""
    history = []
    zeroing = optimizer if who == "optimizer" else model
    for step in range(3):
        if first:
            zeroing.zero_grad(set_to_none=set_to_none)
        backward(model, step)
        optimizer.step()
        if not first:
            zeroing.zero_grad(set_to_none=set_to_none)
        history.append(weights(model))
    return history


def zeroed():
    """Flat: by way of zeroing."""

    def backward(model, step):
        model(_factor(step) * (1.5 if dist.get_rank() else 0.5), step == 0).backward()

    histories = {}
    for case in ZEROING:
        model = PartlyUsed()
        _, optimizer = sharded("flat", model, torch.optim.SGD, **SGD)
        histories[case] = zero_in_turn(model, optimizer, *case, backward)
    return histories


def zeroed_alone():
    return {
        case: zero_in_turn(
            model := PartlyUsed(),
            torch.optim.SGD(model.parameters(), **SGD),
            *case,
            lambda model, step: model(_factor(step), step == 0).backward(),
        )
        for case in ZEROING
    }


def dropped():
    """Flat: weights after steps of 1 with passes that are dropped, and errors where gradients cannot be dropped."""
    found, errors = {}, {}

    def build():
        model = PartlyUsed()
        return model, sharded("flat", model, torch.optim.SGD, params=model.named_parameters(), lr=1.0)[1]

    def trained(name, model, optimizer):
        model(2.0, False).backward()
        optimizer.step()
        found[name] = model.used[0].item()

    first = dist.get_rank() == 0
    model, optimizer = build()
    if first:
        model(100.0, True).backward()
    optimizer.zero_grad()
    trained("a pass of one rank", model, optimizer)
    for who in (model, optimizer):
        # As a generator's loss gives gradients to a discriminator, on one rank.
        if first:
            model(100.0, True).backward()
        who.zero_grad()
        trained(f"after a step, by {type(who).__name__}", model, optimizer)
    errors["accumulated over a step"] = error_of(_step_again, model, optimizer)
    optimizer.zero_grad()
    trained("after that", model, optimizer)
    for parameter in model.parameters():
        parameter.grad = None
    errors["dropped by hand"] = error_of(_step_again, model, optimizer)
    model.zero_grad()
    model(1.0, False).backward()
    model.zero_grad()
    errors["by the model, under way"] = error_of(optimizer.step)
    optimizer.zero_grad()
    found["after that"] = model.used[0].item()
    model(100.0, False).backward()
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        with optimizer.no_sync():
            model(1.0, False).backward()
    errors["after clipping"] = error_of(optimizer.clip_grad_norm_, 1.0)
    errors["and a step"] = error_of(optimizer.step)
    optimizer.zero_grad()
    before = model.used[0].item()
    trained("after all", model, optimizer)
    found["after all"] -= before
    return found, errors


def _step_again(model, optimizer):
    model(1.0, False).backward()
    optimizer.step()


def stepped_before_backward(mode):
    """The errors of a backward pass through weights that a step has changed, and of one whose weights it has not."""
    model = Branches()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)

    def squared(index):
        return model.branches[index].square().sum()

    first, second = squared(0), squared(1)
    model.branches[0].square().sum().backward()
    finish(wrapped)
    optimizer.step()
    optimizer.zero_grad()
    return [error_of(first.backward), error_of(second.backward)]


def slices():
    """Errors of sharding what is sharded."""
    fully = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return [
        error_of(ShardedOptimizer, fully.named_parameters(), torch.optim.SGD, flat=mode == "flat", lr=1.0)
        for mode in MODES
    ]


def _reset(optimizer, how):
    if how == "cleared":
        optimizer.state.clear()
    elif how == "reassigned":
        optimizer.state = type(optimizer.state)(dict)
    else:
        for parameter in optimizer.param_groups[0]["params"][:3]:
            optimizer.state[parameter] = {}


RESETS = ("cleared", "reassigned", "some")


def resets(mode):
    """Weights of training in which the state is dropped in the middle, by way of dropping it."""
    found = {}
    for how in RESETS:
        model = network(0, torch.float64)
        wrapped, optimizer = sharded(mode, model, lr=0.01)
        for step in range(4):
            if step == 2:
                _reset(optimizer, how)
            train_step(wrapped, optimizer, step, torch.float64)
        found[how] = weights(model)
    return found


def masters():
    """Weights, one step of 0.001 after they were set to 2, by way of setting; masters had them at 1."""
    found = {}
    for how in ("in place", "loaded"):
        model = nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        _, optimizer = sharded("flat", model, torch.optim.SGD, master_dtype=torch.float32, lr=0.001)
        for step in range(2):
            if step == 1:
                if how == "in place":
                    nn.init.constant_(model.weight, 2.0)
                else:
                    model.load_state_dict({"weight": torch.full((4, 64), 2.0)})
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = collectives.gather_objects(optimizer.consolidated_state_dict())[0]
        found[how] = states["state"][0]["master_parameter"]
    return found


class Normed(torch.optim.SGD):
    """SGD, unless a group asks for steps of a norm of 1: then no longer element by element."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if group.get("normed") and parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def options():
    """Errors of options of groups, and of options that one rank alone has changed."""
    errors = {}
    model = PartlyUsed()
    first, second, third = ([parameter] for parameter in model.parameters())
    groups = [{"params": first}, {"params": second, "normed": True}]
    errors["built"] = error_of(ShardedOptimizer, groups, Normed, flat=True, lr=1.0)
    optimizer = ShardedOptimizer([{"params": first}, {"params": second}], Normed, flat=True, lr=1.0)
    errors["added"] = error_of(optimizer.add_param_group, {"params": third, "normed": True})
    saved = optimizer.consolidated_state_dict() or {"state": {}, "param_groups": []}
    saved = copy.deepcopy(collectives.gather_objects(saved)[0])
    saved["param_groups"][1]["normed"] = True
    errors["loaded"] = error_of(optimizer.load_state_dict, saved)
    optimizer.param_groups[1]["normed"] = True
    errors["changed"] = error_of(optimizer.step)
    for mode in MODES:
        model = PartlyUsed()
        wrapped, optimizer = sharded(mode, model, lr=0.1)
        wrapped(1.0, True).backward()
        finish(wrapped)
        optimizer.param_groups[0]["lr"] = 0.1 if dist.get_rank() == 0 else 0.2
        errors[f"differ, {mode}"] = error_of(optimizer.step)
    return errors


def parameters(mode):
    """Errors of steps after the model or the groups have changed; what refresh() takes up, and an adapter's values."""
    rank = dist.get_rank()
    errors = {}

    def build():
        model = network(0, torch.float64)
        groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
        return model, *sharded(mode, model, torch.optim.SGD, overlap=True, params=groups, lr=0.1)

    def step(model, wrapped, optimizer):
        nn.functional.mse_loss(wrapped(share(batch(0, torch.float64)[0])), share(batch(0, torch.float64)[1])).backward()
        finish(wrapped)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait_for_parameters()

    built = build()
    model, wrapped, optimizer = built
    model.adapter = nn.Linear(5, 5, dtype=torch.float64)
    nn.init.constant_(model.adapter.weight, rank + 1.0)
    errors["added"] = error_of(optimizer.step)
    optimizer.zero_grad()
    optimizer.refresh()
    adapter = model.adapter.weight.detach().clone()
    if hasattr(wrapped, "refresh"):
        wrapped.refresh()
    step(*built)
    optimizer.param_groups[0]["params"].append(model.norm.weight)
    errors["listed"] = error_of(optimizer.step)
    optimizer.zero_grad()
    optimizer.refresh()
    before = model.norm.weight.detach().clone()
    step(*built)
    moved = not torch.equal(before, model.norm.weight)
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    errors["replaced"] = error_of(optimizer.step)
    errors["replaced, refreshed"] = error_of(optimizer.refresh)
    del built, model, wrapped, optimizer
    _, _, optimizer = build()
    optimizer.param_groups[0]["params"].pop()
    errors["taken out"] = error_of(optimizer.step)
    return errors, adapter, moved


def adapters():
    """Flat: the error of a step after another optimizer has trained a parameter of the model."""
    model = PartlyUsed()
    optimizer = ShardedOptimizer([("used", model.used)], torch.optim.SGD, flat=True, module=model, lr=0.1)
    other = torch.optim.SGD([model.sometimes], lr=0.1)
    errors = []
    for _ in range(2):
        model(1.0 + dist.get_rank(), True).backward()
        errors.append(error_of(optimizer.step))
        other.step()
        optimizer.zero_grad()
    return errors


@contextlib.contextmanager
def late_updates(mode):
    """Within this, updates of parameters travel no sooner than they are awaited."""
    operation = collectives.SliceGather if mode == "flat" else collectives.Broadcasts
    start, wait = operation.start, collectives._Launched.wait

    def late(self):
        if isinstance(self, operation):
            start(self)
        wait(self)

    with replaced(operation, start=lambda self: None), replaced(collectives._Launched, wait=late):
        yield


def saved_parts(mode):
    """Weights of parts, saved by themselves right after a step, and of the whole later."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, overlap=True, lr=0.1)
    with late_updates(mode):
        train_step(wrapped, optimizer, 0, torch.float64)
        parts = {f"second.{name}": value.clone() for name, value in model.second.state_dict().items()}
        optimizer.wait_for_parameters()
    return parts, {name: value for name, value in weights(model).items() if name.startswith("second.")}


class Inside(nn.Module):
    """Calls a module of its child, and never the child, as OPT of transformers does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.child = nn.Module()
        self.child.network = Network()
        self.double()

    def forward(self, x):
        return self.child.network(x)


def called_inside(mode):
    """Weights of :class:`Inside` after three steps, with updates that come late and that are awaited in the step."""
    trained = []
    for overlap in (True, False):
        model = Inside()
        wrapped, optimizer = sharded(mode, model, torch.optim.SGD, overlap=overlap, lr=0.1)
        with late_updates(mode):
            for step in range(3):
                train_step(wrapped, optimizer, step, torch.float64)
            optimizer.wait_for_parameters()
        trained.append(weights(model))
    return trained


def changed_on_the_way(mode):
    """The error of a forward pass after weights were changed while updates of them arrived."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, overlap=True, lr=0.1)
    train_step(wrapped, optimizer, 0, torch.float64)
    nn.init.ones_(model.first.weight)
    return error_of(model, batch(0, torch.float64)[0])


def parts_apart():
    """Flat: parameters after steps of 1 by an optimizer for each part, in a pass that reaches them all on rank 0."""
    model = Branches()
    optimizers = [
        ShardedOptimizer(branches, torch.optim.SGD, flat=True, lr=1.0, bucket_size_mb=1e-9)
        for branches in (model.branches[:2], model.branches[2:])
    ]
    for _ in range(2):
        model((0, 1, 2, 3) if dist.get_rank() == 0 else (0, 2), 1.0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [branch[0].item() for branch in model.branches]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def passes_of_one_rank():
    """Flat, with eight buckets: the norm of the gradients after passes that rank 0 alone had were dropped."""
    first = dist.get_rank() == 0
    norms = {}
    for case in ("one pass", "after the model's", "after an empty step", "failed", "of the model"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.0, flat=True, module=model, bucket_size_mb=1e-5
        )
        inputs = torch.ones(2, 8)
        if case == "after the model's":
            model(inputs).sum().backward()
            optimizer.step()
            model.zero_grad()
        if case == "after an empty step":
            optimizer.step()
        if case == "failed":
            hidden = model[:4](inputs)
            error_of(model[4:](_Fails.apply(hidden) if first else hidden).sum().backward)
        elif first:
            model(inputs).sum().backward()
        if case == "of the model":
            model.zero_grad()
            norms["refusal"] = error_of(optimizer.step)[0]
        optimizer.zero_grad()
        model(inputs).sum().backward()
        norms[case] = optimizer.clip_grad_norm_(1e9).item()
        optimizer.step()
        optimizer.zero_grad()
    return norms
