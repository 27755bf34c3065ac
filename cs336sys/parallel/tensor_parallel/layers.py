"""The layers of a model that tensor parallel ranks share: what each does besides what it did alone.

A layer becomes an instance of a class made from its own, whose ``forward`` sends and receives around that of the
original. One such class serves all layers of a kind: code that ``torch.compile`` has compiled for one block serves all.
Ranks communicate by two autograd functions, each its own transpose, which launch torch's functional collectives: these
``torch.compile`` puts into its graphs.

Sources: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3, the functions f and g; sequence parallelism
(https://arxiv.org/abs/2205.05198), section 4.2.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import own_part
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import is_readable, is_stream_captured
from cs336sys.parallel.rank_consistency import require_same_lines

# For ``block.compile(options=...)``: gradients of a layer's input are all-reduced as soon as they are there, and waited
# for when they are needed, so that the products for the gradients of weights run meanwhile.
COMPILE_OPTIONS: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share every layer.

    Attributes:
        name: of their process group; an empty one sends nothing (see :class:`.wrapper.TensorParallel`).
        rank, size: of this rank among them, and how many they are.
        sequence_parallel: whether a rank holds the residual stream of its slice of the sequence alone.
    """

    name: str
    rank: int
    size: int
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of each rank's part of a layer, (..., S, d); ``x`` may be a slice, (..., S / size, d).

        Under autocast it is cast here, so that it and its gradient are sent in the precision in which layers compute.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.sequence_parallel:
            return _SequenceSlices.apply(x, self.name, self.size, self.rank, True)  # gathers=True
        return _Sum.apply(x, self.name, False)  # sums_output=False

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' partial outputs of a layer: (..., S, d), or this rank's (..., S / size, d)."""
        if self.sequence_parallel:
            return _SequenceSlices.apply(x, self.name, self.size, self.rank, False)  # gathers=False
        return _Sum.apply(x, self.name, True)  # sums_output=True


class _Sum(torch.autograd.Function):
    """All-reduces the output and hands the gradient on, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, sums_output: bool) -> Tensor:
        ctx.group, ctx.sums_output = group, sums_output
        return all_reduced(x, "sum", group) if sums_output else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad)
        return grad if ctx.sums_output else all_reduced(grad, "sum", ctx.group), None, None


class _SequenceSlices(torch.autograd.Function):
    """All-gathers along the sequence and reduce-scatters the gradient along it, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int, gathers: bool) -> Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.gathers = group, size, rank, gathers
        return _gathered(x, group, size) if gathers else _scattered(x, group, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad)
        group, size, rank = ctx.group, ctx.size, ctx.rank
        return _scattered(grad, group, size, rank) if ctx.gathers else _gathered(grad, group, size), *[None] * 4


def refuse_graph(grad: Tensor) -> None:
    """Refuse a backward pass with ``create_graph=True``. Every backward function of this folder calls it.

    What ranks send each other is in no graph: differentiated again, gradients would lack the other ranks' terms.
    """
    # Compiled code refuses by itself.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and grad.requires_grad:
        raise UsageError(
            "tensor parallel layers are differentiated once: what ranks send in the backward pass is in no graph; take "
            "gradients without create_graph=True"
        )


def all_reduced(x: Tensor, operation: str, group: str) -> Tensor:
    """Return ``x`` reduced over the group by ``sum`` or ``max``, in new memory; without a name, a view of ``x``."""
    if not group:
        return x.view_as(x)  # A function of autograd may not return its input.
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))


def _gathered(x: Tensor, group: str, size: int) -> Tensor:
    """Join every rank's slice of the sequence, in rank order: (..., S / size, d) -> (..., S, d)."""
    # Without communication, copies of this rank's slice take the places of all others.
    if not group:
        return torch.cat([x] * size, -2)
    functional = torch.ops._c10d_functional
    stacked = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group))
    # Ranks one after another along the first dimension, of size B: (size * B, ..., S / size, d).
    return stacked.unflatten(0, (size, -1)).movedim(0, -3).flatten(-3, -2)


def _scattered(x: Tensor, group: str, size: int, rank: int) -> Tensor:
    """Return this rank's slice of the sequence, summed over ranks: (..., S, d) -> (..., S / size, d)."""
    slices = x.unflatten(-2, (size, -1))
    if not group:
        return slices.select(-3, rank).contiguous()
    functional = torch.ops._c10d_functional
    stacked = slices.movedim(-3, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(functional.reduce_scatter_tensor(stacked, "sum", size, group))


class _Shared(nn.Module):
    """A layer that ranks share, before the class that it had, with attributes that :func:`share_layers` sets.

    Attributes:
        first_row, vocabulary: of the embedding: the token of its first row, and how many tokens all ranks have.
        first_calls: of the embedding: compares the first tokens and targets between ranks.
        caller: of the head: the outermost method of the model that is running, if any.
    """

    tensor_group: TensorGroup
    first_row: int
    vocabulary: int
    first_calls: "FirstCalls"
    caller: str | None = None


class FirstCalls:
    """Compares between ranks, in the first training and the first evaluating pass, what must be the same on each.

    ``group`` is the name of the process group; an empty one compares nothing.
    """

    def __init__(self, group: str):
        self._group: Any = group
        self._compared: set[tuple[str, bool]] = set()
        # The state of the random number generators, as a digest, at the last comparison.
        self._generators: str | None = None

    def compare(self, kind: str, token_ids: Tensor, is_training: bool) -> None:
        """Compare token ids, and where their ``kind`` is ``targets``, not ``tokens``, the random numbers of the pass.

        Raises:
            UsageError: on every rank: they differ.
        """
        # The CPU reads digests: compiled code would break there, and in a captured stream it cannot.
        is_settled = not self._group or torch.compiler.is_compiling() or (kind, is_training) in self._compared
        if is_settled or is_stream_captured():
            return
        self._compared.add((kind, is_training))
        lines = [f"{kind} {tuple(token_ids.shape)} of digest {_digest(token_ids)}"]
        before = self._generators  # Where these are targets: of the tokens of this pass.
        states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(token_ids.device)] if token_ids.is_cuda else [])
        self._generators = after = _digest(torch.cat(states))
        # Only a pass that draws random numbers needs the same state on every rank.
        if kind == "targets" and before is not None and before != after:
            lines.append(f"random numbers from generator state {before} to {after} (seed all ranks alike)")
        require_same_lines(lines, dist.distributed_c10d._resolve_process_group(self._group))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]  # Errors quote it.


def as_int64(token_ids: Tensor, kind: str) -> Tensor:
    """Return token ids in int64: in narrower integers, subtracting this rank's first token could overflow.

    Raises:
        UsageError: they are no integers.
    """
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise UsageError(f"{kind} are {token_ids.dtype}: choose token ids, int64")
    return token_ids.long()


class TensorParallelPart(_Shared):
    """Attention or a feed-forward network: every rank computes a term of the sum."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.tensor_group.leave(super().forward(self.tensor_group.enter(x), *args, **kwargs))


class TensorParallelEmbedding(_Shared):
    """The embedding: a rank looks up its tokens, has zeros for all others, and ranks sum."""

    weight: Tensor

    def forward(self, token_ids: Tensor) -> Tensor:
        token_ids = as_int64(token_ids, "tokens")
        self.first_calls.compare("tokens", token_ids, self.training)
        row = token_ids - self.first_row
        is_elsewhere = (row < 0) | (row >= self.weight.size(0))
        # An id outside of the vocabulary gets a row that does not exist, so that the original refuses it.
        is_invalid = (token_ids < 0) | (token_ids >= self.vocabulary)
        row = row.masked_fill(is_elsewhere, 0).masked_fill(is_invalid, self.weight.size(0))
        return self.tensor_group.leave(super().forward(row).masked_fill(is_elsewhere.unsqueeze(-1), 0))


class TensorParallelHead(_Shared):
    """The LM head: a rank returns the logits of its part of the vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        if self.caller not in (None, "forward"):  # A method of the model that calls forward().
            raise UsageError(
                f"{self.caller}() of the module would take the logits of this rank's tokens for those of all: "
                "choose tokens by shared.gather_logits(shared(token_ids)), called on every rank"
            )
        return super().forward(self.tensor_group.enter(x))


@functools.cache
def _shared_class(shared: type[_Shared], original: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a layer that ranks share; blocks have one, so that compiled code serves all of them."""
    return type(shared.__name__, (shared, original), {})


@functools.cache
def _make_model_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make the class of the model, which tells its head what method was called, so that this refuses ``generate()``."""

    def with_caller_told(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            head, outermost_caller = self.lm_head, self.lm_head.caller
            head.caller = outermost_caller or name  # generate(), and not the forward() that it calls.
            try:
                return method(self, *args, **kwargs)
            finally:
                head.caller = outermost_caller

        return call

    # forward(), and the methods that the model adds to those of nn.Module.
    methods = {
        name: with_caller_told(name, method)
        for name, method in inspect.getmembers_static(original, inspect.isfunction)
        if name == "forward" or not hasattr(nn.Module, name)
    }
    return type("TensorParallelModel", (original,), methods)


def shared_layers(model: Any) -> dict[str, Any]:
    """Return the layers that ranks share, by their names, in the order of calls."""
    layers = {"token_embeddings": model.token_embeddings}
    for number, block in enumerate(model.layers):
        layers |= {f"layers.{number}.attn": block.attn, f"layers.{number}.ffn": block.ffn}
    return layers | {"lm_head": model.lm_head}


def share_layers(model: Any, group: TensorGroup, shapes: Mapping[str, torch.Size]) -> None:
    """Let the layers of a ``cs336_basics`` model, whose weights are cut already, compute together with other ranks.

    Args:
        shapes: of the whole parameters, by their names.
    """
    classes = {"token_embeddings": TensorParallelEmbedding, "lm_head": TensorParallelHead}
    # Each layer once, although a module may be a part of several blocks.
    for layer, name in {layer: name for name, layer in shared_layers(model).items()}.items():
        original: Any = type(layer)
        layer.__class__ = _shared_class(classes.get(name, TensorParallelPart), original)
        layer.tensor_group = group
        if name.endswith(".attn"):
            layer.num_heads //= group.size  # Its projections return the heads of this rank alone.
    original = type(model)
    model.__class__ = _make_model_class(original)
    embedding = model.token_embeddings
    embedding.vocabulary = shapes["token_embeddings.weight"][0]
    embedding.first_row = own_part(embedding.vocabulary, group.rank, group.size).start
    embedding.first_calls = FirstCalls(group.name)  # TensorParallel.loss() finds it here.


# Torch 2.13's compiler, given the whole, computes the target's logit before the maximum has been all-reduced: its parts
# between the collectives are compiled instead. (torch.compiler.disable would import the compiler here and now, in every
# process that may train in parallel, which takes 2 s of CPU time.)
@torch._disable_dynamo
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, first_token: int, vocabulary: int, group: TensorGroup, *, compiles: bool = False
) -> Tensor:
    """Return the mean of ``-log softmax(logits)[target]``, in nats, without logits of all tokens on any rank.

    With ``m`` the maximum and ``s`` the sum of ``exp(logits - m)`` over the vocabulary, the loss of a position is
    ``log(s) - (logit of the target - m)``. Ranks all-reduce the maximum, then the sum and the target's logit, which one
    of them has: three numbers, 12 bytes a position.

    Args:
        logits: (..., own tokens), of the same positions on every rank; fp16 and bf16 are computed with in fp32.
        targets: token ids, (...), of any integer dtype. Positions with -100 do not count, as in torch's cross-entropy:
            where ranks of another dimension of a mesh have different numbers of them, their mean is not that of all.
        first_token: the id that this rank's first column stands for.
        vocabulary: tokens of all ranks.
        compiles: let torch.compile fuse what is between the collectives, without fp32 tensors of the logits' size.

    Returns:
        A scalar, the same on every rank: fp64 for fp64 logits, fp32 for all others. It can be differentiated once.

    Raises:
        UsageError: targets are no integers, or one is outside of the vocabulary.
        RuntimeError: so is one on a GPU, as of an index that is out of bounds: the CPU does not wait to read it.

    Source: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3.
    """
    targets = as_int64(targets, "targets")
    is_ignored = targets == -100
    is_outside = ((targets < 0) | (targets >= vocabulary)) & ~is_ignored
    if is_readable(targets) and is_outside.any():
        raise UsageError(
            f"target {targets[is_outside][0]} is not in the vocabulary of {vocabulary} tokens: choose 0 to "
            f"{vocabulary - 1}, or -100 for a position that does not count"
        )
    # No rank has an id outside of the vocabulary, and its loss would be wrong: it gets a column that does not exist.
    column = (targets - first_token).masked_fill(is_outside, _NO_TOKEN).masked_fill(is_ignored, _IGNORED)
    return _CrossEntropy.apply(logits, column, group.name, compiles)


# Columns that no rank has: by the first gather() fails, and positions with the second do not count.
_NO_TOKEN, _IGNORED = 2**62, -(2**62)


class _CrossEntropy(torch.autograd.Function):
    """The mean of ``log(s) - target`` (see above); its derivative is ``exp(x - m) / s``, less 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor, group: str, compiles: bool) -> Tensor:
        column = column.unsqueeze(-1)
        largest = logits.amax(-1, keepdim=True).to(torch.promote_types(logits.dtype, torch.float32))
        m = all_reduced(largest, "max", group)
        sums = _compiled_if(compiles, _sum_and_target)(logits, column, m)
        s, target = all_reduced(sums, "sum", group).unbind()
        ctx.save_for_backward(logits, column, m, s)
        ctx.compiles = compiles
        return torch.where(column == _IGNORED, 0, s.log() - target).sum() / (column != _IGNORED).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad_loss)
        logits, column, m, s = ctx.saved_tensors
        return _compiled_if(ctx.compiles, _input_gradient)(logits, column, m, s, grad_loss), None, None, None


def _sum_and_target(logits: Tensor, column: Tensor, m: Tensor) -> Tensor:
    """Return the sum of ``exp(logits - m)``, and the target's logit less ``m``, 0 on other ranks: (2, ..., 1)."""
    is_local = (column >= 0) & (column < logits.size(-1))
    # Other ranks' columns are read as 0, and the result is dropped; _NO_TOKEN is left, so that it raises.
    target = logits.gather(-1, torch.where(is_local | (column == _NO_TOKEN), column, 0)) - m
    return torch.stack(((logits - m).exp().sum(-1, keepdim=True), torch.where(is_local, target, 0)))


def _input_gradient(logits: Tensor, column: Tensor, m: Tensor, s: Tensor, grad_loss: Tensor) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
    is_counted = column != _IGNORED
    grad_each = torch.where(is_counted, grad_loss / is_counted.sum(), 0)  # The loss is the mean over these positions.
    columns = torch.arange(logits.size(-1), device=logits.device)
    # The mask has no name, because it would be alive at the peak of memory.
    return ((logits - m).exp() * (grad_each / s) - torch.where(columns == column, grad_each, 0)).to(logits.dtype)


@functools.cache
def _compiled_if(compiles: bool, function: Any) -> Any:
    return torch.compile(function, dynamic=False) if compiles else function
