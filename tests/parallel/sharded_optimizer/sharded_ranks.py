"""What the ranks of test_sharded_optimizer run: functions that spawned processes can import."""

import contextlib
import copy
import random
import re
import time

import ddp_ranks
import torch
import torch.distributed as dist
from cs336_basics.optimizer import AdamW
from ddp_ranks import Branches, PartlyUsed, Products, WithoutGradient, batch, error_of, factors, share, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

MODES = ("default", "flat")

# 800 bytes hold one to four of the network's vectors in fp32, and no matrix.
SMALL_MB = 0.0008

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "AdamW per tensor": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "course": (AdamW, {"lr": 0.01}),
    # Row and column means of matrices: whole parameters only.
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Network(ddp_ranks.Network):
    """As that, tied and frozen parameters, with a matrix of 2304 elements, which 1 to 4 ranks cut where it lies."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 48)
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 48)
        self.third = nn.Linear(48, 48, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(48, 5)
        self.last.bias.requires_grad_(False)


def network(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return Network().to(dtype)


def sharded(mode, model, optimizer_cls=torch.optim.AdamW, *, overlap=False, params=None, **options):
    """The module to run and the optimizer; in the default mode a data parallel wrapper averages."""
    options = {"bucket_size_mb": SMALL_MB} | options
    optimizer = ShardedOptimizer(
        model.parameters() if params is None else params,
        optimizer_cls,
        flat=mode == "flat",
        module=model if overlap else None,
        **options,
    )
    return (model if mode == "flat" else NaiveDDP(model)), optimizer


def finish(wrapped):
    if isinstance(wrapped, NaiveDDP):
        wrapped.finish_gradient_synchronization()


def train_step(wrapped, optimizer, step, dtype=torch.float32, micro_batches=1, set_to_none=True):
    """One step on this rank's share; returns the loss on it."""
    optimizer.zero_grad(set_to_none=set_to_none)
    inputs, targets = (share(rows).chunk(micro_batches) for rows in batch(step, dtype))
    apart = (wrapped if isinstance(wrapped, NaiveDDP) else optimizer).no_sync
    for part, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        with contextlib.nullcontext() if part == micro_batches - 1 else apart():
            loss = nn.functional.mse_loss(wrapped(x), y) / micro_batches
            loss.backward()
    finish(wrapped)
    optimizer.step()
    return loss.item()


def train(mode, name, dtype=torch.float32, steps=4, micro_batches=1, overlap=False, **options):
    """Weights after training from rank 0's start; ``zero_grad`` in both ways in turn."""
    model = network(0 if mode == "flat" and not overlap else dist.get_rank(), dtype).to(collectives.group_device())
    optimizer_cls, settings = CLASSES[name]
    wrapped, optimizer = sharded(mode, model, optimizer_cls, overlap=overlap, **settings, **options)
    for step in range(steps):
        train_step(wrapped, optimizer, step, dtype, micro_batches, set_to_none=step % 2 == 0)
    optimizer.wait_for_parameters()
    return weights(model)


def train_all(names, modes=MODES, dtype=torch.float32, steps=4, micro_batches=1):
    """By class, mode and whether parameters arrive during the next forward pass."""
    return {
        (name, mode, overlap): train(mode, name, dtype, steps, micro_batches, overlap)
        for name in names
        for mode in modes
        for overlap in (False, True)
    }


def train_alone(name, dtype=torch.float32, steps=4):
    """The oracle: one process, the whole batch. Weights and the optimizer's state dict."""
    model = network(0, dtype)
    optimizer_cls, settings = CLASSES[name]
    optimizer = optimizer_cls(model.parameters(), **settings)
    for step in range(steps):
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(model), optimizer.state_dict()


def torch_zero(steps):
    """Weights after training with torch's ZeroRedundancyOptimizer."""
    # Its import takes seconds.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network(0).to(collectives.group_device())
    wrapped = NaiveDDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for step in range(steps):
        train_step(wrapped, optimizer, step)
    return weights(model)


def step_of_integers(mode, buckets_mb):
    """Parameters after one step of 1 from 0 along the mean of integer gradients, by bucket size."""
    results = {}
    for size in buckets_mb:
        wrapped, optimizer = sharded(mode, Products(), torch.optim.SGD, lr=1.0, bucket_size_mb=size)
        wrapped(factors(dist.get_rank())).backward()
        finish(wrapped)
        optimizer.step()
        results[size] = [part.detach().clone() for part in optimizer.param_groups[0]["params"]]
    return results


LAUNCHED = (collectives.MeanScatter, collectives.SliceGather, collectives.Broadcasts)


@contextlib.contextmanager
def replaced(cls, **methods):
    before = {name: getattr(cls, name) for name in methods}
    for name, method in methods.items():
        setattr(cls, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(cls, name, method)


@contextlib.contextmanager
def on_start(call):
    """``call(operation, start, *arguments)`` takes the place of every launch."""
    with contextlib.ExitStack() as stack:
        for cls in LAUNCHED:
            start = cls.start
            stack.enter_context(
                replaced(cls, start=lambda self, *args, start=start: call(self, lambda *a: start(self, *a), *args))
            )
        yield


def train_with_delays(seed, names):
    """Every rank comes late to other operations than its peers; on GPUs both with launches and with tensors."""
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def late(operation, start, *args):
        time.sleep(chance.choice((0.0, 0.0, 0.005, 0.02)))
        if collectives.group_device().type == "cuda":
            # Cycles: up to 50 ms, in which an operation that did not wait for this stream would read old values.
            torch.cuda._sleep(chance.choice((0, 0, 100_000_000)))
        start(*args)

    with on_start(late):
        return train_all(names, steps=3)


def train_with_lazy_operations(names):
    """Nothing is communicated before it is waited for: what is used too early is old. Poisoned until then."""
    pending = {}

    def postpone(operation, start, *args):
        pending[operation] = lambda: start(*args)
        if isinstance(operation, collectives.MeanScatter):
            for own in args[0]:
                own.fill_(torch.nan)
        elif isinstance(operation, collectives.SliceGather):
            for whole, own in zip(operation._whole, operation._own, strict=True):
                kept = own.clone()
                whole.fill_(torch.nan)
                own.copy_(kept)

    wait = collectives._Launched.wait

    def start_and_wait(operation):
        if operation in pending:
            pending.pop(operation)()
        wait(operation)

    with on_start(postpone), replaced(collectives._Launched, wait=start_and_wait):
        return train_all(names, steps=3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers that note when they run, and a parameter that is in none of them."""

    depth = 4

    def __init__(self, seen):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = seen

    def forward(self, x):
        x = self.embedding(x)
        for number, block in enumerate(self.blocks[: self.depth]):
            x = block(x)
            if self.seen is not None:
                self.seen.append(f"block {number}")
        return x * self.scale


def layers(operation):
    names = operation.what.removeprefix("gradients of ").split(", ")
    return ", ".join(sorted({re.sub("(.linear)?.(weight|bias)", "", name) for name in names}))


def order_of_events(mode):
    """What happens in the second step: launches and waits by what they carry, and the blocks of the forward pass.

    Then what happens when a state dict is made, and in a step without the last block.
    """
    seen = []
    model = Stack(seen)
    # 170 bytes hold a layer's weight, 144, and bias, 24.
    wrapped, optimizer = sharded(mode, model, overlap=True, params=model.named_parameters(), bucket_size_mb=0.00017)
    wait = collectives._Launched.wait

    def note_start(operation, start, *args):
        seen.append(f"start {type(operation).__name__} of {layers(operation)}")
        start(*args)

    def note_wait(operation):
        if operation._works and not isinstance(operation, collectives.MeanReduction):
            seen.append(f"wait for {type(operation).__name__} of {layers(operation)}")
        wait(operation)

    with on_start(note_start), replaced(collectives._Launched, wait=note_wait):
        for _ in range(2):
            seen.clear()
            wrapped(torch.ones(2, 6)).sum().backward()
            seen.append("backward done")
            finish(wrapped)
            optimizer.step()
            seen.append("step done")
            optimizer.zero_grad()
        events = list(seen)
        seen.clear()
        model.state_dict()
        in_state_dict = list(seen)
        optimizer.step()
        seen.clear()
        model.depth = 3
        wrapped(torch.ones(2, 6))
        optimizer.step()
        return events, in_state_dict, seen


def compiled(mode, what, when):
    """Weights after three steps, waits within the last forward pass, and graphs compiled in the last two.

    Compiled are the ``blocks``, the ``model`` or what is ``around`` it, or nothing; ``before`` the optimizer is built
    and has run, or ``after``.
    """
    model = Stack(seen=None)
    run = model

    def compile_it():
        if what == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
        elif what == "model":
            model.compile(backend="aot_eager", dynamic=False, fullgraph=when == "before")
        elif what == "around":
            return torch.compile(model, backend="aot_eager", dynamic=False)
        return model

    x = torch.ones(2, 6) * (1 + dist.get_rank())
    if when == "before":
        run = compile_it()
        run(x).square().sum().backward()
        model.zero_grad()
    wrapped, optimizer = sharded(
        mode, model, overlap=True, params=model.named_parameters(), lr=0.1, bucket_size_mb=0.00017
    )
    if when == "after":
        run = compile_it()
    waits = []
    wait = collectives._Launched.wait

    def note(operation):
        if operation._works and isinstance(operation, collectives.SliceGather | collectives.Broadcasts):
            waits.append(layers(operation))
        wait(operation)

    for step in range(3):
        with replaced(collectives._Launched, wait=note):
            waits.clear()
            loss = run(x).square().sum()
        if step == 0:
            torch._dynamo.utils.counters.clear()
        loss.backward()
        finish(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    recompiled = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    torch.compiler.reset()
    return weights(model), waits, recompiled


def unused_parameters(mode):
    """Parameters and step counters after three steps: one parameter used on all ranks, on rank 0 alone, on none."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, lr=0.25, weight_decay=0.5)
    history = []
    for used_on in (range(dist.get_world_size()), (0,), ()):
        optimizer.zero_grad()
        wrapped(12.0 * (dist.get_rank() + 1), dist.get_rank() in used_on).backward()
        finish(wrapped)
        optimizer.step()
        history.append(weights(model))
    return history, {
        name: optimizer.state[p].get("step") for name, p in model.named_parameters() if p in optimizer.state
    }


def none_gradient(mode):
    """A backward function that returns None on rank 1 alone; parameters after a step of 1."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    through = WithoutGradient.apply if dist.get_rank() == 1 else torch.clone
    ((through(model.sometimes) * 4.0).sum() + (model.used * 2.0).sum()).backward()
    finish(wrapped)
    optimizer.step()
    return weights(model)


def differently_ordered(order_of_rank):
    """Flat: parameters after a step of 1 when gradients become ready in another order on each rank."""
    model = Branches()
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=1.0, bucket_size_mb=1e-9)
    model(order_of_rank[dist.get_rank()], dist.get_rank() + 1.0).backward()
    optimizer.step()
    return weights(model)


def second_backward():
    """Flat: the error of a second pass without no_sync, parameters after the next good step."""
    model = PartlyUsed()
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=1.0)
    model(1.0, True).backward()
    error = error_of(model(1.0, True).backward)
    optimizer.zero_grad()
    model(2.0 * (dist.get_rank() + 1), True).backward()
    optimizer.step()
    return error, weights(model)


def gradients_without_zeroing():
    """Flat: parameters after two steps of 1 whose gradients add up, as in any optimizer, then one without a pass."""
    model = PartlyUsed()
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=1.0)
    seen = []
    for _ in range(2):
        model(2.0 * (dist.get_rank() + 1), True).backward()
        optimizer.finish_gradient_synchronization()
        optimizer.step()
        seen.append(weights(model)["used"][0].item())
    optimizer.step()
    seen.append(weights(model)["used"][0].item())
    optimizer.zero_grad()
    optimizer.step()
    seen.append(weights(model)["used"][0].item())
    return seen


def closure_step(mode):
    """What a closure returned and how often it ran; parameters."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = wrapped(2.0 * (dist.get_rank() + 1), True)
        loss.backward()
        finish(wrapped)
        return loss.item()

    with torch.no_grad():
        loss = optimizer.step(closure)
    return loss, calls, weights(model)


class Scaled(torch.optim.SGD):
    """SGD whose step takes an argument and notes in its groups how often it was called."""

    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return super().step(closure)


def step_arguments_and_hooks(mode):
    """Parameters and the group's count after steps with an argument, and what hooks saw."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, Scaled, lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("pre", kwargs)))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("post", kwargs)))
    wrapped(2.0 * (dist.get_rank() + 1), True).backward()
    finish(wrapped)
    optimizer.step(factor=0.5)
    return weights(model), optimizer.param_groups[0]["calls"], seen


def groups_of(model):
    """Matrices that decay and vectors that do not, with options of their own."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [(name, p) for name, p in model.named_parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05, "betas": (0.8, 0.9)}]


def scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=8)


def train_groups(mode, overlap):
    """Weights and learning rates of training with groups and a scheduler that changes rates and betas."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, overlap=overlap, params=groups_of(model), lr=0.01)
    scheduler = scheduled(optimizer)
    rates = []
    for step in range(6):
        train_step(wrapped, optimizer, step, torch.float64)
        scheduler.step()
        rates.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])
    optimizer.wait_for_parameters()
    return weights(model), rates


def train_groups_alone():
    model = network(0, torch.float64)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = scheduled(optimizer)
    rates = []
    for step in range(6):
        inputs, targets = batch(step, torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        rates.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])
    return weights(model), rates


def grow(optimizer_of, step_of):
    """Train, add a group, unfreeze a parameter of the first group, and go on; the same for any optimizer."""
    model = network(0, torch.float64)
    model.norm.requires_grad_(False)
    wrapped, optimizer = optimizer_of(model, [*model.first.parameters(), *model.norm.parameters()])
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
        if step == 4:
            model.norm.requires_grad_(True)
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.refresh()
            if isinstance(wrapped, NaiveDDP):
                wrapped.refresh()
        step_of(wrapped, optimizer, step)
    return weights(model)


def grow_sharded(mode, overlap):
    return grow(
        lambda model, params: sharded(mode, model, lr=0.01, params=params, overlap=overlap),
        lambda wrapped, optimizer, step: (
            train_step(wrapped, optimizer, step, torch.float64),
            optimizer.wait_for_parameters(),
        ),
    )


def grow_alone():
    def step_alone(model, optimizer, step):
        inputs, targets = batch(step, torch.float64)
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return grow(lambda model, params: (model, torch.optim.AdamW(params, lr=0.01)), step_alone)


def failed_groups(mode):
    """Errors of adding a group that is no good here or on another rank; the groups after; a good step."""
    model = PartlyUsed()
    other = nn.Parameter(torch.ones(4))
    wrapped, optimizer = sharded(mode, model, AdamW, lr=0.01)
    first = dist.get_rank() == 0
    errors = [
        error_of(optimizer.add_param_group, {"params": [other], "lr": -1.0}),
        error_of(optimizer.add_param_group, {"params": [other], "lr": 0.1 if first else 0.2}),
        error_of(optimizer.add_param_group, {"params": [other if first else nn.Parameter(torch.ones(5))]}),
        error_of(optimizer.add_param_group, {"params": [other if first else "weight"]}),
        error_of(optimizer.add_param_group, {"params": [model.used]}),
    ]
    wrapped(1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    return errors, len(optimizer.param_groups)


def few_parameters(mode, options):
    """Weights of a model with one parameter after two steps, and how many states this rank has."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    wrapped, optimizer = sharded(mode, model, lr=0.1, **options)
    for step in range(2):
        optimizer.zero_grad()
        (wrapped(torch.ones(1, 3) * (step + 1)) * (dist.get_rank() + 1)).sum().backward()
        finish(wrapped)
        optimizer.step()
    return model.weight.detach().clone(), len(optimizer.state)


def train_and_save(mode, dtype, start, state, steps, name="AdamW", **options):
    """Train from given weights and state (None: from the start): losses, weights, consolidated and own state."""
    model = network(0, dtype).to(collectives.group_device())
    optimizer_cls, settings = CLASSES[name]
    wrapped, optimizer = sharded(
        mode, model, optimizer_cls, params=model.named_parameters(), overlap=True, **settings, **options
    )
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state[dist.get_rank()] if isinstance(state, list) else state)
    losses = [train_step(wrapped, optimizer, step, dtype) for step in steps]
    # Before the parameters have arrived.
    consolidated = optimizer.consolidated_state_dict()
    own = optimizer.state_dict()
    own["state"] = {
        index: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for index, state in own["state"].items()
    }
    return losses, weights(model), consolidated, own


def losses_alone(dtype, start, state, steps):
    """One process with torch's AdamW that goes on from weights and a state; losses and weights."""
    model = network(0, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **CLASSES["AdamW"][1])
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
    losses = []
    for step in steps:
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model), optimizer.state_dict()


def failed_loads(mode, states):
    """Errors of loading wrong states; whether a state loaded before is still there after all of them."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.01)
    train_step(wrapped, optimizer, 0)
    before = copy.deepcopy(dict(optimizer.state_dict()))
    of_ranks = collectives.gather_objects(optimizer.state_dict())
    consolidated = collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    rank = dist.get_rank()
    errors = [error_of(optimizer.load_state_dict, state) for state in states]
    errors.append(error_of(optimizer.load_state_dict, of_ranks[1 - rank]))
    one_differs = copy.deepcopy(consolidated)
    one_differs["param_groups"][0]["lr"] += rank
    errors.append(error_of(optimizer.load_state_dict, one_differs))
    errors.append(error_of(optimizer.load_state_dict, consolidated if rank == 0 else {}))
    after = optimizer.state_dict()
    kept = after["param_groups"] == before["param_groups"] and all(
        torch.equal(value, before["state"][index][key])
        for index, state in after["state"].items()
        for key, value in state.items()
    )
    return errors, kept, len(after["state"])


def no_state_is_shared(mode):
    """Two optimizers that load one state train apart: the second's result equals the first's."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, lr=0.01)
    train_step(wrapped, optimizer, 0)
    start, state = copy.deepcopy(model.state_dict()), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    results = []
    for _ in range(2):
        model = network(0)
        wrapped, optimizer = sharded(mode, model, lr=0.01)
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
        train_step(wrapped, optimizer, 1)
        results.append(weights(model))
    return results


def states_that_stay(mode):
    """Whether a consolidated state is left alone by the next step."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, lr=0.01)
    train_step(wrapped, optimizer, 0)
    saved = optimizer.consolidated_state_dict()
    copied = copy.deepcopy(saved)
    train_step(wrapped, optimizer, 1)
    return saved is None or all(
        torch.equal(value, copied["state"][index][key])
        for index, state in saved["state"].items()
        for key, value in state.items()
    )


def owners_of_groups(sizes_of_groups):
    """Default mode: elements that this rank owns of each parameter of groups that were added one after another."""
    groups = [[nn.Parameter(torch.ones(size)) for size in sizes] for sizes in sizes_of_groups]
    optimizer = ShardedOptimizer(groups[0], torch.optim.SGD, lr=1.0)
    for group in groups[1:]:
        optimizer.add_param_group({"params": group})
    owned = {id(parameter) for parameter in optimizer.own_tensors}
    return [[id(parameter) in owned for parameter in group] for group in groups]


def load_hooks(mode):
    """What hooks of state_dict and load_state_dict were called, and a rate that one of them changed."""
    model = network(0)
    _, optimizer = sharded(mode, model, lr=0.01)
    seen = []

    def change(optimizer, state_dict):
        seen.append("load pre")
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: seen.append("post"))
    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    return seen, optimizer.param_groups[0]["lr"]


def wrong_arguments():
    """Errors of constructions that are wrong on every rank."""
    parameter = nn.Parameter(torch.ones(4))
    whole = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return {
        "no tensor": error_of(ShardedOptimizer, ["weight"], torch.optim.SGD, lr=1.0),
        "a tensor": error_of(ShardedOptimizer, parameter, torch.optim.SGD, lr=1.0),
        "nothing": error_of(ShardedOptimizer, [], torch.optim.SGD, lr=1.0),
        "no leaf": error_of(ShardedOptimizer, [parameter * 2], torch.optim.SGD, lr=1.0),
        "no class": error_of(ShardedOptimizer, [parameter], "AdamW"),
        "a module": error_of(ShardedOptimizer, [parameter], nn.Linear),
        "LBFGS": error_of(ShardedOptimizer, [parameter], torch.optim.LBFGS),
        "twice": error_of(
            ShardedOptimizer, [{"params": [("w", parameter), ("v", parameter)]}], torch.optim.SGD, lr=1.0
        ),
        "rate": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=-1.0),
        "flat rate": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, flat=True, lr=-1.0),
        "option": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, speed=2),
        "bucket": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, bucket_size_mb=0),
        "master": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, lr=1.0, master_dtype=torch.float32),
        "master int": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, flat=True, master_dtype=torch.int32),
        "module": error_of(ShardedOptimizer, [parameter], torch.optim.SGD, module="model"),
        "not element-wise": error_of(ShardedOptimizer, [parameter], torch.optim.Adafactor, flat=True),
        "complex": error_of(ShardedOptimizer, [whole], torch.optim.SGD, flat=True, lr=1.0),
    }


def differing_construction(mode, what):
    """The error on this rank when the last rank builds something else."""
    differs = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params, optimizer_cls, options = list(model.parameters()), torch.optim.AdamW, {"lr": 0.1, "flat": mode == "flat"}
    if differs:
        if what == "shape":
            params[2] = nn.Parameter(torch.ones(5, 4))
        elif what == "order":
            params.reverse()
        elif what == "missing":
            params.pop()
        elif what == "groups":
            params = [{"params": params[:2]}, {"params": params[2:]}]
        elif what == "frozen":
            params[1].requires_grad_(False)
        elif what == "no tensor":
            params[1] = None
        elif what == "class":
            optimizer_cls = torch.optim.Adam
        elif what == "option":
            options["lr"] = 0.2
        elif what == "mode":
            options["flat"] = not options["flat"]
        elif what == "bucket":
            options["bucket_size_mb"] = 1.0
    return error_of(ShardedOptimizer, params, optimizer_cls, **options)


def start_values(mode):
    """Parameters after construction from this rank's values, and after adding a group."""
    parameters = [
        nn.Parameter(torch.full((5,), float(dist.get_rank() + 1 + n)), requires_grad=n != 1) for n in range(3)
    ]
    _, optimizer = (None, ShardedOptimizer(parameters[:2], torch.optim.SGD, lr=1.0, flat=mode == "flat"))
    first = [parameter[0].item() for parameter in parameters]
    optimizer.add_param_group({"params": parameters[2:]})
    return first, [parameter[0].item() for parameter in parameters]


def sparse_gradient(mode):
    model = nn.Embedding(5, 3, sparse=True)
    _, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0) if mode == "flat" else (None, None)
    if mode == "default":
        # Without a wrapper, which would refuse it.
        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0)

    def step():
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    return error_of(step)


def misuse(mode):
    """Errors of what a sharded optimizer refuses while it is used."""
    model = PartlyUsed()
    model.never.requires_grad_(False)
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)
    errors = {"copy": error_of(copy.deepcopy, optimizer)}
    model.never.requires_grad_(True)
    errors["unfrozen"] = error_of(optimizer.step)
    model.never.requires_grad_(False)
    if mode == "flat":
        model(1.0, True).backward()
        group = {"params": [("late", nn.Parameter(torch.ones(2)))]}
        errors["under way"] = error_of(optimizer.add_param_group, group)
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(1.0, True)).backward()
        errors["scaler"] = error_of(scaler.step, optimizer)
        optimizer.zero_grad()
        both = PartlyUsed()
        wrapper = NaiveDDP(both)
        errors["wrapped"] = error_of(ShardedOptimizer, wrapper.module.named_parameters(), torch.optim.SGD, flat=True)
    else:
        errors["no_sync"] = error_of(lambda: optimizer.no_sync().__enter__())
        errors["finish"] = error_of(optimizer.finish_gradient_synchronization)
    model.used.data = model.used.data.clone()
    errors["moved"] = error_of(optimizer.step)
    return errors


def scaled_steps():
    """Default mode under a gradient scaler: weights after a good step and one with an overflow on rank 1 alone."""
    model = PartlyUsed()
    wrapped, optimizer = sharded("default", model, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    results = []
    for factor in (2.0, float("inf") if dist.get_rank() == 1 else 1.0):
        optimizer.zero_grad()
        scaler.scale(wrapped(factor, True)).backward()
        finish(wrapped)
        scaler.step(optimizer)
        scaler.update()
        results.append((weights(model)["used"], scaler.get_scale()))
    return results


def clipped(mode, max_norm):
    """The norm, and weights after a clipped step; then the norm when one rank has NaN, and weights after skipping."""
    model = network(0, torch.float64)
    wrapped, optimizer = sharded(mode, model, lr=0.1, optimizer_cls=torch.optim.SGD)
    inputs, targets = batch(0, torch.float64)
    nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
    finish(wrapped)
    norm = optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    after = weights(model)
    optimizer.zero_grad()
    inputs[-1] = torch.nan
    nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
    finish(wrapped)
    bad = optimizer.clip_grad_norm_(max_norm)
    if bad.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.mse_loss(wrapped(share(targets).new_zeros(3, 7)), share(targets)[:3]).backward()
    finish(wrapped)
    good = optimizer.clip_grad_norm_(max_norm)
    return norm.item(), after, bad.item(), weights(model), good.item()


def clipped_alone(max_norm):
    model = network(0, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(0, torch.float64)
    nn.functional.mse_loss(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item(), weights(model)


def not_a_number(mode):
    """Weights after a step in which one rank has NaN."""
    model = PartlyUsed()
    wrapped, optimizer = sharded(mode, model, torch.optim.SGD, lr=1.0)
    wrapped(float("nan") if dist.get_rank() == 1 else 1.0, True).backward()
    finish(wrapped)
    optimizer.step()
    return weights(model)["used"]


def with_masters(steps, resume_at):
    """bf16 weights, masters and losses of training with fp32 master parameters, once left and resumed."""
    model = network(0, torch.bfloat16)
    _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.001)
    losses = []
    for step in range(steps):
        if step == resume_at:
            start, state = model.state_dict(), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
            model = network(1, torch.bfloat16)
            _, optimizer = sharded("flat", model, master_dtype=torch.float32, lr=0.5)
            model.load_state_dict(start)
            optimizer.load_state_dict(state)
        losses.append(train_step(model, optimizer, step, torch.bfloat16))
    return losses, weights(model), optimizer.consolidated_state_dict()


def with_masters_by_hand(steps):
    """What the ranks above should hold: fp32 parameters stepped along the mean of bf16 gradients, rounded to bf16."""
    world_size = 2
    model = network(0, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr=0.001)
    for step in range(steps):
        inputs, targets = batch(step, torch.bfloat16)
        gradients = []
        for x, y in zip(inputs.chunk(world_size), targets.chunk(world_size), strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            gradients.append([parameter.grad for parameter in trained])
        for master, first, second in zip(masters, *gradients, strict=True):
            master.grad = ((first + second) / world_size).float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
    return weights(model), [master.detach() for master in masters]


class Sizes(nn.Module):
    """Parameters of given shapes, each of which gets a gradient."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self):
        return sum(part.sum() for part in self.parts)


def held_bytes(mode, shapes, dtype, master_dtype, cap_mb):
    """What this rank holds between backward pass and step, and of the optimizer after it, in bytes."""
    model = Sizes(shapes, dtype)
    options = {"master_dtype": master_dtype} if mode == "flat" else {}
    wrapped, optimizer = sharded(mode, model, lr=0.1, bucket_size_mb=cap_mb, **options)
    wrapped().backward()
    finish(wrapped)
    if mode == "flat":
        optimizer.finish_gradient_synchronization()
    local = optimizer.own_tensors
    gradients = [p.grad for p in {*model.parameters(), *local} if p.grad is not None]
    optimizer.step()
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    masters = [tensor for tensor in local if tensor.dtype != dtype]
    return {
        "parameters": storage_bytes(model.parameters()),
        "gradients": storage_bytes(gradients),
        "optimizer_state": storage_bytes(value for value in moments if value.dim()),
        "master_parameters": storage_bytes(masters),
    }


def storage_bytes(tensors):
    """Memory under tensors, each piece once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def whole_gradients_alive(cap_mb):
    """Flat: the most bytes of whole gradients alive when a bucket is launched, while nothing is communicated yet."""
    model = Sizes([(256,)] * 8, torch.float32)
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=0.1, bucket_size_mb=cap_mb)
    alive, most = {}, []
    wait = collectives._Launched.wait

    def started(operation, start, *args):
        start(*args)
        if isinstance(operation, collectives.MeanScatter):
            alive[operation] = sum(whole.nbytes for whole in args[1])
            most.append(sum(alive.values()))

    def waited(operation):
        wait(operation)
        alive.pop(operation, None)

    with on_start(started), replaced(collectives._Launched, wait=waited):
        model().backward()
    gone = all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    return max(most), gone


def communicated(mode, overlap):
    """Launches and bytes of each kind of operation in a training step."""
    counts = {}
    model = network(0)
    wrapped, optimizer = sharded(mode, model, overlap=overlap, lr=0.01)

    def count(operation, start, *args):
        start(*args)
        sent = operation._whole if isinstance(operation, collectives.SliceGather) else operation._tensors
        if isinstance(operation, collectives.MeanScatter):
            sent = args[1]
        name = type(operation).__name__
        launches, total = counts.get(name, (0, 0))
        counts[name] = launches + 1, total + sum(tensor.nbytes for tensor in sent)

    with on_start(count):
        inputs, targets = batch(0)
        nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
        finish(wrapped)
        if mode == "flat":
            # What is done is not done again.
            optimizer.finish_gradient_synchronization()
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return counts


def mixed_parameters():
    """Parameters of several dtypes and orders in memory; of 3 and of 65 elements, and one with gaps between them."""
    torch.manual_seed(0)
    tensors = {
        "square": torch.randn(64, 64),
        "vector": torch.randn(64),
        "odd": torch.randn(3),
        "transposed": torch.randn(64, 6).t(),
        "half": torch.randn(64, 2).bfloat16(),
        "half vector": torch.randn(128).bfloat16(),
        "complex": torch.randn(8, 8, dtype=torch.complex64),
        "complex transposed": torch.randn(16, 4, dtype=torch.complex64).t(),
        "every other": torch.randn(6, 128)[:, ::2],
        "another square": torch.randn(64, 64),
        "nearly": torch.randn(65),
        "wide": torch.randn(2, 32),
        "image": torch.randn(4, 2, 4, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.randn(()),
    }
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


def moved_together():
    """What one launch for all of :func:`mixed_parameters` sends, by sender; which parameters were moved; and how they
    are after a step of 1 along themselves, and in memory."""
    parameters = mixed_parameters()
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    optimizer = ShardedOptimizer(parameters.items(), torch.optim.SGD, lr=1.0, bucket_size_mb=None)
    sent = []

    def note(operation, start, *args):
        start(*args)
        for tensor, source in zip(operation._tensors, operation._sources, strict=True):
            sent.append((source, str(tensor.dtype), tensor.numel()))

    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0.5
    with on_start(note):
        optimizer.step()
    return (
        sent,
        {name for name, parameter in parameters.items() if parameter.data_ptr() != before[name]},
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        {name: parameter.stride() for name, parameter in parameters.items()} == strides,
        [parameter.storage_offset() * parameter.element_size() % 128 for parameter in parameters.values()],
    )


class Permuted(nn.Module):
    """Parameters that are not contiguous: transposed, channels last, and every other column of a larger tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transposed = nn.Parameter(torch.randn(64, 6).t())
        self.image = nn.Conv2d(2, 4, (4, 4)).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(6, 128)[:, ::2])

    def forward(self, x):
        image = self.image(x.expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        return (self.transposed.square() * x).sum() + image.square().sum() + (self.sliced * x).square().sum()


def permuted_parameters(mode):
    """Weights and consolidated state after two steps of parameters that are not contiguous, loaded in between."""
    start, state = Permuted().state_dict(), None
    for step in range(2):
        model = Permuted()
        model.load_state_dict(start)
        wrapped, optimizer = sharded(mode, model, lr=0.1)
        if state is not None:
            # As another program may save it: in another order in memory.
            for kept in state["state"].values():
                kept.update({key: value.contiguous() for key, value in kept.items()})
            optimizer.load_state_dict(state)
        wrapped(torch.tensor(1.0 + step)).backward()
        finish(wrapped)
        optimizer.step()
        start, state = weights(model), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    return start, state


def permuted_alone():
    model = Permuted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor(1.0 + step)).backward()
        optimizer.step()
    return weights(model), optimizer.state_dict()


def lost_peer(mode, how):
    """One rank does not come to a step."""
    model = PartlyUsed()
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("out of data")
        time.sleep(600)
    if mode == "flat":
        model(1.0, True).backward()
    optimizer.step()


def operations(dtype):
    """Scatter, gather and broadcasts of the collectives module, on integers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = collectives.group_device()
    wholes = [torch.arange(n * world_size, dtype=dtype, device=device) * 6 + 6 * rank for n in (3, 1)]
    slices = [torch.empty(n, dtype=dtype, device=device) for n in (3, 1)]
    scatter = collectives.MeanScatter(dtype, device, "numbers")
    scatter.start(slices, wholes)
    scatter.wait()
    gathered = [torch.full((n * world_size,), -1, dtype=dtype, device=device) for n in (2, 5)]
    for tensor in gathered:
        tensor.chunk(world_size)[rank].fill_(rank)
    gather = collectives.SliceGather(gathered, "numbers")
    gather.start()
    gather.wait()
    sent = [
        torch.full((4, 3), rank, dtype=dtype, device=device).t(),
        torch.full((2, 4), rank, dtype=dtype, device=device)[:, ::2],
    ]
    broadcasts = collectives.Broadcasts(sent, [world_size - 1, 0], "numbers")
    for _ in range(2):
        broadcasts.start()
        broadcasts.wait()
    return [[tensor.cpu().tolist() for tensor in tensors] for tensors in (slices, gathered, sent)]


def held_on_gpu(modes, shapes):
    """By mode: bytes held after a step and at its peak on this GPU, beside the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = {}
    for mode in modes:
        model = Sizes(shapes, torch.float32).cuda()
        before = torch.cuda.memory_allocated()
        if mode == "torch":
            wrapped, optimizer = (
                NaiveDDP(model),
                ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True),
            )
        elif mode == "none":
            wrapped = NaiveDDP(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            wrapped, optimizer = sharded(mode, model, bucket_size_mb=16.0, fused=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            wrapped().backward()
            finish(wrapped)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        results[mode] = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        del model, wrapped, optimizer
        torch.cuda.empty_cache()
    return results
