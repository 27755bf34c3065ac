"""Communication runs in one order beside the passes; bytes held and communicated are those on paper."""

import dataclasses
import gc
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from launches import delays, on_start, on_wait
from on_ranks import on_ranks
from optimizer_models import LAUNCHED, MODES, each_mode, finish, sharded, train
from same_tensors import assert_same
from small_models import weights
from torch import nn

from cs336sys.accounting.sharding.partition import greedy_partition
from cs336sys.accounting.sharding.step import flat_optimizer_state, sharded_optimizer_state
from cs336sys.parallel import collectives
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


@on_ranks(2, gpus=True)
def test_delays_change_nothing():
    """Every rank comes late to other operations than its peers; on GPUs both with launches and with tensors."""
    for mode, overlap in itertools.product(MODES, (False, True)):
        expected = train(mode, steps=3, overlap=overlap)
        for delay in delays():
            with on_start(lambda operation, start, *args, delay=delay: (delay(), start(*args))):
                assert_same(train(mode, steps=3, overlap=overlap), expected)


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


LAYERS = ["scale", "embedding", *(f"blocks.{n}" for n in range(4))]
# 170 bytes hold a layer's weight, 144, and bias, 24.
LAYER_MB = 0.00017


def layers(operation):
    names = operation.contents.removeprefix("gradients of ").split(", ")
    return ", ".join(sorted({re.sub("(.linear)?.(weight|bias)", "", name) for name in names}))


@on_ranks(2)
@each_mode
def test_communication_runs_while_the_passes_do(mode):
    """In the second step; then what happens when a state dict is made, and in a step without the last block."""
    gather = {"flat": "SliceGather", "default": "Broadcasts"}[mode]
    # Every layer's parameters are waited for right before it runs; the scale's were, within the step before.
    blocks = [event for n in range(4) for event in (f"wait for {gather} of blocks.{n}", f"block {n}")]
    forward = [f"wait for {gather} of embedding", *blocks]
    expected = [*forward, "backward done"]
    if mode == "flat":
        # At most three buckets of whole gradients are alive.
        scatters = [f"start MeanScatter of {layer}" for layer in reversed(LAYERS)]
        waits = [f"wait for MeanScatter of {layer}" for layer in reversed(LAYERS)]
        passed = [event for pair in zip(scatters[2:], waits[:4], strict=True) for event in pair]
        expected = [*forward, *scatters[:2], *passed, "backward done", *waits[4:]]
    expected += [f"start {gather} of {layer}" for layer in LAYERS]
    expected += [f"wait for {gather} of scale", "step done"]

    seen = []
    model = Stack(seen)
    options = {"overlap": True, "params": model.named_parameters(), "bucket_size_mb": LAYER_MB}
    wrapped, optimizer = sharded(mode, model, **options)

    def note_start(operation, start, *args):
        seen.append(f"start {type(operation).__name__} of {layers(operation)}")
        start(*args)

    def note_wait(operation, wait):
        if operation._works and not isinstance(operation, collectives.MeanReduction):
            seen.append(f"wait for {type(operation).__name__} of {layers(operation)}")
        wait()

    with on_start(note_start, LAUNCHED), on_wait(note_wait):
        for _ in range(2):
            seen.clear()
            wrapped(torch.ones(2, 6)).sum().backward()
            seen.append("backward done")
            finish(wrapped)
            optimizer.step()
            seen.append("step done")
            optimizer.zero_grad()
        assert seen == expected
        seen.clear()
        model.state_dict()
        assert seen == [f"wait for {gather} of {layer}" for layer in LAYERS[1:]]
        optimizer.step()
        seen.clear()
        model.depth = 3
        wrapped(torch.ones(2, 6))
        optimizer.step()
    # What happens before operations are started again, but for those of gradients.
    before = seen[: seen.index(f"start {gather} of scale")]
    assert [event for event in before if "MeanScatter" not in event] == forward[:-1]


def compiled(mode, target, when):
    """Weights after three steps, waits within the last forward pass, and graphs compiled in the last two.

    Args:
        target: what is compiled: the "blocks", the "model", what is "around" it, or None.
        when: "before" the optimizer is built, and run once, or "after".
    """
    model, waits = Stack(seen=None), []
    run, x = model, torch.ones(2, 6) * (1 + dist.get_rank())

    def compile_target():
        for module in {"blocks": model.blocks, "model": [model]}.get(target, []):
            is_whole = target == "blocks" or when == "before"
            module.compile(backend="aot_eager", dynamic=False, fullgraph=is_whole)
        return torch.compile(model, backend="aot_eager", dynamic=False) if target == "around" else model

    if when == "before":
        run = compile_target()
        run(x).square().sum().backward()
        model.zero_grad()
    options = {"overlap": True, "params": model.named_parameters(), "lr": 0.1, "bucket_size_mb": LAYER_MB}
    wrapped, optimizer = sharded(mode, model, **options)
    if when == "after":
        run = compile_target()

    def note(operation, wait):
        if operation._works and isinstance(operation, collectives.SliceGather | collectives.Broadcasts):
            waits.append(layers(operation))
        wait()

    for step in range(3):
        with on_wait(note):
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


@on_ranks(2)
@each_mode
@pytest.mark.parametrize(
    ("target", "when"),
    [
        *(("blocks", "before"), ("around", "before"), ("model", "after")),
        *(
            pytest.param(target, when, marks=pytest.mark.nightly)
            for target, when in (("model", "before"), ("blocks", "after"), ("around", "after"))
        ),
    ],
)
def test_compiled_modules_wait_in_every_step(mode, target, when):
    eager, *_ = compiled(mode, None, None)
    trained, waits, recompiled = compiled(mode, target, when)
    assert_same(trained, eager, rtol=1e-6, atol=1e-6)
    # Before each block; if all is compiled as one, before the model.
    assert waits == (LAYERS if (target, when) == ("model", "before") else LAYERS[1:])
    assert recompiled == 0


class Sizes(nn.Module):
    """Parameters of given shapes, each of which gets a gradient."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self):
        return sum(part.sum() for part in self.parts)


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


@on_ranks(1, 2, 3)
def test_whole_parameters_of_a_rank_travel_as_one():
    """Alone stay those that are no multiple of 64 elements or have gaps, and the only one of a rank and dtype."""
    parameters, initial = mixed_parameters(), mixed_parameters()
    owners = greedy_partition([parameter.nbytes for parameter in initial.values()], [0] * dist.get_world_size())
    expected, together, sent = [], {}, []
    for (name, parameter), owner in zip(initial.items(), owners, strict=True):
        if name in ("odd", "nearly", "scalar", "every other"):
            expected.append((owner, parameter.nbytes))
        else:
            together.setdefault((owner, parameter.dtype), {})[name] = parameter.nbytes
    expected += [(owner, sum(members.values())) for (owner, _), members in together.items()]
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    optimizer = ShardedOptimizer(parameters.items(), torch.optim.SGD, lr=1.0, bucket_size_mb=None)

    def note(operation, start, *args):
        start(*args)
        sent.extend(
            (source, tensor.nbytes) for source, tensor in zip(operation._sources, operation._tensors, strict=True)
        )

    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0.5
    with on_start(note, LAUNCHED):
        optimizer.step()
    assert sorted(sent) == sorted(expected)
    moved = {name for name, parameter in parameters.items() if parameter.data_ptr() != before[name]}
    assert moved == {name for members in together.values() if len(members) > 1 for name in members}
    assert_same(parameters, {name: parameter.detach() * 0.5 for name, parameter in initial.items()})
    for name, parameter in parameters.items():
        assert parameter.stride() == initial[name].stride()
        assert parameter.storage_offset() * parameter.element_size() % 128 == 0


def storage_bytes(tensors):
    """Memory under tensors, each piece once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("mode", "dtype", "master_dtype"),
    [
        ("default", torch.float32, None),
        ("flat", torch.float32, None),
        ("flat", torch.bfloat16, None),
        ("flat", torch.bfloat16, torch.float32),
    ],
)
def test_bytes_held_are_those_on_paper(mode, dtype, master_dtype):
    """Between backward pass and step, and of the optimizer after it."""
    shapes, cap_mb, world_size = [(16, 24), (3,), (6, 64), (129,), (1,), (8, 8), (64,)], 0.0008, dist.get_world_size()
    sizes = [math.prod(shape) for shape in shapes]
    if mode == "default":
        expected = sharded_optimizer_state(sizes, world_size, element_bytes=dtype.itemsize)
    else:
        specs = [TensorSpec(index, size * dtype.itemsize) for index, size in enumerate(sizes)]
        expected = flat_optimizer_state(
            [[sizes[index] for index in bucket] for bucket in assign_buckets(specs, cap_mb * 1e6)],
            world_size,
            element_bytes=dtype.itemsize,
            master_bytes=0 if master_dtype is None else master_dtype.itemsize,
        )
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
    entries = [value for state in optimizer.state.values() for value in state.values()]
    assert dataclasses.asdict(expected[dist.get_rank()]) == {
        "parameters": storage_bytes(model.parameters()),
        "gradients": storage_bytes(gradients),
        "optimizer_state": storage_bytes(value for value in entries if isinstance(value, torch.Tensor) and value.dim()),
        "master_parameters": storage_bytes(tensor for tensor in local if tensor.dtype != dtype),
    }


@on_ranks(gpus=True)
@each_mode
def test_optimizer_memory_halves_on_two_gpus(mode):
    """Beside 16 parameters of 4 MiB: AdamW's moments are 128 MiB on one GPU, 64 on each of two.

    Beside whole gradients, 64 MiB; flat has its half and three buckets of 16 MiB, and no copy of anything.
    """
    gc.collect()
    model, mib = Sizes([(1024, 1024)] * 16, torch.float32).cuda(), 2**20
    before = torch.cuda.memory_allocated()
    wrapped, optimizer = sharded(mode, model, bucket_size_mb=16.0, fused=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        wrapped().backward()
        finish(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    held, peak = (count - before for count in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    assert 64 * mib <= held < 65 * mib
    assert peak <= (64 + (64 + 8 if mode == "default" else 32 + 3 * 16 + 1)) * mib
