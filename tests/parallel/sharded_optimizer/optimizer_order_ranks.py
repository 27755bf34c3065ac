"""What the ranks of test_optimizer_order run: functions that spawned processes can import."""

import random
import re
import time

import torch
import torch.distributed as dist
from optimizer_models import finish, on_start, replaced, sharded
from optimizer_training_ranks import train_all
from small_models import Branches, weights
from torch import nn

from cs336sys.parallel import collectives


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
            for whole, own in zip(operation._whole, operation._slices, strict=True):
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
    names = operation.contents.removeprefix("gradients of ").split(", ")
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


def differently_ordered(order_of_rank):
    """Flat: parameters after a step of 1 when gradients become ready in another order on each rank."""
    model = Branches()
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=1.0, bucket_size_mb=1e-9)
    model(order_of_rank[dist.get_rank()], dist.get_rank() + 1.0).backward()
    optimizer.step()
    return weights(model)
