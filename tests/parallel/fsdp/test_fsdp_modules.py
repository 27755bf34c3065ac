"""Unusual, compiled, checkpointed and meta modules start and train as they do unwrapped."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Network, batch, gathered_units, loss_of, transformer, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, gradients, on_cpu, share
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from unusual_models import EncoderLayerAlone

from cs336sys.parallel.fsdp import FSDP


@dataclasses.dataclass
class Pair:
    y: torch.Tensor
    z: torch.Tensor


def doubled_in_place(out, x):
    out *= 2
    return out.view(x.shape)


def increased_in_place(out, x):
    out += 1
    return out


# What a block returns of its input and two tensors, and what its caller makes of it.
KINDS = {
    "tuple": (lambda x, y, z: (y, z), lambda out, x: out[0] + out[1]),
    "second unused": (lambda x, y, z: (y, z.detach()), lambda out, x: out[0] + out[1]),
    "nested": (lambda x, y, z: {"y": [y], "z": (z, "text", None)}, lambda out, x: out["y"][0] + out["z"][0]),
    "dataclass": (lambda x, y, z: Pair(y, z), lambda out, x: out.y + out.z),
    "view": (lambda x, y, z: (y + z).view(-1), doubled_in_place),
    "view of the input": (lambda x, y, z: (y + z, x.view(-1)), lambda out, x: out[0] + out[1].view(x.shape)),
    "in place": (lambda x, y, z: y + z, increased_in_place),
}


class Outputs(nn.Module):
    """A block that returns its result in many ways."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.combine(x, self.first(x), self.second(x))


class UsesOutputs(nn.Module):
    def __init__(self, combine, use):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Outputs(combine) for _ in range(2)])
        self.use = use

    def forward(self, x):
        for block in self.blocks:
            x = self.use(block(x), x)
        return x.square().sum()


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_units_may_return_anything_and_be_traversed_twice(kind):
    sharded, alone = FSDP(UsesOutputs(*KINDS[kind])), UsesOutputs(*KINDS[kind])
    for model in (sharded, alone):
        for _ in range(2):
            loss = model(torch.linspace(-1, 1, 6).view(2, 3))
        loss.backward(retain_graph=True)
        loss.backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), gradients(alone), rtol=1e-6, atol=1e-6)


class Hidden:
    def __init__(self, *values):
        self.values = values


@on_ranks(2)
def test_output_without_any_tensor_that_can_be_seen_is_refused():
    assert error_of(FSDP(UsesOutputs(Hidden, lambda out, x: out)), torch.ones(2, 3)) == (
        "UsageError",
        "blocks.0 returns a Hidden, in which no tensor was found: return tensors, or lists, tuples, dictionaries or "
        "dataclasses of them",
    )


@on_ranks(2)
def test_torchs_norms_compute_in_full_precision():
    half, dtypes = FSDP(EncoderLayerAlone().float(), torch.bfloat16), []
    half.module.layer.norm1.register_forward_hook(lambda _, args, out: dtypes.append((args[0].dtype, out.dtype)))
    half(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    half.finish_gradient_synchronization()
    # What torch's norm gets and what leaves it.
    assert dtypes == [(torch.float32, torch.bfloat16)]
    assert {parameter.grad.dtype for parameter in half.module.layer.parameters()} == {torch.float32}


def compiled(when):
    """Graphs compiled for four blocks, and whole weights after training; in eager mode if ``when`` is None."""
    torch._dynamo.reset()
    model, graphs = transformer(layers=4), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def compile_blocks():
        for block in model.layers:
            block.compile(backend=backend, dynamic=False)

    if when in ("before", "checkpointed"):
        compile_blocks()
    if when == "checkpointed":
        model.forward = functools.partial(checkpointed_layers, model)
    elif when == "instead":
        model.layers = nn.ModuleList(torch.compile(block, backend=backend, dynamic=False) for block in model.layers)
    sharded = FSDP(model, torch.bfloat16)
    if when == "after":
        compile_blocks()
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
    kind, message = error_of(sharded, batch(0, 30)[0])
    assert (kind, message.partition(" is compiled as a whole")[0]) == ("UsageError", "BasicsTransformerLM")
    torch._dynamo.reset()
    return len(graphs), weights


@functools.cache
def trained_in_eager_mode():
    return compiled(None)[1]


@on_ranks(2)
@pytest.mark.parametrize(
    "when",
    [
        "before",
        "checkpointed",
        "around",
        *(pytest.param(when, marks=pytest.mark.nightly) for when in ("after", "instead")),
    ],
)
def test_compiled_blocks_share_one_graph(when):
    """A wrapper that is compiled runs uncompiled."""
    graphs, weights = compiled(when)
    assert graphs == (0 if when == "around" else 1)
    assert_same(weights, trained_in_eager_mode())


def checkpointed_layers(model, tokens):
    x = model.token_embeddings(tokens)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return model.lm_head(model.ln_final(x))


def checkpointed_pairs(model, use_reentrant, tokens):
    x = model.token_embeddings(tokens)
    for first, second in zip(model.layers[::2], model.layers[1::2], strict=True):
        x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=use_reentrant)
    return model.lm_head(model.ln_final(x))


@on_ranks(2)
def test_checkpoints_may_be_around_parts_of_units_and_around_several():
    expected = None
    for where in ("nowhere", "part", "whole blocks", "two blocks", "reentrant"):
        model = transformer(layers=4)
        for block in model.layers if where == "part" else ():
            block.ffn.forward = functools.partial(checkpoint, block.ffn.forward, use_reentrant=False)
        sharded = FSDP(model)
        if where in ("two blocks", "reentrant"):
            model.forward = functools.partial(checkpointed_pairs, model, where == "reentrant")
        elif where == "whole blocks":
            model.forward = functools.partial(checkpointed_layers, model)
        for _ in range(3):
            sharded.zero_grad()
            # Without early stop blocks return from being computed again.
            with set_checkpoint_early_stop(where == "part"):
                loss_of(sharded, *map(share, batch(0, 30))).backward()
            sharded.finish_gradient_synchronization()
        expected = expected or whole_gradients(sharded)
        assert_same(whole_gradients(sharded), expected)
        assert gathered_units(sharded) == {}


@on_ranks(gpus=True)
def test_compiled_blocks_on_two_gpus():
    """By inductor."""
    trained = []
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
        trained.append(on_cpu(sharded.gather_full_params()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_same(*trained, rtol=1e-3, atol=1e-4)


def initialize(module):
    """As the constructors of ``cs336_basics`` do."""
    if type(module).__name__ == "Linear":
        std = (2 / sum(module.weight.shape)) ** 0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    elif type(module).__name__ == "Embedding":
        nn.init.trunc_normal_(module.weight, a=-3.0, b=3.0)
    elif type(module).__name__ == "RMSNorm":
        nn.init.ones_(module.weight)


def assert_as_made_as_usual(sharded, usual):
    assert_same(sharded.gather_full_params(), {name: value.detach() for name, value in usual.named_parameters()})
    assert_same(dict(sharded.module.named_buffers()), dict(usual.named_buffers()))


def layers():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))


@on_ranks(2, 3)
def test_module_made_on_the_meta_device_starts_as_one_made_as_usual():
    with torch.device("meta"):
        model, without_reset, tied = transformer(), Network(), layers()
    # Only rank 0's random numbers count.
    torch.manual_seed(7 + dist.get_rank())
    sharded = FSDP(model, initialize=initialize)
    loss_of(sharded, *map(share, batch(0, 30))).backward()
    sharded.finish_gradient_synchronization()
    assert_as_made_as_usual(sharded, transformer(seed=7))
    assert error_of(FSDP, without_reset) == (
        "UsageError",
        "Network is on the meta device and its class Network has no reset_parameters(): give FSDP a function to "
        "initialize it",
    )
    tied[2].requires_grad_(False)
    tied[3].weight = tied[0].weight
    torch.manual_seed(7)
    sharded = FSDP(tied)
    torch.manual_seed(7)
    usual = layers()
    usual[3].weight = usual[0].weight
    assert_as_made_as_usual(sharded, usual)
    assert [parameter.requires_grad for parameter in sharded.parameters()] == [True] * 4 + [False] * 2 + [True]
