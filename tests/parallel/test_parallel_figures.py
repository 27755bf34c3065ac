"""What one rank plans, converts and refuses, written down in ``figures.txt`` (tests/written_figures.py).

Other tests train on several ranks; here is what each of them decides by itself.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import collections
import contextlib
import cProfile
import inspect
import os
import pstats
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from small_models import PlainBlocks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from written_figures import outcome, read_figures, rows_of, write_figures

from cs336sys.accounting.sharding.partition import SequenceSplit
from cs336sys.errors import CapabilityError
from cs336sys.parallel import (
    buckets,
    checkpoint_state,
    collectives,
    copy_engines,
    ddp,
    gradient_memory,
    gradient_slices,
    rank_consistency,
    wrapped_modules,
)
from cs336sys.parallel.context_parallel import AllToAllAttention, RingAttention
from cs336sys.parallel.context_parallel.group import ContextGroup
from cs336sys.parallel.fsdp import FSDP, gather_order
from cs336sys.parallel.fsdp.calls import cast_floating
from cs336sys.parallel.fsdp.parameter import plan_sharding
from cs336sys.parallel.fsdp.runner import tensors_in
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankIdentity, join_process_group
from cs336sys.parallel.safe_unpickle import require_plain
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.sharded_optimizer import checkpoint as states
from cs336sys.parallel.sharded_optimizer import groups as parameter_groups
from cs336sys.parallel.tensor_parallel import TensorParallel, layers, trial, weights
from cs336sys.parallel.tensor_parallel import checkpoint as tensor_checkpoint
from cs336sys.parallel.tensor_parallel.layers import COMPILE_OPTIONS, TensorGroup, vocabulary_parallel_cross_entropy
from cs336sys.parity.collectives import CollectiveWatcher

PATH = Path(__file__).with_name("figures.txt")
CPU = torch.device("cpu")
F16, F32, F64, I64 = torch.float16, torch.float32, torch.float64, torch.int64


def specs(*sizes, blocks=""):
    """Return tensors of these bytes, each in the block of its letter."""
    return [buckets.TensorSpec(number, size, block=blocks[number:][:1]) for number, size in enumerate(sizes)]


def on_each_rank(function, world_size=3):
    """Return what a function gives on each of some ranks."""
    results = []
    for rank in range(world_size):
        with fake_rank(rank, world_size):
            results.append(outcome(function))
    return results


def context(length, world_size, is_zigzag=True):
    """Return each rank's tokens, the weight of its loss, and its loss for a sum of 6 over 4 targets."""

    def describe():
        group = ContextGroup(SequenceSplit(length, world_size, is_zigzag), communicates=False)
        loss = group.mean_loss(torch.tensor(6.0), 4).item()
        return group.length, group.loss_weight, loss, group.positions().tolist()

    return on_each_rank(describe, world_size)


def fully_sharded(module, **settings):
    """Return the units, and by name each rank's rows of sharded parameters."""

    def describe():
        wrapped = FSDP(module(), **settings)
        sizes = {name: (tuple(cut.shard.shape), cut.slice_sizes) for name, cut in wrapped.sharded_parameters.items()}
        even = [name for name, cut in wrapped.sharded_parameters.items() if cut.divides_evenly]
        return [unit.name for unit in wrapped.units], sizes, even, list(wrapped.replicated_parameters)

    return on_each_rank(describe)


SHAPES = {"a": (3, 5), "b": (40,), "c": (2, 64), "d": (192,), "e": ()}


def sharded(shapes, world_size=3, optimizer_cls=torch.optim.AdamW, **settings):
    """Return what each rank updates, or the refusal."""
    named = parameters(**shapes)

    def describe():
        optimizer = ShardedOptimizer(named.items(), optimizer_cls, lr=0.5, **settings)
        return [tuple(tensor.shape) for tensor in optimizer.own_tensors], optimizer.updates_slices

    return on_each_rank(describe, world_size)


def loaded(state, **settings):
    """Return how rank 1 of two refuses the state of an optimizer, or None."""
    with fake_rank(1, 2):
        optimizer = ShardedOptimizer(parameters(a=(3, 5), b=(4,)).items(), torch.optim.AdamW, lr=0.5, **settings)
        return outcome(optimizer.load_state_dict, state)


def plain_state(shapes, **state):
    """Return the state of torch's AdamW over parameters of these shapes, with other entries."""
    members = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(members, lr=0.5)
    for member in members:
        member.grad = torch.ones_like(member)
    optimizer.step()
    whole = optimizer.state_dict()
    whole["state"][0] |= state
    return whole


def defaults(function):
    """Return the defaults of a function's arguments."""
    arguments = inspect.signature(function).parameters.values()
    return {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}


def closed(rule, filled_bytes, size=10, same_block=False):
    return rule.closes(filled_bytes, *specs(1, size, blocks="aa" if same_block else "ab"))


def parameters(**shapes):
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


@contextlib.contextmanager
def fake_rank(rank=1, world_size=4):
    """Within this, the process is a rank whose peers have what it has: sums are wrong, and gathers are copies."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bytes_sent(dtype, **shapes):
    """Return what a bucket of fp32 parameters sends."""
    with fake_rank():
        return buckets.GradientBucket(parameters(**shapes), dtype).sent_sizes


def dtypes(value):
    """Return the dtypes in a value in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: dtypes(part) for key, part in value.items()}
    return type(value)(map(dtypes, value)) if isinstance(value, list | tuple) else value


class ByRule(torch.optim.Optimizer):
    """Updates a parameter by a rule of its gradient, and keeps a state by another."""

    def __init__(self, params, update=lambda grad: grad, state=lambda grad: {}):
        super().__init__(params, {"update": update, "state": state})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["update"](parameter.grad)
                self.state[parameter].update(group["state"](parameter.grad))


def tried(cut="elements", **rules):
    """Return the keys of single numbers in the state of an optimizer, or its refusal."""
    result = outcome(gradient_slices.require_elementwise, ByRule, rules, CPU, {}, cut)
    return sorted(result) if isinstance(result, frozenset) else result


def believed(group_options=(), **attributes):
    """Return None where a class is accepted, or its refusal, each time that it is asked for."""
    kind = type("Somebodys", (ByRule,), attributes)
    optimizer = kind([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0].update(group_options)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return [outcome(gradient_slices.require_elementwise_step, optimizer, options, CPU) for _ in range(2)]


def plain(value):
    return outcome(require_plain, "extra", value)


def groups(module, optimizer, slices=()):
    """Return the parameters of each group by name, or the refusal."""
    entries = checkpoint_state.by_first_name({name: (p, None) for name, p in module.named_parameters()})
    named = outcome(checkpoint_state.named_groups, optimizer, entries, set(slices))
    return [group["params"] for group in named] if isinstance(named, list) else named


def with_state(optimizer, parameter, **state):
    optimizer.state[parameter] = state
    return optimizer


def same_groups(saved, current):
    saved, current = ([{"params": list(names)} for names in side.split()] for side in (saved, current))
    return outcome(checkpoint_state.require_same_groups, saved, lambda: current, Path("saved"))


class Layers(nn.Module):
    """Blocks in a list, a matrix outside of them, a tied one, and vectors."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.empty = nn.ParameterDict({"weight": torch.empty(4, 0)})
        if tied:
            self.head.weight = self.embed.weight


class Nested(nn.Module):
    """A layer that owns a matrix, with a child that owns one, and a list in a list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.scale = nn.Parameter(torch.zeros(()))
        self.inner = nn.Linear(2, 2)
        self.lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)])


def planned(module, choose=None):
    """Return each unit: its modules' number, parameters, and whether others are in it; then what is replicated."""
    plan = plan_sharding(module, None if choose is None else choose(module))
    rows = [
        (unit.name, len(unit.modules), [entry.names for entry in unit.sharded], unit.contains_units)
        for unit in plan.units
    ]
    return [*rows, [entry.names for entry in plan.replicated]]


def parts(**children):
    """Return a module that calls all of its parts."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def tied(module, *pairs):
    """Return a module in which the first parameter of each pair is the second."""
    for name, other in pairs:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(other))
    return module


def predicted(*steps, count=1):
    """Return for each use of a unit, in each step, what comes next and whether it is the same unit."""
    order, predictions = gather_order.GatherOrder(), []
    for uses in steps:
        order.begin()
        for unit in uses:
            order.use(unit)
            predictions.append(("".join(order.upcoming(count)), order.repeats()))
    return predictions


def memory(*parts):
    """Return which gradients own their memory, and which do together.

    Each is (FIRST, ELEMENTS) or (FIRST, ELEMENTS, STRIDE) of the same ten elements, or "alone".
    """
    storage = torch.zeros(10).untyped_storage()
    gradients = []
    for part in parts:
        first, elements, stride = (*part, 1)[:3] if part != "alone" else (0, 0, 1)
        shared = torch.empty(0).set_(storage, first, (elements,), (stride,))
        gradients.append(torch.zeros(3) if part == "alone" else shared)
    del storage, shared
    together = gradient_memory.own_memory_together(gradients)
    return [(gradient_memory.owns_memory(gradient), id(gradient) in together) for gradient in gradients]


def averageable(gradient, dtype=F32, shape=None):
    return outcome(gradient_memory.require_averageable, "w", gradient, dtype, shape)


def marked(**attributes):
    """Return a parameter whose hook has these marks."""
    parameter = nn.Parameter(torch.zeros(2))

    def hook(parameter):
        pass

    vars(hook).update(attributes)
    parameter.register_post_accumulate_grad_hook(hook)
    return parameter


GATHERING = type("Call", (), {"gathers_parameters": True})()


def wrapped(name, **attributes):
    """Return a network in which the child of this name looks like a wrapper."""
    network = nn.Sequential(collections.OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1)))
    part = network.get_submodule(name)
    for key, value in attributes.items():
        part.__dict__[key] = value
    return network


def sendable(*tensors, moves=False):
    named = [(f"w{number}", tensor) for number, tensor in enumerate(tensors)]
    with fake_rank():
        return outcome(rank_consistency.require_sendable, named, moves=moves)


def tried_copy(blocks, dtype):
    """Return which layers the copy for a trial has, and their dtypes, scales and range of vectors."""
    model = nn.Module()
    model.layers, model.head = nn.ModuleList(blocks), nn.Linear(400, 100)
    copied, numbers = trial._trial_of(model.to(dtype), None, CPU)
    scales = {name: round(weight.std().item(), 2) for name, weight in copied.named_parameters() if weight.dim() > 1}
    vectors = torch.cat([vector for vector in copied.parameters() if vector.dim() == 1])
    dtypes_there = {str(weight.dtype) for weight in copied.parameters()}
    return numbers, dtypes_there, scales, vectors.aminmax().min.item() >= 0.5, 1.4 < vectors.aminmax().max.item() <= 1.5


def through(group, name, create_graph=False):
    """Return the gradient of what enters or leaves a layer, whose sum weighs rows by 1, 2, ..."""
    x = torch.ones(4, 1, requires_grad=True)
    output = getattr(group, name)(x)
    weights_of_rows = torch.arange(1.0, len(output) + 1).view(-1, 1)
    (gradient,) = torch.autograd.grad((output**2 * weights_of_rows).sum(), x, create_graph=create_graph)
    return gradient.flatten().tolist()


def language_model(rows=(4, 4, 4), heads=2, inner=5, tokens=6):
    """Return a module with the names that tensor parallel ranks share: one block, and vectors of 4."""
    attention = nn.Module()
    attention.num_heads = heads
    for name, count in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True):
        attention.add_module(name, nn.Linear(4, count, bias=False))
    attention.output_proj = nn.Linear(rows[0], 4, bias=False)
    feedforward = {name: nn.Linear(4, inner, bias=False) for name in ("w1", "w3")}
    feedforward["w2"] = nn.Linear(inner, 4, bias=False)
    block = nn.ModuleDict({"attn": attention, "ffn": nn.ModuleDict(feedforward)})
    model = {"token_embeddings": nn.Embedding(tokens, 4), "layers": nn.ModuleList([block])}
    return nn.ModuleDict(model | {"ln_final": nn.RMSNorm(4), "lm_head": nn.Linear(4, tokens, bias=False)})


def sent_first(model):
    """Return the shapes that the first of two ranks sends, in this order, where it cuts a model with a buffer."""
    model.ln_final.register_buffer("seen", torch.zeros(7))
    sent = []
    with fake_rank(0, 2), patch.object(weights, "broadcast_from_first", lambda tensors, _: sent.extend(tensors)):
        weights.cut_weights(model, dist.group.WORLD, initialize=None, device=None)
    return [tuple(tensor.shape) for tensor in sent]


def refreshed(shape, world_size):
    """Return how FSDP takes up a parameter of this shape in place of one of (6, 4)."""
    with fake_rank(0, world_size):
        wrapped = FSDP(nn.Sequential(nn.Linear(4, 6)))
        wrapped.module[0].weight = nn.Parameter(torch.zeros(shape))
        return outcome(wrapped.refresh)


def clipped(norm_type, groups=(None,), dtype=F32, value=3.0, dtypes=(F32,), **settings):
    """Return the norm over four ranks that have equal slices, and the gradients that are left of 3, 1, and 4 of all."""
    slices, whole = (
        [nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(0))],
        [nn.Parameter(torch.zeros(1))],
    )
    slices[0].grad, slices[1].grad = torch.tensor([value, 1.0], dtype=dtype), torch.zeros(0)
    whole[0].grad = torch.tensor([4.0])
    with fake_rank():
        try:
            settings["dtypes"] = dtypes
            norm = outcome(gradient_slices.clip_over_ranks, slices, whole, 2.0, norm_type, groups, **settings)
        except RuntimeError as error:
            norm = str(error)
    left = [round(number, 5) for tensor in (slices[0], whole[0]) for number in tensor.grad.tolist()]
    return (str(norm.dtype), round(norm.item(), 5), left) if isinstance(norm, torch.Tensor) else (norm, left)


def sent(function):
    """Return kind, elements and dtype of each collective of a function, then its refusal."""
    watcher, dtypes = CollectiveWatcher([], is_late=False), {"float32": "", "uint8": "B", "int64": "I"}
    with watcher:
        refusal = outcome(function)
    rows = []
    for launched in watcher.launches:
        kind = launched.name.strip("_").partition("_")[0]  # What follows depends on the version of torch.
        rows.append(f"{kind} {launched.elements}{dtypes.get(launched.dtype, launched.dtype)}")
    return [*rows, refusal] if isinstance(refusal, str) else rows


def ring(length):
    """Train twice on this rank's slice of a sequence."""
    context = ContextGroup(SequenceSplit(length, dist.get_world_size()))
    parts = [torch.ones(1, 1, context.length, 2, requires_grad=True) for _ in range(3)]
    attention = RingAttention(context, PlainBlocks())
    for _ in range(2):
        attention(*parts).sum().backward()


def sent_in(program, wrap):
    """Return what rank 1 of 3 sends in each call of a program, and which units of FSDP are gathered after it."""
    outputs, rows = [], []

    def forward():
        outputs.append(run(torch.ones(1, 4)))

    def backward():
        outputs.pop().sum().backward()

    def accumulate():
        with wrapped.no_sync():
            forward()
            backward()

    def evaluate():
        with torch.no_grad():
            run(torch.ones(1, 4))

    module = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), *map(nn.Linear, (6, 5, 7), (5, 7, 2)))
    with fake_rank(1, 3):
        wrapped = wrap(module)
        run = module if isinstance(wrapped, ShardedOptimizer) else wrapped
        optimizer = wrapped if run is module else torch.optim.SGD(wrapped.parameters(), 0.1)
        named = {call.__name__: call for call in (forward, backward, accumulate, evaluate)}
        named["part"] = lambda: module[2](torch.ones(1, 6))
        for name in program.split():
            call = named.get(name) or getattr(wrapped, name, None) or getattr(optimizer, name)
            rows.append((name, *sent(call), "".join(".#"[unit.is_gathered] for unit in getattr(wrapped, "units", ()))))
    return rows


def lists(state):
    """Return a state with numbers in place of tensors."""
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def grouped(*tensors, flat):
    """Return how a sharded optimizer refuses these parameters, or None."""
    members = [
        tensor if tensor.requires_grad else nn.Parameter(tensor, tensor.is_floating_point()) for tensor in tensors
    ]
    with fake_rank():
        return outcome(parameter_groups.check_parameters, [{"params": members}], flat=flat)


def patched(module, function, **attributes):
    """Return what a function gives, or its refusal, where these functions of a module are others."""
    with patch.multiple(module, **attributes):
        try:
            return outcome(function)
        except CapabilityError as error:
            return str(error)


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_figures_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


@pytest.mark.parametrize(
    ("function", "build"),
    [
        *(
            (lambda sizes, cap=cap: buckets.assign_buckets(sizes, cap), lambda count: specs(*[10] * count))
            for cap in (100, 1e9)
        ),
        (plan_sharding, lambda count: nn.ModuleList(nn.Linear(2, 2) for _ in range(count))),
    ],
)
def test_calls_grow_with_the_tensors(function, build):
    few, many = cProfile.Profile(), cProfile.Profile()
    few.runcall(function, build(60))
    many.runcall(function, build(240))
    assert pstats.Stats(many).total_calls < 5 * pstats.Stats(few).total_calls


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_every_tensor_is_in_one_bucket_and_no_bucket_could_take_the_next_tensor(tier, sizes, cap):
    assigned = buckets.assign_buckets(specs(*sizes), cap)
    assert [index for bucket in assigned for index in bucket] == list(reversed(range(len(sizes))))
    filled = [sum(sizes[index] for index in bucket) for bucket in assigned]
    assert all(size <= cap or len(bucket) == 1 for size, bucket in zip(filled, assigned, strict=True))
    assert all(size + sizes[after[0]] > cap for size, after in zip(filled, assigned[1:], strict=False))


def test_ranks_on_gpus_end_soon_after_a_timeout(monkeypatch):
    """By what NCCL reads of the environment, unless the user has set it."""
    started, names = {}, ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_RUNTIME_CONNECT")
    for name in names:
        monkeypatch.setenv(name, "7")
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[1], "1")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **settings: started.update(settings))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.update(device=device))
    join_process_group(RankIdentity(1, 2, 1), "nccl", dist.HashStore(), 9.0)
    assert started["device"] == started["device_id"] == torch.device("cuda", 1)
    assert (started["rank"], started["world_size"], started["timeout"].total_seconds()) == (1, 2, 9)
    assert [os.environ[name] for name in names] == ["250", "1", "0"]
    monkeypatch.delenv(names[1])
    join_process_group(RankIdentity(1, 2, 1), "nccl", dist.HashStore(), 9.0)
    assert os.environ[names[1]] == "0"


if __name__ == "__main__":
    write_figures(PATH, globals())
