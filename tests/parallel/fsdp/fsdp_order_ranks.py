"""What the ranks of test_fsdp_order run: functions that spawned processes can import."""

import random
import time
import weakref

import torch
import torch.distributed as dist
from fsdp_models import batch, gathered_units, loss_of, recorded, transformer, whole_gradients
from fsdp_training_ranks import train
from small_models import share
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP


def launches(compute_dtype, prefetch, keep_gathered=0):
    """What a transformer of two blocks launches in its third step, and in two forward passes without gradients."""
    sharded = FSDP(transformer(layers=2), compute_dtype, prefetch=prefetch, keep_gathered=keep_gathered)
    tokens, targets = map(share, batch(0, 30))
    log = []
    with recorded(log):
        for _ in range(3):
            log.clear()
            loss = loss_of(sharded, tokens, targets)
            forward = len(log)
            loss.backward()
            in_backward = len(log)
            sharded.finish_gradient_synchronization()
        third, late = log[:in_backward], log[in_backward:]
        log.clear()
        with torch.no_grad():
            sharded(tokens)
            sharded(tokens)
    return third[:forward], third[forward:], late, log


def train_with_delays(seed):
    """Every rank comes late to other launches and waits than its peers."""
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def delay():
        time.sleep(chance.choice((0.0, 0.0, 0.0, 0.003, 0.01)))
        if collectives.group_device().type == "cuda":
            # Cycles: up to 50 ms, in which a collective that did not wait for this stream would read old memory.
            torch.cuda._sleep(chance.choice((0, 0, 0, 100_000_000)))

    with recorded([], delay):
        return trained_without_delays()


def trained_without_delays():
    half = {"dtype": torch.float32, "compute_dtype": torch.bfloat16}
    return train("sgd", steps=2), train("sgd", steps=2, **half)


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def changing_order(orders, prefetch, keep_gathered=0):
    """For each step: most units that had memory, whole gradients, those of the plain module, and reductions by unit."""
    sharded = FSDP(Shuffled().double(), prefetch=prefetch, keep_gathered=keep_gathered)
    alone = Shuffled().double()
    most = []
    for block in sharded.module.blocks:
        block.register_forward_hook(lambda *_: most.append(len(gathered_units(sharded))))
        block.register_full_backward_hook(lambda *_: most.append(len(gathered_units(sharded))))
    inputs = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4)
    results = []
    for order in orders:
        sharded.zero_grad()
        alone.zero_grad()
        most.clear()
        log = []
        with recorded(log):
            sharded(share(inputs), order).backward()
            sharded.finish_gradient_synchronization()
        alone(inputs, order).backward()
        expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
        reductions = [unit for collective, unit in log if collective == "reduce-scatter"]
        results.append((max(most), whole_gradients(sharded), expected, reductions))
        # Weights that were not gathered anew would be those of the step before.
        for model in (sharded, alone):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
    return results


def side_streams(compute_dtype):
    """The order of what a step gives to streams, on a CPU with streams that only take notes; and its gradients."""
    notes = []
    sharded = FSDP(Shuffled(), compute_dtype)
    begins = torch.cuda.current_stream, collectives.SliceExchange.start
    sent = []

    def start(self, received, tensor, *sizes):
        sent.append(weakref.ref(tensor))
        begins[1](self, received, tensor, *sizes)

    class Stream:
        def __init__(self, name):
            self.name, self.device = name, None

        def wait_stream(self, other):
            alive = all(gradient() is not None for gradient in sent)
            notes.append(f"{self.name} waits for {other.name}" + ("" if alive else ", gradients are gone"))

        def __enter__(self):
            notes.append(f"on {self.name}")

        def __exit__(self, *error):
            notes.append(f"off {self.name}")

    for unit in sharded.units:
        unit._stream = Stream("side")
        for group, _ in unit.scatter._groups:
            group._stream = Stream("mean")
    torch.cuda.current_stream = lambda device: Stream("main")
    collectives.SliceExchange.start = start
    log = []
    try:
        with recorded(log, lambda: notes.append("communicate")):
            sharded(torch.ones(2, 4), [0]).backward()
        sharded.finish_gradient_synchronization()
    finally:
        torch.cuda.current_stream, collectives.SliceExchange.start = begins
    return notes, whole_gradients(sharded)["blocks.0.weight"]


def timings():
    """Of a step: names of units in the order of gathers, and whether each was for the backward pass, and how late."""
    sharded = FSDP(transformer(layers=2))
    tokens, targets = map(share, batch(0, 30))
    for _ in range(2):
        with sharded.watched_gathers() as watch:
            loss_of(sharded, tokens, targets).backward()
        sharded.finish_gradient_synchronization()
    loss_of(sharded, tokens, targets).backward()
    return [(timing.unit, timing.is_backward, timing.late_ms) for timing in watch.timings()]
