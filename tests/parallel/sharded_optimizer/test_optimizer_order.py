"""Communication runs in one order on all ranks, beside the passes; nothing is used before it has arrived."""

import itertools
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

from cs336sys.parallel import collectives


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
