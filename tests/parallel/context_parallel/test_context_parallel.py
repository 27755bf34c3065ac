"""Attention and training on slices of sequences equal those on whole sequences; what cannot be is refused."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from small_models import PlainBlocks, refusal_of, repeated_heads
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, RingAttention, SequenceSplit
from cs336sys.parallel.context_parallel.attention import merge_block
from cs336sys.parallel.ddp import BucketedDDP

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KINDS = ("ring", "all-to-all")


def whole_attention(query, key, value):
    return scaled_dot_product_attention(query, repeated_heads(key, query), repeated_heads(value, query), is_causal=True)


def attention_of(kind, length, blocks=None, communicates=True):
    split = SequenceSplit(length, dist.get_world_size(), is_zigzag=kind == "ring")
    context = ContextGroup(split, communicates=communicates)
    if kind == "ring":
        return RingAttention(context, blocks or PlainBlocks())
    return AllToAllAttention(context, whole_attention)


# How a (batch, heads, S, D) tensor lies in memory.
LAYOUTS = {
    "heads first": lambda tensor: tensor.contiguous(),
    "tokens first": lambda tensor: tensor.transpose(-3, -2).contiguous().transpose(-3, -2),
    "every other": lambda tensor: torch.stack((tensor, tensor.new_full((), 1e9).expand_as(tensor)), -1)[..., 0],
}


def difference(kind, length, dtype, heads, key_value_heads, layout, head_dim=8, blocks=None):
    """How far output and gradients are from those of the whole sequence, relative to the largest."""
    torch.manual_seed(length)
    device = group_device()
    shapes = [(2, heads, length, head_dim), *[(2, key_value_heads, length, head_dim)] * 2]
    whole = [torch.randn(shape, device=device).to(dtype).double().requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0], device=device).to(dtype)
    out = whole_attention(*whole)
    out.backward(gradient.double())
    attention = attention_of(kind, length, blocks)
    own = attention.context.positions(device)
    parts = [LAYOUTS[layout](tensor.detach()[:, :, own].to(dtype)).requires_grad_() for tensor in whole]
    part_out = attention(*parts)
    part_out.backward(LAYOUTS[layout](gradient[:, :, own]))
    pairs = [(part_out, out), *((part.grad, tensor.grad) for part, tensor in zip(parts, whole, strict=True))]
    assert all(part.dtype == dtype for part, _ in pairs)
    return max(((part - tensor[:, :, own]).abs().max() / tensor.abs().max()).item() for part, tensor in pairs)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_whole_sequence(kind):
    """Any length from a token a rank, grouped heads, every layout: to the last digits of float64."""
    world_size = dist.get_world_size()
    for length, layout in zip((world_size, 2 * world_size + 1, 37), LAYOUTS, strict=True):
        assert difference(kind, length, FP64, 2 * world_size, world_size, layout) < 1e-13


@on_ranks(4)
@pytest.mark.parametrize(("dtype", "bound"), [(BF16, 2e-2), (FP16, 2e-3), (FP32, 2e-6)])
def test_half_precision_is_merged_in_float32(dtype, bound):
    """Rounding of bf16 alone: 2^-9 of the output, a few times that of gradients."""
    assert difference("ring", 37, dtype, 4, 4, "tokens first") < bound


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


def assert_trains_as_one_process(kind, length, micro_batches, is_masked):
    """Masked, only the first two tokens have targets, which all ranks but the first lack."""
    device = group_device()
    batch = torch.randint(50, (4, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens, targets = batch[:, :-1], batch[:, 1:].clone()
    if is_masked:
        targets[:, 2:] = -100
    alone = Model(whole_attention, torch.arange(length, device=device)).to(device)
    expected = cross_entropy(alone(tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    attention = attention_of(kind, length)
    context, own = attention.context, attention.context.positions(device)
    wrapped = BucketedDDP(Model(attention, own).to(device), None)

    def loss_of(tokens, targets):
        logits, targets = wrapped(tokens[:, own]).flatten(0, 1), targets[:, own].flatten()
        if is_masked:
            return context.mean_loss(cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum())
        return context.loss_weight * cross_entropy(logits, targets)

    losses = torch.zeros(2, device=device)
    for number, part in enumerate(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)):
        with wrapped.no_sync() if number + 1 < micro_batches else nullcontext():
            loss = loss_of(*part) / micro_batches
            loss.backward()
        losses[0] += loss.detach()
    wrapped.finish_gradient_synchronization()
    with torch.no_grad():
        wrapped.eval()
        losses[1] = loss_of(tokens, targets)
    dist.all_reduce(losses)
    on_cpu = device.type == "cpu"
    assert (losses / dist.get_world_size()).tolist() == pytest.approx(
        [expected.item()] * 2, rel=1e-6 if on_cpu else 1e-5
    )
    rtol, atol = (1e-5, 1e-6) if on_cpu else (1e-4, 1e-5)
    for name, parameter in wrapped.module.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=rtol, atol=atol, msg=name)


@on_ranks(2, 3, 4, gpus=True)
@pytest.mark.parametrize("case", [(37, 1, False), (24, 2, False), (37, 2, True)])
def test_training_with_a_ring_has_loss_and_every_gradient_of_one_process(case):
    """Uneven slices, micro-batches under no_sync, and evaluation after it; a test of the engine has checkpoints."""
    assert_trains_as_one_process("ring", *case)


@on_ranks(2)
@pytest.mark.parametrize("numbers", [(0, 0), (-3, -3), (5, -3), (torch.tensor(0), torch.tensor(-1))])
def test_numbers_of_targets_that_no_batch_has_are_refused_on_every_rank(numbers):
    """The loss was infinite, or negative."""
    rank = dist.get_rank()
    context = ContextGroup(SequenceSplit(8, 2))
    rule = "choose at least 0 on each rank, and at least 1 on all 2 together"
    # Each rank reads the number of its own targets.
    with pytest.raises(UsageError, match=f"^mean_loss with {int(numbers[rank])} targets on rank {rank}: {rule}$"):
        context.mean_loss(torch.tensor(6.0), numbers[rank])
    assert context.mean_loss(torch.tensor(6.0), 3 * rank).item() == 4


@on_ranks(2, 4, gpus=True)
@pytest.mark.parametrize("case", [(37, 1, False), (40, 2, True)])
def test_training_all_to_all_has_loss_and_every_gradient_of_one_process(case):
    """Three ranks do not divide its heads."""
    assert_trains_as_one_process("all-to-all", *case)


@on_ranks(2)
def test_impossible_setting_is_refused_on_every_rank():
    def require_error(call, *args, **options):
        message = refusal_of(call, *args)
        for part in options["parts"]:
            assert part in message

    rank, ring = dist.get_rank(), attention_of("ring", 16)
    contiguous = ContextGroup(SequenceSplit(16, 2, is_zigzag=False))
    require_error(RingAttention, contiguous, PlainBlocks(), parts=["ring attention needs a zigzag split"])
    require_error(AllToAllAttention, ring.context, None, parts=["choose is_zigzag=False"])
    message = "a split over 3 ranks: the group has 2; choose as many"
    require_error(ContextGroup, SequenceSplit(16, 3), parts=[message])
    require_error(ContextGroup, SequenceSplit(16 + rank, 2), parts=["16 tokens zigzag", "17 tokens zigzag"])
    inputs = [torch.ones(1, 4, 8, 8, requires_grad=True) for _ in range(3)]
    message = "ring attention is differentiable once, so create_graph=True is refused"
    out = ring(*inputs).sum()
    require_error(lambda: torch.autograd.grad(out, inputs, create_graph=True), parts=[message])
    takes = "tokens: this rank holds 8 of 16; take the tokens of context.positions()"
    divide = "all-to-all attention: 2 ranks do not divide"
    for kind in KINDS:
        batches = [tensor.repeat(1 + rank, 1, 1, 1) for tensor in inputs]
        parts = [f"{kind} attention of torch.float32 ({size}, 4, S, 8)" for size in (1, 2)]
        require_error(attention_of(kind, 16), *batches, parts=parts)
        require_error(
            attention_of(kind, 16), *[tensor[..., :5, :] for tensor in inputs], parts=[f"{kind} attention of 5 {takes}"]
        )
    for heads, choice in ((3, "1 or 3 ranks"), (1, "1 rank")):
        fewer = [tensor[:, :heads] for tensor in inputs]
        message = f"{divide} {heads} head{'s' * (heads > 1)}; choose {choice}, or ring attention"
        require_error(attention_of("all-to-all", 16), *fewer, parts=[message])
    require_error(attention_of("all-to-all", 16), inputs[0], *fewer[1:], parts=[message])


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_without_communication_a_rank_computes_alone(kind):
    """On its own tensors: rank 1 does not take part."""
    attention = attention_of(kind, 37, communicates=False)
    parts = [torch.randn(1, 4, attention.context.length, 8, requires_grad=True) for _ in range(3)]
    if dist.get_rank() == 0:
        out = attention(*parts)
        out.sum().backward()
        assert [tuple(tensor.shape) for tensor in (out, *(part.grad for part in parts))] == [(1, 4, 19, 8)] * 4


@on_ranks(gpus=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_on_gpus_is_that_of_the_whole_sequence(layout):
    """Triton's and Hopper's kernels, an odd length, and grouped heads."""
    from cs336sys.training.ranks.tensor_strategies import KernelBlocks

    for length, key_value_heads, head_dim in ((2048, 8, 64), (2048, 8, 128), (1023, 8, 80), (515, 2, 64)):
        assert difference("ring", length, BF16, 8, key_value_heads, layout, head_dim, KernelBlocks()) < 2e-2


def test_queries_that_have_seen_no_key_yet_take_the_block_and_those_that_see_none_stay():
    """And two that have seen keys of large scores, whose exponentials overflow."""
    out, logsumexp = torch.zeros(5, 2), torch.tensor([-math.inf, -math.inf, 1.0, 900.0, 900.0])
    block_out = torch.ones(5, 2, dtype=torch.bfloat16)
    block_logsumexp = torch.tensor([2.0, -math.inf, -math.inf, 900.0, 990.0])
    merge_block(out, logsumexp, block_out, block_logsumexp)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [0.5, 0.5], [1, 1]]
    assert logsumexp.tolist() == [2.0, -math.inf, 1.0, pytest.approx(900 + math.log(2)), 990.0]
