"""What the ranks of test_context_parallel run: functions that spawned processes can import."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from small_models import PlainBlocks, error_of, repeated_heads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, RingAttention, SequenceSplit
from cs336sys.parallel.ddp import BucketedDDP


def _plain(query, key, value):
    return scaled_dot_product_attention(query, repeated_heads(key, query), repeated_heads(value, query), is_causal=True)


def attention_of(kind, length, blocks=None, communicates=True, group=None):
    world_size = dist.get_world_size() if group is None else group.size()
    split = SequenceSplit(length, world_size, is_zigzag=kind == "ring")
    context = ContextGroup(split, group, communicates=communicates)
    if kind == "ring":
        return RingAttention(context, blocks or PlainBlocks())
    return AllToAllAttention(context, _plain)


# How a (batch, heads, S, D) tensor lies in memory.
LAYOUTS = {
    "heads first": lambda tensor: tensor.contiguous(),
    "tokens first": lambda tensor: tensor.transpose(-3, -2).contiguous().transpose(-3, -2),
    "every other": lambda tensor: torch.stack((tensor, tensor.new_full((), 1e9).expand_as(tensor)), -1)[..., 0],
}


def differences(cases):
    """For each case, how far output and gradients are from those of the whole sequence, relative to the largest."""
    return [_difference(*case) for case in cases]


def _difference(kind, length, dtype, heads, key_value_heads, layout, head_dim=8, blocks=None, group=None):
    torch.manual_seed(length)
    device = group_device()
    shapes = [(2, heads, length, head_dim), *[(2, key_value_heads, length, head_dim)] * 2]
    whole = [torch.randn(shape, device=device).to(dtype).double().requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0], device=device).to(dtype)
    out = _plain(*whole)
    out.backward(gradient.double())
    attention = attention_of(kind, length, blocks, group=group)
    own = attention.context.positions(device)
    parts = [LAYOUTS[layout](tensor.detach()[:, :, own].to(dtype)).requires_grad_() for tensor in whole]
    found = attention(*parts)
    found.backward(LAYOUTS[layout](gradient[:, :, own]))
    pairs = [(found, out), *((part.grad, tensor.grad) for part, tensor in zip(parts, whole, strict=True))]
    assert all(one.dtype == dtype for one, _ in pairs)
    return max(((one - all_[:, :, own]).abs().max() / all_.abs().max()).item() for one, all_ in pairs)


def differences_on_a_mesh():
    """Two groups of two ranks, each with sequences of its own length."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    length = 20 + 3 * mesh["data"].get_local_rank()
    return [
        _difference(kind, length, torch.float64, 4, 2, "tokens first", group=mesh["context"])
        for kind in ("ring", "all-to-all")
    ]


class Model(nn.Module):
    """Embedding, attention with learned positions, and a head: everything but attention looks at single tokens."""

    def __init__(self, attention, positions):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.place = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.ModuleList(nn.Linear(16, 48) for _ in range(2)), nn.Linear(16, 50)
        self.attention, self.positions = attention, positions

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place(self.positions)
        for qkv in self.qkv:
            parts = qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
            x = x + self.attention(*parts).transpose(-3, -2).flatten(-2)
        return self.head(x)


def _loss(model, tokens, targets):
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(kind, length, micro_batches, is_masked=False):
    """Loss and gradients of a model on slices of sequences, those of one process, and the loss without gradients.

    Args:
        is_masked: only the first two tokens have targets, which all ranks but the first lack.
    """
    device = group_device()
    batch = torch.randint(50, (4, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens, targets = batch[:, :-1], batch[:, 1:].clone()
    if is_masked:
        targets[:, 2:] = -100
    causal = lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True)  # noqa: E731
    alone = Model(causal, torch.arange(length, device=device)).to(device)
    expected = _loss(alone, tokens, targets)
    expected.backward()
    attention = attention_of(kind, length)
    context, own = attention.context, attention.context.positions(device)
    model = Model(attention, own).to(device)
    wrapped = BucketedDDP(model, None)

    def loss_of(tokens, targets):
        logits, targets = wrapped(tokens[:, own]).flatten(0, 1), targets[:, own].flatten()
        if is_masked:
            return context.mean_loss(cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum())
        return context.loss_weight * cross_entropy(logits, targets)

    total = torch.zeros((), device=device)
    for number, part in enumerate(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)):
        with wrapped.no_sync() if number + 1 < micro_batches else nullcontext():
            loss = loss_of(*part) / micro_batches
            loss.backward()
        total += loss.detach()
    wrapped.finish_gradient_synchronization()
    with torch.no_grad():
        wrapped.eval()
        evaluated = loss_of(tokens, targets)
    dist.all_reduce(losses := torch.stack((total, evaluated)))
    losses /= dist.get_world_size()
    gradients = {
        name: (parameter.grad.cpu(), other.grad.cpu())
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True)
    }
    return (*losses.tolist(), expected.item(), gradients)


def train_all(cases):
    return [train(*case) for case in cases]


def refusals():
    """What cannot be, on this rank."""
    ring = attention_of("ring", 16)
    wrong = torch.zeros(1, 4, 3, 8)
    odd = torch.zeros(1, 3, ring.context.length, 8)
    inputs = [torch.ones(1, 4, ring.context.length, 8, requires_grad=True) for _ in range(3)]
    short, one_head, wide = ([tensor[shape] for tensor in inputs] for shape in SHAPES)
    wide[:2] = inputs[:2]
    batches = [tensor.repeat(1 + dist.get_rank(), 1, 1, 1) for tensor in inputs]
    contiguous = ContextGroup(SequenceSplit(16, 2, is_zigzag=False))
    return [
        error_of(ring, wrong, wrong, wrong),
        error_of(attention_of("all-to-all", 16), odd, odd, odd),
        error_of(RingAttention, contiguous, PlainBlocks()),
        error_of(AllToAllAttention, ring.context, None),
        error_of(ContextGroup, SequenceSplit(16, 3)),
        error_of(ContextGroup, SequenceSplit(16 + dist.get_rank(), 2)),
        error_of(torch.autograd.grad, attention_of("ring", 16)(*inputs).sum(), inputs, create_graph=True),
        *(error_of(attention_of(kind, 16), *batches) for kind in KINDS),
        *(error_of(attention_of(kind, 16), *wide) for kind in KINDS),
        error_of(attention_of("all-to-all", 16), *short),
        error_of(attention_of("all-to-all", 16), *one_head),
        error_of(attention_of("all-to-all", 16), inputs[0], *one_head[1:]),
    ]


KINDS = ("ring", "all-to-all")

# Too few tokens, one head, and half the width.
SHAPES = ((..., slice(5), slice(None)), (slice(None), slice(1)), (..., slice(4)))


def without_communication():
    """The same computation on this rank's own tensors: the shapes of results, and whether anything was sent."""
    shapes = []
    for kind in ("ring", "all-to-all"):
        attention = attention_of(kind, 37, communicates=False)
        parts = [torch.randn(1, 4, attention.context.length, 8, requires_grad=True) for _ in range(3)]
        if dist.get_rank() == 0:
            # Rank 1 does not take part.
            out = attention(*parts)
            out.sum().backward()
            shapes.append([tuple(tensor.shape) for tensor in (out, *(part.grad for part in parts))])
    return shapes


def lost_peer(kind):
    """Rank 1 ends while the others wait for its keys."""
    attention = attention_of(kind, 16)
    parts = [torch.randn(1, 4, attention.context.length, 8) for _ in range(3)]
    if dist.get_rank() == 1:
        os._exit(3)
    attention(*parts)
