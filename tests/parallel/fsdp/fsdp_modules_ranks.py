"""What the ranks of test_fsdp_modules run: functions that spawned processes can import."""

import dataclasses

import torch
import torch.distributed as dist
from fsdp_models import batch, gathered_units, loss_of, network, on_cpu, transformer, whole_gradients
from small_models import error_of, share
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cs336sys.parallel.fsdp import FSDP


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


def compiled(when):
    """Graphs compiled for four blocks, and whole weights after training; in eager mode if ``when`` is None."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    model = transformer(layers=4)
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
