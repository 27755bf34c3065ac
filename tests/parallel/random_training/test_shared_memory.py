"""What was once wrong without a word: each test failed before the code that it guards was written."""

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from on_ranks import on_ranks
from small_models import error_of
from torch import nn

from cs336sys.parallel import buckets
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

DDP = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "bucketed": lambda module, size=1e-4, **settings: BucketedDDP(module, size, **settings),
}
WRAPPERS = DDP | {"fsdp": FSDP}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


class Slow(torch.autograd.Function):
    """The identity; its backward pass takes a while, in which an all-reduce on another thread would be done."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)
        return gradient


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return x + self.weight.unsqueeze(0)


class EmbeddingWithPositions(nn.Module):
    """With one sequence the gradient of the positions is a view of what the backward pass goes on with."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.positions = Positions()

    def forward(self, tokens):
        return self.positions(Slow.apply(self.embedding(tokens)))


class SumOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x):
        return x @ (self.first.view(-1) + self.second.view(-1)).view(6, 6)


def inputs_of_ranks(*shape):
    return [torch.randn(*shape).double().to(group_device()) for _ in range(dist.get_world_size())]


def mean_gradients(module, inputs):
    """Of one process on all ranks' inputs."""
    loss = sum((module(x) ** 2).mean() for x in inputs) / len(inputs)
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def run_backward(wrapped, inputs):
    (wrapped(inputs[dist.get_rank()]) ** 2).mean().backward()


def error(value, expected):
    return (value - expected).abs().max().item() / expected.abs().max().item()


def largest_error(wrapped, expected):
    """Of gradients; of FSDP's, of this rank's rows."""
    if isinstance(wrapped, FSDP):
        rows = {name: sharded.rows for name, sharded in wrapped.sharded_parameters.items()}
        expected = {name: whole[rows[name].start : rows[name].stop] for name, whole in expected.items()}
    return max(error(parameter.grad, expected[name]) for name, parameter in wrapped.module.named_parameters())


@on_ranks(2, 3, gpus=True)
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "optimizer-flat"])
@pytest.mark.parametrize("kind", ["embedding", "sum of views"])
def test_gradients_that_share_memory_are_neither_averaged_nor_accumulated_in_it(kind, wrapper):
    torch.manual_seed(0)
    if kind == "embedding":
        module = EmbeddingWithPositions().double().to(group_device())
        inputs = [torch.randint(7, (1, 5)).to(group_device()) for _ in range(dist.get_world_size())]
    else:
        module, inputs = SumOfTwo().double().to(group_device()), inputs_of_ranks(4, 6)
    expected = mean_gradients(copy.deepcopy(module), inputs)
    if wrapper == "optimizer-flat":
        optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, flat=True, lr=1.0)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        run_backward(module, inputs)
        optimizer.step()
        for name, parameter in module.named_parameters():
            assert error(before[name] - parameter.detach(), expected[name]) < 1e-12
    else:
        wrapped = WRAPPERS[wrapper](module)
        for passes in (1, 2):
            wrapped.zero_grad()
            for number in range(passes):
                with contextlib.nullcontext() if number + 1 == passes else wrapped.no_sync():
                    run_backward(wrapped, inputs)
            wrapped.finish_gradient_synchronization()
            assert largest_error(wrapped, {name: passes * whole for name, whole in expected.items()}) < 1e-12


@on_ranks(2)
@each_wrapper
def test_no_gradient_of_a_transformer_is_copied_for_it(wrapper):
    wrapped = WRAPPERS[wrapper](BasicsTransformerLM(50, 8, 16, num_layers=2, num_heads=2, d_ff=32, rope_theta=1e4))
    owns_memory, owned = buckets.owns_memory, []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(buckets, "owns_memory", lambda gradient: owned.append(owns_memory(gradient)) or owned[-1])
        for _ in range(2):
            wrapped(torch.randint(50, (2, 8))).logsumexp(-1).mean().backward()
            wrapped.finish_gradient_synchronization()
            wrapped.zero_grad()
    assert all(owned)


class ScaledLinear(nn.Module):
    """A unit that the backward pass does not come through, and a trained scale after it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            x = self.linear(x)
        return x * self.scale


@on_ranks(2, gpus=True)
def test_fsdp_averages_replicated_gradients_whatever_the_backward_pass_went_through():
    """In two passes that add up."""
    torch.manual_seed(0)
    module, inputs = ScaledLinear().double().to(group_device()), inputs_of_ranks(3, 4)
    expected = 2 * mean_gradients(module, inputs)["scale"]
    sharded = FSDP(module)
    for _ in range(2):
        run_backward(sharded, inputs)
    sharded.finish_gradient_synchronization()
    assert error(module.scale.grad, expected) < 1e-12


class TwoLayersAsOne(torch.autograd.Function):
    """``x @ cat(first, second).T``; the gradients of both are the rows of one product, in bfloat16."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        return x @ torch.cat((first, second)).mT

    @staticmethod
    def backward(ctx, gradient):
        x, first, second = ctx.saved_tensors
        rows = (gradient.mT @ x).bfloat16()
        return None, *rows.split([len(first), len(second)])


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
        self.scale = nn.Parameter(torch.randn(5))
        self.first.grad_dtype = self.second.grad_dtype = torch.bfloat16

    def forward(self, x):
        return TwoLayersAsOne.apply(x, self.first, self.second) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("wrapper", DDP)
def test_gradients_in_the_dtype_they_are_sent_in_are_averaged_where_they_are(wrapper):
    torch.manual_seed(0)
    module, inputs = Pair(), [torch.randn(6, 4) for _ in range(dist.get_world_size())]
    sums = dict.fromkeys(dict(module.named_parameters()), 0.0)
    for x in inputs:
        alone = Pair()
        alone.load_state_dict(module.state_dict())
        (alone(x) ** 2).mean().backward()
        sums = {name: total + alone.get_parameter(name).grad.double() for name, total in sums.items()}
    size = {"size": 1.0} if wrapper == "bucketed" else {}
    wrapped = DDP[wrapper](module, gradient_dtype=torch.bfloat16, **size)
    run_backward(wrapped, inputs)
    wrapped.finish_gradient_synchronization()
    for name, total in sums.items():
        mean = total / len(inputs)
        assert (module.get_parameter(name).grad.double() - mean).abs().max() < 0.01 * total.abs().max()
    assert [weight.grad.dtype for weight in module.parameters()] == [torch.bfloat16, torch.bfloat16, torch.float32]
    blocks = {weight.grad.untyped_storage().data_ptr() for weight in (module.first, module.second)}
    # Flat buckets are one memory; otherwise only a bucket of both layers may leave its rows in theirs.
    assert (len(blocks) == 1) == (wrapper in ("flat", "bucketed"))


@on_ranks(2)
def test_gradients_in_a_wider_dtype_are_refused_on_every_rank():
    wider, wider_here = nn.Linear(2, 2), nn.Linear(2, 2)
    wider.weight.grad_dtype = torch.float64
    if dist.get_rank() == 1:
        wider_here.weight.grad_dtype = torch.float64
    settings = {"flat": True, "lr": 0.1}
    for refusal in (
        *(error_of(wrap, wider) for wrap in (NaiveDDP, FlatDDP, FSDP)),
        error_of(ShardedOptimizer, wider.named_parameters(), torch.optim.SGD, **settings),
    ):
        assert refusal[0] == "UsageError"
        assert refusal[1].startswith("weight is in torch.float32 and has grad_dtype torch.float64")
    assert "ranks differ" in error_of(BucketedDDP, wider_here, 1.0)[1]
