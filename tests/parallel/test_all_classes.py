"""Rules for all parallel classes: what is refused alike, what is the same on all ranks, what can be copied."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
import torch.distributed as dist
from on_ranks import on_ranks
from small_models import error_of, refusal_of
from torch import nn

from cs336sys.commands.rank_training.communication import recorded_communication
from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def sharded(flat, with_module):
    def build(module):
        settings = {"lr": 0.1, "flat": flat, "module": module if with_module else None}
        return ShardedOptimizer(list(module.parameters()), torch.optim.AdamW, **settings)

    return build


DDP = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": lambda module: BucketedDDP(module, 1e-4),
}
CLASSES = DDP | {
    "fsdp": FSDP,
    "optimizer": sharded(False, False),
    "optimizer of a module": sharded(False, True),
    "flat optimizer": sharded(True, False),
    "flat optimizer of a module": sharded(True, True),
}
each_class = pytest.mark.parametrize("name", CLASSES)


class Extended(nn.Module):
    """A layer, and a parameter that it does not use."""

    def __init__(self, added):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.added = nn.Parameter(added, requires_grad=added.dtype == torch.float32)

    def forward(self, x):
        return self.layer(x) + self.added.to(x.dtype).sum()


class Chain(nn.Module):
    """A layer, and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def finish(wrapper):
    if hasattr(wrapper, "finish_gradient_synchronization"):
        wrapper.finish_gradient_synchronization()


SPARSE = "added is sparse, which cannot be sent to other ranks: make it dense by to_dense()"
META = "added is on the meta device and has no values: give it some, by to_empty() and a reset"


@on_ranks(2)
@each_class
def test_unusable_parameters_are_refused_by_every_class_in_the_same_words(name):
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    for module, sentence in (
        (lazy, "0.weight is lazy and has no shape yet: call the module once before wrapping it"),
        (Extended(torch.eye(4).to_sparse()), SPARSE),
        (Extended(torch.eye(4).to_sparse_csr()), SPARSE),
        (Extended(torch.ones(4, device="meta")), META),
    ):
        if (name, sentence) != ("fsdp", META):
            message = refusal_of(CLASSES[name], module)
            # Optimizers are given parameters without names.
            assert message.partition(" is ")[2] == sentence.partition(" is ")[2]
            assert message == sentence or "optimizer" in name


@each_class
def test_classes_need_a_process_group(name):
    with pytest.raises(UsageError, match="needs a process group"):
        CLASSES[name](nn.Linear(2, 2))


@on_ranks(2)
@pytest.mark.parametrize("name", ["bucketed", "fsdp"])
def test_unusable_parameters_are_refused_by_refresh(name):
    module = Chain()
    wrapped = CLASSES[name](module)
    module.added = nn.Parameter(torch.eye(4).to_sparse())
    assert error_of(wrapped.refresh) == ("UsageError", SPARSE)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@on_ranks(2)
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@pytest.mark.parametrize("flat", [False, True])
def test_copies_of_a_module_with_a_sharded_optimizer_do_not_wait_for_its_updates(make, flat):
    module, inputs = Chain(), torch.ones(2, 4) + dist.get_rank()
    optimizer = sharded(flat, True)(module)
    module = module if flat else NaiveDDP(module)

    def step():
        module(inputs).sum().backward()
        finish(module)
        optimizer.step()

    def is_arriving():
        return [bool(bucket._versions) for bucket in optimizer._partition.exchange._buckets]

    for _ in range(2):
        step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    copied = make(make(module))
    before = copied(inputs)
    assert torch.equal(before, module(inputs))
    step()
    arriving = is_arriving()
    assert any(arriving)
    copied(inputs).sum().backward()
    copied.state_dict()
    assert is_arriving() == arriving
    assert torch.equal(copied(inputs), before)
    for refused, name in ((optimizer, "a sharded optimizer"), (FSDP(Chain()), "an FSDP module")):
        assert error_of(make, refused)[1].startswith(f"{name} cannot be copied or pickled")


@on_ranks(2)
@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_optimizers_of_slices_that_are_not_elementwise_are_refused(name):
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    frozen, tied = module[0].requires_grad_(False).weight, nn.Linear(6, 6, bias=False)
    tied.weight = module[1].weight
    early, wrapped = torch.optim.SGD(module.parameters()), FSDP(module)
    torch.optim.SGD([{"params": frozen}, {"params": FSDP(tied).parameters()}]).step()  # Of other models.
    assert refusal_of(early.step).startswith("the optimizer was built before its parameters were cut, and would upd")
    wrapped(torch.ones(2, 6)).sum().backward()
    wrapped.finish_gradient_synchronization()
    optimizer = getattr(torch.optim, name)(wrapped.parameters(), lr=0.01)
    message = refusal_of(optimizer.step, *[lambda: 0.0] * (name == "LBFGS"))
    assert message.startswith(f"slices of FSDP or TensorParallel cannot be updated by {name}, wh")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn])
def test_fsdp_gathers_what_cannot_be_trained_and_names_a_tied_weight_once(dtype):
    torch.manual_seed(0)
    module, inputs = Extended(torch.arange(20).view(5, 4).to(dtype)), torch.ones(2, 4)
    module.tied = module.layer
    expected = module(inputs)
    wrapped = FSDP(module)
    output = wrapped(inputs)
    assert torch.equal(output, expected)
    output.sum().backward()
    wrapped.finish_gradient_synchronization()
    dtypes = {name: value.dtype for name, value in wrapped.gather_full_params().items()}
    assert dtypes == {"added": dtype, "layer.weight": torch.float32, "layer.bias": torch.float32}


def step_in(dtype, called, optimizer):
    output = called(torch.ones(2, 4, dtype=dtype))
    output.sum().backward()
    finish(called)
    optimizer.step()
    optimizer.zero_grad()
    assert output.dtype == dtype


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bucketed", "fsdp", "optimizer of a module", "flat optimizer of a module"])
def test_what_a_refusal_of_converted_parameters_advises_helps(dtype, name):
    module = Chain()
    wrapper = CLASSES[name](module)
    is_optimizer = "optimizer" in name
    called = module if is_optimizer else wrapper
    optimizer = wrapper if is_optimizer else torch.optim.SGD(wrapper.parameters(), lr=0.1)
    step_in(torch.float32, called, optimizer)
    module.to(dtype)
    message = refusal_of(step_in, dtype, called, optimizer)
    refreshed = error_of(wrapper.refresh)
    if is_optimizer:
        assert "converted" in message or "convert a module before" in message
        assert "build the optimizer" in message or "its optimizer is built" in message
        assert refreshed[0] == "UsageError"
        del wrapper, optimizer
        module.zero_grad()
        optimizer = CLASSES[name](module)
    else:
        change = f"first.weight was changed from torch.float32 to {dtype}"
        assert message == f"{change} after it was wrapped: call refresh() on every rank"
        assert refreshed is None
    step_in(dtype, called, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("name", [*DDP, "fsdp", "flat optimizer"])
def test_compiled_autograd_is_right_or_refused_in_the_same_words(name):
    """Where nothing is launched during the pass it is right."""
    inputs, module = torch.ones(2, 4) + dist.get_rank(), Chain()
    wrapper = CLASSES[name](module)
    called = module if "optimizer" in name else wrapper
    loss = called(inputs).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        error = error_of(loss.backward)
    wrapper.finish_gradient_synchronization()
    if name in ("naive", "flat"):
        assert error is None
        gradient = module.first.weight.grad
        wrapper.zero_grad()
        called(inputs).sum().backward()
        wrapper.finish_gradient_synchronization()
        assert torch.equal(module.first.weight.grad, gradient)
    else:
        kind, message = error
        assert kind == "UsageError"
        assert message.startswith("compiled autograd runs this backward pass, in which gradients cannot be averaged")


@on_ranks(2, 4)
@each_class
def test_a_step_sends_the_bytes_that_the_docs_give(name):
    """docs/sharded_optimizer.md and docs/fsdp.md; of broadcasts of unequal shares the mean over ranks."""
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    wrapper = CLASSES[name](module)
    called = module if "optimizer" in name else wrapper
    for _ in range(2):
        with recorded_communication() as communications:
            called(torch.ones(2, 64)).sum().backward()
            if called is module:
                wrapper.step()
                wrapper.wait_for_parameters()
            else:
                wrapper.finish_gradient_synchronization()
            wrapper.zero_grad()
    sent = sum(launch.sent_bytes for launch in communications if not launch.is_flags)
    last = 4 * 64 * 64
    if name in DDP or name.startswith("flat optimizer"):
        assert sent == 2 * share * 4 * last
    elif name == "fsdp":
        assert sent == share * (3 * 4 - 1) * last
    else:
        # Gradients are averaged by somebody else.
        assert sent == share * 4 * last
