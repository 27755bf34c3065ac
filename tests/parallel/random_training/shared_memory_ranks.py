"""Gradients that share memory, passes without a sharded unit, buffers that look alike, modules wrapped twice."""

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "bucketed": lambda module: BucketedDDP(module, 1e-4),
    "fsdp": FSDP,
}


class Slow(torch.autograd.Function):
    """The identity; its backward pass takes a while, in which an all-reduce on another thread would be done."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(0.05)
        return gradient


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.unsqueeze(0)


class EmbeddingWithPositions(nn.Module):
    """With one sequence the gradient of the positions is a view of what the backward pass goes on with."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.positions = Positions()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.positions(Slow.apply(self.embedding(tokens)))


class SumOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.first.view(-1) + self.second.view(-1)).view(6, 6)


def _mean_gradients(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Of one process on all ranks' inputs."""
    loss = sum((module(one) ** 2).mean() for one in inputs) / len(inputs)
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def shared_memory(kind: str, wrapper: str, device: str = "cpu") -> dict[str, float]:
    """How far each gradient is off the mean."""
    torch.manual_seed(0)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if kind == "embedding":
        module = EmbeddingWithPositions().double().to(device)
        inputs = [torch.randint(7, (1, 5)).to(device) for _ in range(world_size)]
    else:
        module = SumOfTwo().double().to(device)
        inputs = [torch.randn(4, 6).double().to(device) for _ in range(world_size)]
    expected = _mean_gradients(copy.deepcopy(module), inputs)
    if wrapper == "optimizer-flat":
        optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, flat=True, lr=1.0)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        (module(inputs[rank]) ** 2).mean().backward()
        optimizer.step()
        found = {name: before[name] - parameter.detach() for name, parameter in module.named_parameters()}
        return {name: _error(found[name], whole) for name, whole in expected.items()}
    wrapped = WRAPPERS[wrapper](module)
    (wrapped(inputs[rank]) ** 2).mean().backward()
    wrapped.finish_gradient_synchronization()
    return _errors(wrapped, expected)


def _errors(wrapped: nn.Module, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each gradient is off the expected one; of FSDP's, this rank's rows."""
    if isinstance(wrapped, FSDP):
        rows = {name: sharded.rows for name, sharded in wrapped.sharded_parameters.items()}
        expected = {name: whole[rows[name].start : rows[name].stop] for name, whole in expected.items()}
    return {name: _error(parameter.grad, expected[name]) for name, parameter in wrapped.module.named_parameters()}


def divided_in_shared_memory() -> dict[str, float]:
    """How far FSDP's fp16 gradients, which each rank divides before Gloo sums them, are off the mean."""
    torch.manual_seed(0)
    module = SumOfTwo()
    inputs = [torch.randn(4, 6) for _ in range(dist.get_world_size())]
    expected = _mean_gradients(copy.deepcopy(module), inputs)
    wrapped = FSDP(module.half())
    (wrapped(inputs[dist.get_rank()].half()) ** 2).mean().backward()
    wrapped.finish_gradient_synchronization()
    return _errors(wrapped, expected)


def accumulated_in_shared_memory(wrapper: str) -> dict[str, float]:
    """How far each gradient is off the mean after two passes, the first without synchronization."""
    torch.manual_seed(0)
    module = SumOfTwo().double()
    inputs = [torch.randn(4, 6).double() for _ in range(dist.get_world_size())]
    expected = _mean_gradients(copy.deepcopy(module), inputs)
    wrapped = WRAPPERS[wrapper](module)
    own = inputs[dist.get_rank()]
    with wrapped.no_sync():
        (wrapped(own) ** 2).mean().backward()
    (wrapped(own) ** 2).mean().backward()
    wrapped.finish_gradient_synchronization()
    return _errors(wrapped, {name: 2 * whole for name, whole in expected.items()})


def _error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item() / expected.abs().max().item()


def copies_of_a_transformer(wrapper: str) -> int:
    """How many gradients of a Transformer's step are copied because their memory has other users."""
    from cs336_basics.model import BasicsTransformerLM

    from cs336sys.parallel import buckets

    module = BasicsTransformerLM(
        vocab_size=50, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32, rope_theta=1e4
    )
    shared = []
    owns_memory = buckets.owns_memory

    def noted(gradient: Tensor) -> bool:
        owns = owns_memory(gradient)
        shared.extend([] if owns else [gradient.shape])
        return owns

    buckets.owns_memory = noted
    try:
        wrapped = WRAPPERS[wrapper](module)
        for _ in range(2):
            wrapped(torch.randint(50, (2, 8))).logsumexp(-1).mean().backward()
            wrapped.finish_gradient_synchronization()
            wrapped.zero_grad()
    finally:
        buckets.owns_memory = owns_memory
    return len(shared)


class ScaledLinear(nn.Module):
    """A unit that the backward pass does not come through, and a trained scale after it."""

    def __init__(self, how: str):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self._gradients = how == "frozen unit"
        self.linear.requires_grad_(how != "frozen unit")

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._gradients):
            x = self.linear(x)
        return x * self.scale


class VectorsAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def without_a_unit_in_the_backward_pass(how: str, device: str = "cpu") -> float:
    """How far replicated gradients are off the mean over ranks, after two passes that add up."""
    torch.manual_seed(0)
    module = (VectorsAlone() if how == "vectors alone" else ScaledLinear(how)).double().to(device)
    inputs = [torch.randn(3, 4).double().to(device) for _ in range(dist.get_world_size())]
    plain = copy.deepcopy(module)
    (sum(2 * (plain(one) ** 2).mean() for one in inputs) / len(inputs)).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    sharded = FSDP(module)
    for _ in range(2):
        (sharded(inputs[dist.get_rank()]) ** 2).mean().backward()
    sharded.finish_gradient_synchronization()
    replicated = sharded.replicated_parameters
    return max(_error(parameter.grad, expected[name]) for name, parameter in replicated.items() if name in expected)


def on_gpus(kinds: list[str], hows: list[str]) -> dict[str, float]:
    """The worst of :func:`shared_memory` and :func:`without_a_unit_in_the_backward_pass`, by case, on this GPU."""
    found = {}
    for wrapper in [*WRAPPERS, "optimizer-flat"]:
        for kind in kinds:
            found[f"{kind}, {wrapper}"] = max(shared_memory(kind, wrapper, "cuda").values())
    return found | {how: without_a_unit_in_the_backward_pass(how, "cuda") for how in hows}


def frozen_after_training() -> bool:
    """Whether a layer that was frozen while gradients were set to zero, not dropped, keeps its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[0].requires_grad_(False)
    wrapped = FlatDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 8)
    for step in range(3):
        if step == 1:
            # The last layer's gradient stays where it is; that of the middle one lay where now the first one's would.
            model[0].requires_grad_(True)
            model[1].requires_grad_(False)
            wrapped.refresh()
            before = model[1].weight.detach().clone()
        wrapped(x).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return torch.equal(model[1].weight, before)


class Joined(nn.Module):
    """The gradient of ``first`` begins a tensor of just the flat bucket's size, which holds that of ``late``, too."""

    def __init__(self):
        super().__init__()
        self.late, self.between, self.first = (nn.Parameter(torch.randn(64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        late = Slow.apply(self.late)
        between = self.between * 2
        joined = torch.cat((self.first, late, torch.ones_like(late)))
        return x * joined + torch.cat((between, between, between)) ** 2


def slices_of_one_gradient() -> float:
    torch.manual_seed(0)
    module = Joined().double()
    inputs = [torch.randn(3, 192).double() for _ in range(dist.get_world_size())]
    expected = _mean_gradients(copy.deepcopy(module), inputs)
    wrapped = FlatDDP(module)
    (wrapped(inputs[dist.get_rank()]) ** 2).mean().backward()
    wrapped.finish_gradient_synchronization()
    return max(_error(parameter.grad, expected[name]) for name, parameter in module.named_parameters())


class TwoLayersAsOne(torch.autograd.Function):
    """``x @ cat(first, second).T``; the gradients of both are the rows of one product, in bfloat16."""

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return x @ torch.cat((first, second)).mT

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        x, first, second = ctx.saved_tensors
        rows = (gradient.mT @ x).bfloat16()
        return None, *rows.split([len(first), len(second)])


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return TwoLayersAsOne.apply(x, self.first, self.second) * self.scale


def rows_of_one_half_gradient(wrapper: str) -> dict[str, Any]:
    """Gradients in the dtype that they are sent in: how far off, which dtypes, and whether in one memory."""
    torch.manual_seed(0)
    module = Pair()
    inputs = [torch.randn(6, 4) for _ in range(dist.get_world_size())]
    for weight in (module.first, module.second):
        weight.grad_dtype = torch.bfloat16
    alone = []
    for x in inputs:
        other = Pair()
        other.load_state_dict(module.state_dict())
        other.first.grad_dtype = other.second.grad_dtype = torch.bfloat16
        (other(x) ** 2).mean().backward()
        alone.append({name: one.grad.double() for name, one in other.named_parameters()})
    wrap = {
        "naive": NaiveDDP,
        "flat": FlatDDP,
        "overlap": OverlappedDDP,
        "bucketed": lambda module, **settings: BucketedDDP(module, 1.0, **settings),
    }[wrapper]
    wrapped = wrap(module, gradient_dtype=torch.bfloat16)
    (wrapped(inputs[dist.get_rank()]) ** 2).mean().backward()
    wrapped.finish_gradient_synchronization()
    return {
        "off": max(
            float((one.grad.double() - sum(own[name] for own in alone) / len(alone)).abs().max())
            / float(sum(own[name] for own in alone).abs().max())
            for name, one in module.named_parameters()
        ),
        "dtypes": [one.grad.dtype for one in module.parameters()],
        "one memory": module.first.grad.untyped_storage().data_ptr() == module.second.grad.untyped_storage().data_ptr(),
    }


def refusals() -> dict[str, str]:
    """What is said to each module that cannot be wrapped right."""
    kept = nn.Linear(2, 2)
    wrapper = OverlappedDDP(kept)
    wider, wider_here = nn.Linear(2, 2), nn.Linear(2, 2)
    wider.weight.grad_dtype = torch.float64
    if dist.get_rank() == 1:
        wider_here.weight.grad_dtype = torch.float64
    freed = nn.Linear(2, 2)
    BucketedDDP(freed, 1.0)
    attempts = {
        "nested": lambda: OverlappedDDP(nn.Sequential(BucketedDDP(nn.Linear(2, 2), 1.0))),
        "an old wrapper alive": lambda: BucketedDDP(kept, 1.0),
        "an old wrapper gone": lambda: BucketedDDP(freed, 1.0),
        "over FSDP": lambda: NaiveDDP(FSDP(nn.Linear(2, 2))),
        "inside of FSDP": lambda: NaiveDDP(FSDP(nn.Sequential(nn.Linear(2, 2))).module),
        "grad_dtype, naive": lambda: NaiveDDP(wider),
        "grad_dtype, flat": lambda: FlatDDP(wider),
        "grad_dtype, fsdp": lambda: FSDP(wider),
        "grad_dtype, optimizer": lambda: ShardedOptimizer(wider.named_parameters(), torch.optim.SGD, flat=True, lr=0.1),
        "grad_dtype, one rank": lambda: BucketedDDP(wider_here, 1.0),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except UsageError as error:
            said[name] = str(error)
    del wrapper
    return said
