"""Models, batches and results that rank programs of several rooms share."""

import datetime
import resource

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.parallel import collectives


def weights(module):
    return on_cpu(module.state_dict())


def on_cpu(tensors):
    """Copies of tensors by name, or None."""
    return {name: None if tensor is None else tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def gradients(module):
    """Of its parameters, by name: of FSDP's, of this rank's slices and of replicated ones."""
    return on_cpu({name: parameter.grad for name, parameter in module.named_parameters()})


def mean_over_ranks(tensors):
    """Of each tensor and those of this name on other ranks; None if there is none."""
    of_ranks = collectives.gather_objects(on_cpu(tensors))
    return {
        name: None if first is None else sum(part[name] for part in of_ranks) / len(of_ranks)
        for name, first in of_ranks[0].items()
    }


class Network(nn.Module):
    """Odd sizes, tied weights, a frozen bias, a frozen parameter of its own and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 13)
        self.third = nn.Linear(13, 13, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(13, 5)
        self.last.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x):
        x = torch.tanh(self.second(self.norm(torch.relu(self.first(x)))))
        return self.last(torch.tanh(self.third(x))) * self.scale[0] + self.offset


def network(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return Network().to(dtype)


def batch(step, dtype=torch.float32):
    """12 rows, which 1 to 4 ranks share out, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(12, 7, generator=generator, dtype=dtype),
        torch.randn(12, 5, generator=generator, dtype=dtype),
    )


def share(rows):
    """This rank's part of a batch, where its model is."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()].to(collectives.group_device())


class Products(nn.Module):
    """The gradient of each parameter is a given tensor, so that sums are exact; shapes of 0 to 130 elements."""

    SHAPES = ((1,), (3, 1), (129,), (5, 26), (), (0, 3), (64,))

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in self.SHAPES])

    def forward(self, factors):
        return sum((part * factor).sum() for part, factor in zip(self.parts, factors, strict=True))


def factors(rank, largest=999):
    """Integers that 1 to 4 ranks divide."""
    generator = torch.Generator().manual_seed(rank)
    return [12.0 * torch.randint(-largest, largest, shape, generator=generator) for shape in Products.SHAPES]


class Branches(nn.Module):
    """Independent branches, evaluated in a given order: autograd finishes the gradients of the last one first."""

    def __init__(self, count=4):
        super().__init__()
        self.branches = nn.ParameterList([torch.ones(3) for _ in range(count)])

    def forward(self, order, factor):
        outputs = {index: self.branches[index] * factor * (index + 1) for index in order}
        return sum(outputs[index].sum() for index in order)


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, factor, sometimes):
        return (self.used * factor).sum() + ((self.sometimes * factor).sum() if sometimes else 0.0)


class Permuted(nn.Module):
    """Parameters that are not contiguous: transposed, channels last, and every other column of a larger tensor."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.transposed = nn.Parameter(torch.randn(64, 6).t())
        self.image = nn.Conv2d(2, 4, (4, 4)).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(6, 128)[:, ::2])

    def forward(self, x):
        image = self.image(x.expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        return (self.transposed.square() * x).sum() + image.square().sum() + (self.sliced * x).square().sum()


class Scale(nn.Module):
    """A layer whose weights were stored as their inverses in version 1."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 1 / state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(self, x):
        return x * self.weight


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return None


class PlainBlocks:
    """Blocks of attention in a few lines; heads of queries side by side share one of keys."""

    def forward(self, query, key, value, is_causal):
        scores, value = _scores(query, key, is_causal), repeated_heads(value, query)
        return (scores.softmax(-1) @ value.to(scores.dtype)).to(query.dtype), scores.logsumexp(-1)

    def backward(self, query, key, value, grad_out, logsumexp, delta, is_causal):
        scores = _scores(query, key, is_causal)
        weights, grad_out = (scores - logsumexp[..., None]).exp(), grad_out.to(scores.dtype)
        grad_value = weights.mT @ grad_out
        grad_scores = weights * (grad_out @ repeated_heads(value, query).to(scores.dtype).mT - delta[..., None])
        grad_scores = grad_scores * query.shape[-1] ** -0.5
        grad_query = grad_scores @ repeated_heads(key, query).to(scores.dtype)
        grad_key = grad_scores.mT @ query.to(scores.dtype)
        of_groups = [grad.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for grad in (grad_key, grad_value)]
        return grad_query.to(query.dtype), *of_groups


def repeated_heads(tensor, query):
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _scores(query, key, is_causal):
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ repeated_heads(key, query).to(wide).mT * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if is_causal else scores


def penalized_loss(model, inputs, targets):
    """A loss with a penalty on how steep the model is at its inputs: a backward pass through a backward pass."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return nn.functional.mse_loss(outputs, targets) + slopes.square().sum(1).mean()


def wait_at_most(seconds):
    """From here on this rank's collectives fail if others do not come within that time."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))


def error_of(call, *args, **kwargs):
    """(type, message) of what a call raises; None if it returns."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refusal_of(call, *args, **kwargs):
    """The message of the UsageError that a call raises."""
    kind, message = error_of(call, *args, **kwargs)
    assert kind == "UsageError", message
    return message


def with_file_limit(size, call, *args, **kwargs):
    """:func:`error_of`, where rank 0 cannot write files of more than ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        return error_of(call, *args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
