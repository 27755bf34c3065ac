"""What the ranks of test_fsdp run: functions that spawned processes can import."""

import contextlib
import copy
import dataclasses
import gc
import random
import time
import weakref

import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp import gradients as gradient_scatter
from cs336sys.sizes import ModelSize


class Block(nn.Module):
    """Odd shapes, biases, a norm."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 15)
        self.norm = nn.LayerNorm(15)
        self.down = nn.Linear(15, 7)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Network(nn.Module):
    """Odd shapes, tied weights, a block used twice, frozen parameters, parameters of its own, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.narrow = nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.wide = nn.Linear(3, 7)
        self.wide.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]), requires_grad=False)
        self.register_buffer("offset", torch.randn(7))
        self.checkpoints = False

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale[0] + self.offset
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        x = x + self.wide(torch.tanh(self.frozen(self.narrow(x))))
        return self.head(self.norm(x) * self.gain)


def on_rank(model):
    """The model where this rank computes; in a process that is no rank, and on the meta device, where it is."""
    if not dist.is_initialized() or next(model.parameters()).is_meta:
        return model
    return model.to(collectives.group_device())


def network(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return on_rank(Network().to(dtype))


def transformer(seed=0, vocab_size=30, layers=3):
    torch.manual_seed(seed)
    return on_rank(BasicsTransformerLM(vocab_size, 8, d_model=24, num_layers=layers, num_heads=2, d_ff=40))


def batch(step, vocab_size=11):
    """12 sequences, which 1 to 4 ranks share out, the same on every rank."""
    tokens = torch.randint(vocab_size, (12, 6), generator=torch.Generator().manual_seed(100 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def share(rows):
    """This rank's part of a batch, where its model is."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()].to(collectives.group_device())


def loss_of(model, tokens, targets):
    return cross_entropy(model(tokens).double(), targets)


OPTIMIZERS = {
    "course": lambda parameters: AdamW(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def train_alone(optimizer="adamw", steps=4, dtype=torch.float64):
    """The oracle: one process, the whole batch."""
    model = network(0, dtype)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        stepper.zero_grad()
        loss_of(model, *batch(step)).backward()
        stepper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def train(
    optimizer="adamw",
    steps=4,
    dtype=torch.float64,
    micro_batches=1,
    no_sync=True,
    checkpoints=False,
    evaluates=False,
    host=False,
    **settings,
):
    """Whole weights after training from rank 0's start; ``zero_grad`` in both modes in turn.

    Args:
        evaluates: before weights change, run a forward pass with gradients and no backward pass.
        host: communicate as Gloo does what is on GPUs.
    """
    if host:
        with sent_through_the_host():
            return train(optimizer, steps, dtype, **settings)
    model = network(dist.get_rank(), dtype)
    model.checkpoints = checkpoints
    sharded = FSDP(model, **settings)
    stepper = OPTIMIZERS[optimizer](sharded.parameters())
    for step in range(steps):
        inputs, targets = map(share, batch(step))
        stepper.zero_grad(set_to_none=step % 2 == 0)
        parts = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for part, (x, y) in enumerate(parts):
            is_last = part == len(parts) - 1
            with contextlib.nullcontext() if is_last or not no_sync else sharded.no_sync():
                (loss_of(sharded, x, y) / micro_batches).backward()
        sharded.finish_gradient_synchronization()
        if evaluates:
            sharded(inputs)
        stepper.step()
    return on_cpu(sharded.gather_full_params())


@contextlib.contextmanager
def sent_through_the_host():
    modules = (collectives, gradient_scatter)
    through_host = collectives.through_host
    for module in modules:
        module.through_host = lambda tensor: True
    try:
        yield
    finally:
        for module in modules:
            module.through_host = through_host


def on_cpu(tensors):
    return {name: None if tensor is None else tensor.detach().cpu() for name, tensor in tensors.items()}


def train_all(variants):
    return {name: train(**settings) for name, settings in variants.items()}


def gradients(sharded):
    """Of this rank's slices and of replicated parameters, by name."""
    return on_cpu({name: parameter.grad for name, parameter in sharded.module.named_parameters()})


def whole_gradients(sharded):
    """The slices of all ranks put together: what an optimizer on one rank would see."""
    whole = {}
    for name, parameter in sharded.sharded_parameters.items():
        gradient = parameter.shard.grad
        whole[name] = None
        if gradient is not None:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, gradient.cpu())
            whole[name] = torch.cat(parts)
    for name, parameter in sharded.replicated_parameters.items():
        whole[name] = parameter.grad
    return on_cpu(whole)


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class Products(nn.Module):
    """The gradient of each weight is a given tensor, so that sums are exact."""

    SHAPES = ((1, 4), (3, 1), (7, 15), (15, 3), (8, 2), (5, 1))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Product(shape) for shape in self.SHAPES])
        self.gain = nn.Parameter(torch.zeros(3))

    def forward(self, factors):
        products = [layer(factor) for layer, factor in zip(self.layers, factors, strict=False)]
        return sum(product.double() for product in products) + (self.gain.double() * factors[-1]).sum()


class Product(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, factor):
        return (self.weight * factor).sum()


def factors(rank, largest):
    """Integers that 1 to 4 ranks divide."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (*Products.SHAPES, (3,))
    return [12.0 * torch.randint(-largest, largest, shape, generator=generator) for shape in shapes]


def average_integers(settings):
    """Gradients of integers in fp32 and half precision, over two passes."""
    results = {}
    for name, (largest, options) in settings.items():
        sharded = FSDP(Products(), **options)
        for _ in range(2):
            sharded(factors(dist.get_rank(), largest)).backward()
        sharded.finish_gradient_synchronization()
        results[name] = whole_gradients(sharded)
    return results


@contextlib.contextmanager
def recorded(log, delay=None):
    """Log every launch of a collective of FSDP; ``delay()`` is called before each launch and each wait."""
    launchers = (collectives.SliceGather, collectives.SliceExchange, collectives.MeanScatter, collectives.MeanReduction)
    starts = {launcher: launcher.start for launcher in launchers}
    wait = collectives._Launched.wait

    def recording(launcher):
        def start(self, *args):
            if delay:
                delay()
            log.append((launcher._collective, self.what.partition(" of ")[2]))
            starts[launcher](self, *args)

        return start

    def waiting(self):
        if delay:
            delay()
        wait(self)

    for launcher in launchers:
        launcher.start = recording(launcher)
    collectives._Launched.wait = waiting
    try:
        yield log
    finally:
        for launcher in launchers:
            launcher.start = starts[launcher]
        collectives._Launched.wait = wait


def launches(compute_dtype, prefetch):
    """What a transformer of two blocks launches in its third step, and in two forward passes without gradients."""
    sharded = FSDP(transformer(layers=2), compute_dtype, prefetch=prefetch)
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
        third, late = list(log), len(log) - in_backward
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


def gathered_units(sharded):
    """Units that have memory, by what their tensors really have."""
    held = {}
    for unit in sharded.units:
        storages = {parameter.full.untyped_storage().data_ptr(): parameter.full for parameter in unit.parameters}
        bytes_held = {full.untyped_storage().nbytes() for full in storages.values()}
        assert bytes_held <= {0, unit.gathered_bytes}
        if bytes_held != {0}:
            held[unit.name] = unit.gathered_bytes
    return held


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def changing_order(orders, prefetch):
    """For each step: most units that had memory, whole gradients, those of the plain module, and reductions by unit."""
    sharded, alone = FSDP(Shuffled().double(), prefetch=prefetch), Shuffled().double()
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
    return results


def side_streams(compute_dtype):
    """The order of what a step gives to streams, on a CPU with streams that only take notes; and its gradients."""
    notes = []
    sharded = FSDP(Shuffled(), compute_dtype)
    begins = torch.cuda.current_stream, collectives.SliceExchange.start
    sent = []

    def start(self, received, tensor, sizes):
        sent.append(weakref.ref(tensor))
        begins[1](self, received, tensor, sizes)

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
        unit._stream, unit._scatter._stream = Stream("side"), Stream("mean")
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


def held_while_running(prefetch, checkpoints=False, compute_dtype=None):
    """For every moment of a unit's forward and backward: the unit, and the units with memory; then after the passes."""
    model = transformer(layers=5)
    names = {part: name for name, part in model.named_modules()}
    blocks = [*model.layers, model.token_embeddings, model.lm_head]
    moments = []
    sharded = FSDP(model, compute_dtype, prefetch=prefetch)
    for block in blocks:
        for part in block.modules():
            if type(part).__name__ in ("Linear", "Embedding"):
                part.register_forward_hook(
                    lambda *_, name=names[block]: moments.append((name, gathered_units(sharded)))
                )
                part.register_full_backward_hook(
                    lambda *_, name=names[block]: moments.append((name, gathered_units(sharded)))
                )
    if checkpoints:
        for block in model.layers:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    tokens, targets = map(share, batch(0, 30))
    after = []
    for step in range(3):
        moments.clear()
        loss = loss_of(sharded, tokens, targets)
        between = gathered_units(sharded)
        loss.backward()
        after.append(gathered_units(sharded))
        sharded.finish_gradient_synchronization()
        if step == 1:
            with torch.no_grad():
                sharded(tokens)
            after.append(gathered_units(sharded))
    return moments, between, after


def mixed_precision(compute_dtype):
    """Gradients of a step, and the mean of those that ranks compute alone from weights in ``compute_dtype``."""
    tokens, targets = map(share, batch(0, 30))
    sharded = FSDP(transformer(), compute_dtype)
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()

    alone = transformer()
    for part in alone.modules():
        if type(part).__name__ in ("Linear", "Embedding"):
            part.to(compute_dtype)
    loss_of(alone, tokens, targets).backward()
    means = {}
    for name, parameter in alone.named_parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, parameter.grad)
        means[name] = sum(part.cpu().float() for part in parts) / dist.get_world_size()
    dtypes = {parameter.grad.dtype for parameter in sharded.parameters()}
    return whole_gradients(sharded), means, dtypes, {parameter.dtype for parameter in sharded.parameters()}


class WithoutNorms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 7)) for _ in range(3)])
        self.head = nn.Linear(7, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard_like_torch(model, parts, compute_dtype):
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    for part in (*parts, model):
        fully_shard(part, mp_policy=policy)


def beside_fully_shard(compute_dtype):
    """Whole weights after training with our wrapper and with torch's."""
    ours = FSDP(on_rank(WithoutNorms()), compute_dtype)
    theirs = on_rank(WithoutNorms())
    shard_like_torch(theirs, [*theirs.blocks, theirs.embedding, theirs.head], compute_dtype)
    results = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, *map(share, batch(step))).backward()
            if model is ours:
                model.finish_gradient_synchronization()
            optimizer.step()
    results.append(on_cpu(ours.gather_full_params()))
    full = {name: parameter.full_tensor() for name, parameter in theirs.named_parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in theirs.parameters())
    results.append(on_cpu(full))
    return results


class Sometimes(nn.Module):
    """A block with a layer that is used if so asked."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x, use):
        y = self.always(x)
        return y + self.sometimes(x) * self.gain if use else y


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Sometimes() for _ in range(3)])
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x, use, skip=False):
        for block in self.blocks[: 2 if skip else 3]:
            x = block(x, use)
        return x.sum()


def branching_gradients(model, rank, use, skip):
    """What one process computes on this rank's input."""
    model.zero_grad()
    model(torch.full((2, 3), rank + 1.0), use, skip).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unused(cases):
    """For each case, averaged gradients, and those that every rank computes alone: None where it has none."""
    sharded, alone = FSDP(Branching()), Branching()
    results = []
    for used_on, skip in cases:
        sharded.zero_grad()
        rank = dist.get_rank()
        sharded(torch.full((2, 3), rank + 1.0), rank in used_on, skip).backward()
        sharded.finish_gradient_synchronization()
        results.append((whole_gradients(sharded), branching_gradients(alone, rank, rank in used_on, skip)))
    return results


def unused_keeps_what_was_there():
    """A gradient of zeros, which zero_grad leaves, is none that disappears."""
    sharded = FSDP(Branching())
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sharded(torch.ones(2, 3), False).backward()
    sharded.finish_gradient_synchronization()
    return gradients(sharded)


def freeze_and_unfreeze():
    """Errors before refresh(), and gradients before and after."""
    model = Branching()
    model.blocks[0].always.requires_grad_(False)
    model.blocks[1].gain.requires_grad_(False)
    sharded = FSDP(model)
    x = torch.full((2, 3), dist.get_rank() + 1.0)

    def step():
        sharded.zero_grad()
        sharded(x, True).backward()
        sharded.finish_gradient_synchronization()
        return {name for name, gradient in gradients(sharded).items() if gradient is not None}

    before = step()
    model.blocks[0].always.requires_grad_(True)
    model.blocks[1].gain.requires_grad_(True)
    model.blocks[2].sometimes.requires_grad_(False)
    errors = [error_of(step)]
    sharded.refresh()
    after = step()
    whole = whole_gradients(sharded)
    model.blocks[2].always.requires_grad_(dist.get_rank() == 0)
    errors.append(error_of(sharded.refresh))
    return before, after, whole, errors


def used_in_the_second_of_three_passes():
    sharded = FSDP(Branching())
    for uses in (False, True, False):
        sharded(torch.full((2, 3), dist.get_rank() + 1.0), uses).backward()
    sharded.finish_gradient_synchronization()
    return gradients(sharded)


def through_frozen_layers():
    """Gradients of the inputs of frozen layers in two steps, and those of the plain layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).sum(), x)
    sharded, found = FSDP(layers), []
    for _ in range(2):
        sharded(x).sum().backward()
        sharded.finish_gradient_synchronization()
        found.append(x.grad)
        x.grad = None
    return found, expected


def accumulation():
    """Whole gradients of three passes: all but the last under no_sync, all under it, none; and of bf16 weights."""
    results = []
    for compute_dtype in (None, torch.bfloat16):
        for synchronized in ((False, False, True), (False, False, False), (True, True, True), (True, False, True)):
            sharded = FSDP(transformer(), compute_dtype)
            log = []
            with recorded(log):
                for step, synchronize in enumerate(synchronized):
                    with contextlib.nullcontext() if synchronize else sharded.no_sync():
                        loss_of(sharded, *map(share, batch(step, 30))).backward()
                sharded.finish_gradient_synchronization()
            reductions = sum(collective in ("reduce-scatter", "all-to-all") for collective, _ in log)
            results.append((compute_dtype, synchronized, reductions, whole_gradients(sharded)))
    return results


class Outputs(nn.Module):
    """A block that returns its result in many ways."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y, z = self.first(x), self.second(x)
        if self.kind == "tuple":
            return y, z
        if self.kind == "second unused":
            return y, z.detach()
        if self.kind == "nested":
            return {"y": [y], "z": (z, "text", None)}
        if self.kind == "dataclass":
            return Pair(y, z)
        if self.kind == "view":
            return (y + z).view(-1)
        if self.kind == "view of the input":
            return (y + z), x.view(-1)
        if self.kind == "hidden":
            return Hidden(y)
        return y + z


@dataclasses.dataclass
class Pair:
    y: torch.Tensor
    z: torch.Tensor


class Hidden:
    def __init__(self, value):
        self.value = value


class UsesOutputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Outputs(kind) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            out = block(x)
            if block.kind in ("tuple", "second unused"):
                x = out[0] + out[1]
            elif block.kind == "nested":
                x = out["y"][0] + out["z"][0]
            elif block.kind == "dataclass":
                x = out.y + out.z
            elif block.kind == "view":
                out *= 2
                x = out.view(x.shape)
            elif block.kind == "view of the input":
                x = out[0] + out[1].view(x.shape)
            elif block.kind == "in place":
                out += 1
                x = out
            else:
                x = out
        return x.square().sum()


KINDS = ("tuple", "second unused", "nested", "dataclass", "view", "view of the input", "in place")


def outputs():
    """By kind of output: gradients of two backward passes through one graph, sharded and alone."""
    results = {}
    for kind in KINDS:
        passes = []
        for model in (FSDP(UsesOutputs(kind)), UsesOutputs(kind)):
            for _ in range(2):
                loss = model(torch.linspace(-1, 1, 6).view(2, 3))
            loss.backward(retain_graph=True)
            loss.backward()
            if isinstance(model, FSDP):
                model.finish_gradient_synchronization()
                passes.append(whole_gradients(model))
            else:
                passes.append({name: parameter.grad for name, parameter in model.named_parameters()})
        results[kind] = passes
    return results, error_of(FSDP(UsesOutputs("hidden")), torch.ones(2, 3))


def two_forward_passes_before_backward():
    """Gradients of the sum of two losses, and of two losses one after the other."""
    results = []
    for together in (True, False):
        sharded, alone = FSDP(network(0)), network(0)
        for model in (sharded, alone):
            losses = [loss_of(model, *map(share, batch(step))) for step in range(2)]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
        sharded.finish_gradient_synchronization()
        means = {}
        for name, parameter in alone.named_parameters():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, parameter.grad)
            means[name] = None if parts[0] is None else sum(parts) / len(parts)
        results.append((whole_gradients(sharded), means))
    return results


class Attention(nn.Module):
    """torch's own layers: attention that does not call its output projection, and norms in full precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)])
        self.norm = nn.BatchNorm1d(8)
        self.positions = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x):
        x = self.embed(x) + self.positions
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x.transpose(1, 2)).float()


def layers_of_torch():
    """Outputs and gradients of torch's layers, sharded and alone, in fp64; dtype and gradients' dtypes in bf16."""
    inputs = torch.randn(4, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sharded, alone = FSDP(Attention().double()), Attention().double()
    units = [unit.name for unit in sharded.units]
    passes = []
    for model in (sharded, alone):
        out = model(inputs)
        (out.double().square() * torch.arange(4.0)).sum().backward()
        passes.append(out.detach())
    sharded.finish_gradient_synchronization()
    passes += [whole_gradients(sharded), {name: parameter.grad for name, parameter in alone.named_parameters()}]
    half = FSDP(Attention(), torch.bfloat16)
    seen = []
    half.module.norm.register_forward_hook(lambda *_: None)
    half.module.layers[0].norm1.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    out = half(inputs.float())
    out.sum().backward()
    half.finish_gradient_synchronization()
    return units, passes, seen, {parameter.grad.dtype for parameter in half.parameters()}


def recovers():
    """Whole weights after a step that failed in forward, and one that failed in backward, and then good ones."""
    results = []
    for where in ("forward", "backward", None):
        sharded = FSDP(network(0))
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

        def fail(*_):
            raise ArithmeticError

        errors = []
        if where == "forward":
            handle = sharded.module.blocks[1].norm.register_forward_hook(fail)
            errors.append(error_of(loss_of, sharded, *map(share, batch(0))))
            handle.remove()
        elif where == "backward":
            handle = sharded.module.blocks[1].norm.register_full_backward_hook(fail)
            errors.append(error_of(loss_of(sharded, *map(share, batch(0))).backward))
            handle.remove()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(sharded, *map(share, batch(step))).backward()
            sharded.finish_gradient_synchronization()
            optimizer.step()
        results.append((errors, on_cpu(sharded.gather_full_params()), gathered_units(sharded)))
    return results


def evaluation():
    """Outputs without gradients, through the wrapper and the module itself, and what stays gathered."""
    model = transformer()
    alone = copy.deepcopy(model)
    sharded = FSDP(model)
    tokens, _ = batch(0, 30)
    results = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            results.append((sharded(tokens), alone(tokens), gathered_units(sharded)))
    results.append((sharded.module.generate(tokens[0], 5, 0.0), alone.generate(tokens[0], 5, 0.0), {}))
    out = sharded.module(tokens)
    results.append((out, alone(tokens), gathered_units(sharded)))
    out.sum().backward()
    sharded.finish_gradient_synchronization()
    alone(tokens).sum().backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return results, whole_gradients(sharded), expected


def clipped(norm_type, largest):
    """Norm and whole gradients after clipping, with our wrapper and in one process on the mean loss of all ranks."""
    sharded, alone = FSDP(network(0)), network(0)
    tokens, targets = batch(0)
    loss_of(sharded, share(tokens), share(targets)).backward()
    sharded.finish_gradient_synchronization()
    norm = sharded.clip_grad_norm_(largest, norm_type)
    loss_of(alone, *(rows.to(collectives.group_device()) for rows in (tokens, targets))).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), largest, norm_type)
    gradients_alone = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return norm.cpu(), expected.cpu(), whole_gradients(sharded), on_cpu(gradients_alone)


def not_a_number(value):
    """Norms, errors and gradients when one element of one rank's slice is not finite."""
    sharded = FSDP(network(0))
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == dist.get_world_size() - 1:
        sharded.module.blocks[0].up.weight.grad[0, 0] = value
    before = gradients(sharded)
    error = error_of(sharded.clip_grad_norm_, 1.0, error_if_nonfinite=True)
    after = gradients(sharded)
    infinite = sharded.clip_grad_norm_(1.0, float("inf"))
    return error, before, after, sharded.clip_grad_norm_(1.0), infinite


def whole_parameters():
    """Names and values right after wrapping, those of the plain module on rank 0, and what the ranks hold."""
    model = network(dist.get_rank())
    sharded = FSDP(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {name: value.detach() for name, value in network(0).named_parameters(remove_duplicate=False)}
    return sharded.gather_full_params(), expected, shapes, model.offset


def compiled(when):
    """Graphs compiled for twelve blocks, and whole weights after training; in eager mode if ``when`` is None."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    model = transformer(layers=12)
    for index, block in enumerate(model.layers):
        if when == "before":
            block.compile(backend=backend, dynamic=False)
        elif when == "instead":
            model.layers[index] = torch.compile(block, backend=backend, dynamic=False)
        elif when == "checkpointed":
            block.compile(backend=backend, dynamic=False)
            model.forward = lambda x: checkpointed_layers(model, x)
    sharded = FSDP(model, torch.bfloat16)
    if when == "after":
        for block in model.layers:
            block.compile(backend=backend, dynamic=False)
    run = torch.compile(sharded, backend=backend, dynamic=False) if when == "around" else sharded
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    with torch._dynamo.config.patch(error_on_recompile=when not in (None, "around")):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(run, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
            optimizer.step()
    weights = {name.replace("_orig_mod.", ""): value for name, value in sharded.gather_full_params().items()}
    model.compile(backend=backend)
    error = error_of(sharded, batch(0, 30)[0])
    torch._dynamo.reset()
    return len(graphs), weights, error


def checkpointed_in_parts():
    """Gradients with checkpoints around part of a block, around two blocks, and reentrant ones; without any first."""
    results = []
    tokens, targets = map(share, batch(0, 30))
    for where in (None, "part", "whole blocks", "two blocks", "reentrant"):
        model = transformer(layers=4)
        if where == "part":
            for block in model.layers:
                ffn = block.ffn.forward
                block.ffn.forward = lambda x, ffn=ffn: checkpoint(ffn, x, use_reentrant=False)
        sharded = FSDP(model)
        if where in ("two blocks", "reentrant"):
            model.forward = lambda x, model=model, where=where: checkpointed_pairs(model, x, where == "reentrant")
        elif where == "whole blocks":
            model.forward = lambda x, model=model: checkpointed_layers(model, x)
        for _ in range(3):
            sharded.zero_grad()
            # Without early stop blocks return from being computed again.
            with set_checkpoint_early_stop(where == "part"):
                loss_of(sharded, tokens, targets).backward()
            sharded.finish_gradient_synchronization()
        results.append((whole_gradients(sharded), gathered_units(sharded)))
    return results


def checkpointed_layers(model, tokens):
    x = model.token_embeddings(tokens)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return model.lm_head(model.ln_final(x))


def checkpointed_pairs(model, tokens, use_reentrant):
    x = model.token_embeddings(tokens)
    for first, second in zip(model.layers[::2], model.layers[1::2], strict=True):
        x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=use_reentrant)
    return model.lm_head(model.ln_final(x))


def initialize(module):
    """As the constructors of ``cs336_basics`` do."""
    if type(module).__name__ == "Linear":
        std = (2 / sum(module.weight.shape)) ** 0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    elif type(module).__name__ == "Embedding":
        nn.init.trunc_normal_(module.weight, a=-3.0, b=3.0)
    elif type(module).__name__ == "RMSNorm":
        nn.init.ones_(module.weight)


def from_meta():
    """Whole parameters and buffers of modules made on the meta device, and of those made as usual with that seed."""
    with torch.device("meta"):
        model = transformer()
    # Only rank 0's random numbers count.
    torch.manual_seed(7 + dist.get_rank())
    sharded = FSDP(model, initialize=initialize)
    tokens, targets = map(share, batch(0, 30))
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()
    usual = transformer(seed=7)
    results = [
        (sharded.gather_full_params(), {name: value.detach() for name, value in usual.named_parameters()}),
        (dict(model.named_buffers()), dict(usual.named_buffers())),
    ]
    with torch.device("meta"):
        model = Network()
        model.frozen.requires_grad_(False)
    error = error_of(FSDP, model)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))
        model[2].requires_grad_(False)
        model[3].weight = model[0].weight
    torch.manual_seed(7)
    sharded = FSDP(model)
    torch.manual_seed(7)
    usual = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))
    usual[3].weight = usual[0].weight
    all_names = usual.named_parameters(remove_duplicate=False)
    results += [
        (sharded.gather_full_params(), {name: value.detach() for name, value in all_names}),
        (dict(model.named_buffers()), dict(usual.named_buffers())),
    ]
    trained = [parameter.requires_grad for parameter in sharded.parameters()]
    return results, trained, error


def refusals():
    """The errors of what cannot work, by what it is."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded = FSDP(plain)
    errors = {
        "again": error_of(FSDP, sharded),
        "the inside again": error_of(FSDP, nn.Sequential(plain)),
        "over DDP": error_of(FSDP, nn.Sequential(OverlappedDDP(nn.Linear(2, 2)))),
        "over torch's": error_of(FSDP, fully_shard(nn.Sequential(nn.Linear(2, 2)))),
        "prefetch": error_of(FSDP, nn.Linear(2, 2), prefetch=-1),
        "compute_dtype": error_of(FSDP, nn.Linear(2, 2), torch.int8),
        "gradient_dtype": error_of(FSDP, nn.Linear(2, 2), gradient_dtype=torch.int8),
        "moved": error_of(sharded.to, torch.float16),
        "copied": error_of(copy.deepcopy, sharded),
        "assigned": error_of(sharded.load_state_dict, sharded.state_dict(), assign=True),
    }
    sparse = FSDP(nn.Embedding(5, 3, sparse=True))
    errors["sparse"] = error_of(sparse(torch.tensor([1, 2])).sum().backward)
    world_size = dist.get_world_size
    dist.get_world_size = lambda: world_size() + 1
    try:
        errors["another group"] = error_of(sharded, torch.ones(1, 2))
    finally:
        dist.get_world_size = world_size
    return errors


def outside_the_group():
    """The error of a forward pass after this process has left the group. It must be the last that these ranks do."""
    sharded = FSDP(nn.Linear(2, 2))
    initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        return error_of(sharded, torch.ones(1, 2)), error_of(FSDP, nn.Linear(2, 2))
    finally:
        dist.is_initialized = initialized


def differing_layout(what):
    """The error on this rank when rank 1 builds something else."""
    is_other = dist.get_rank() == 1
    model, settings = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}
    if what == "shape" and is_other:
        model[1] = nn.Linear(4, 5)
    elif what == "settings":
        settings = {"prefetch": 1 + is_other}
    elif what == "units" and is_other:
        settings = {"unit_modules": [model]}
    return error_of(FSDP, model, **settings)


def state_dicts():
    """Names of a state dict, and whether loading it brings the slices back."""
    sharded = FSDP(network(0))
    saved = {name: value.clone() for name, value in sharded.state_dict().items()}
    for parameter in sharded.parameters():
        nn.init.zeros_(parameter)
    sharded.load_state_dict(saved)
    same = all(torch.equal(value, saved[name]) for name, value in sharded.state_dict().items())
    return list(saved), list(network(0).state_dict()), same


def lost_peer(how):
    """One rank does not come to a gather of the second step."""
    sharded = FSDP(transformer())
    tokens, targets = map(share, batch(0, 30))
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("out of data")
        time.sleep(600)
    loss_of(sharded, tokens, targets).backward()


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


def state_memory(compute_dtype):
    """Bytes of slices, their gradients and AdamW's moments on this rank, and of the widest gathered unit."""
    model = transformer()
    sharded = FSDP(model, compute_dtype)
    optimizer = torch.optim.AdamW(sharded.parameters())
    loss_of(sharded, *map(share, batch(0, 30))).backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    parameters = list(sharded.parameters())
    moments = [values[key] for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    gathered = {unit.name: unit.gathered_bytes for unit in sharded.units}
    return tuple(map(bytes_of, (parameters, [p.grad for p in parameters], moments))), gathered


def bytes_of(tensors):
    """Of the memory that holds the tensors, which may be more than they fill."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def sent_bytes(compute_dtype):
    """By collective: bytes of the whole arrays that a third step communicates."""
    sharded = FSDP(transformer(layers=2), compute_dtype)
    sent = {}
    for step in range(3):
        sent.clear()
        with recorded_bytes(sent):
            loss_of(sharded, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
    return sent


class recorded_bytes(TorchDispatchMode):
    """Adds up what goes through torch's dispatcher to the process group."""

    def __init__(self, sent):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            # Outputs come first; of what all ranks get they are the larger, of what each gets its part of the inputs.
            sizes = [bytes_of_argument(argument) for argument in args]
            name = operator.name().removeprefix("c10d::").lstrip("_").partition(".")[0]
            self.sent[name] = self.sent.get(name, 0) + max(sizes)
        return operator(*args, **(kwargs or {}))


def bytes_of_argument(argument):
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.itemsize
    if isinstance(argument, list | tuple):
        return sum(bytes_of_argument(part) for part in argument)
    return 0


def memory_after_wrapping():
    """Bytes of tensors that are alive because of a wrapped module."""
    gc.collect()
    before = alive_bytes()
    sharded = FSDP(transformer())
    gc.collect()
    return alive_bytes() - before, bytes_of(list(sharded.parameters())), bytes_of(list(sharded.module.buffers()))


def alive_bytes():
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return bytes_of([tensor for tensor in tensors if tensor.device.type == "cpu" and not is_fake(tensor)])


class SharedParts(nn.Module):
    """Blocks with a layer and a norm in common, which the module itself calls, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for _ in range(4)])
        self.shared = self.blocks[0][0]
        self.blocks[2][0] = self.shared
        self.blocks[3][1] = self.blocks[1][1]

    def forward(self, x):
        for block in (*self.blocks, self.shared, self.blocks[1]):
            x = torch.tanh(block(x))
        return x.square().mean()


def shared_parts():
    """Whole gradients of a third step, in fp64, and the mean of those that ranks compute alone."""
    sharded, alone = FSDP(SharedParts().double()), SharedParts().double()
    inputs = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5)
    for _ in range(3):
        sharded.zero_grad()
        sharded(share(inputs)).backward()
        sharded.finish_gradient_synchronization()
    alone(inputs).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return whole_gradients(sharded), expected, gathered_units(sharded)


# 12 blocks of 16.8 M parameters: 3.2 GB of state in all, and hardly any activations of a batch of 16 tokens.
LARGE = ModelSize("", d_model=1024, d_ff=4096, num_layers=12, num_heads=16, vocab_size=4096, context=16, batch_size=1)


def peak_memory(compute_dtype, prefetch):
    """Most bytes of GPU memory in a training step: with our wrapper and with torch's."""
    peaks = []
    for wrapper in ("ours", "torch's"):
        with torch.device(collectives.group_device()):
            model = BasicsTransformerLM(
                LARGE.vocab_size, LARGE.context, LARGE.d_model, LARGE.num_layers, LARGE.num_heads, LARGE.d_ff
            )
        if wrapper == "ours":
            model = FSDP(model, compute_dtype, prefetch=prefetch)
        else:
            shard_like_torch(model, model.layers, compute_dtype)
        # Fused, because others need memory of their own.
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(LARGE.vocab_size, (1, LARGE.context), device=collectives.group_device())
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            loss_of(model, tokens, tokens).backward()
            if wrapper == "ours":
                model.finish_gradient_synchronization()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated())
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    return peaks


def compiled_by_inductor():
    """Whole weights after training, eager and with compiled blocks; how many graphs those needed."""
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = transformer(layers=6)
        for block in model.layers if compiles else ():
            block.compile(dynamic=False)
        sharded = FSDP(model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(sharded, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
            optimizer.step()
        results.append(on_cpu(sharded.gather_full_params()))
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]
