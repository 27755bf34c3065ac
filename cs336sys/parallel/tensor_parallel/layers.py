"""The layers of a model that tensor parallel ranks share: what each does besides what it did alone.

A layer becomes an instance of a class made from its own, whose ``forward`` sends and receives around that of the
original. One such class serves all layers of a kind: code that ``torch.compile`` has compiled for one block serves all.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.tensor_parallel.group import TensorGroup, all_reduced, refuse_graph


class _Shared:
    """Attributes of a layer that ranks share.

    Attributes:
        was_called: whether the embedding or the head has computed something.
    """

    tensor_group: TensorGroup
    first_row: int
    vocabulary: int
    was_called: bool = False


@functools.cache
def _block_part(original: type[nn.Module]) -> type[nn.Module]:
    """Attention or a feed-forward network: every rank computes a part of the sum."""

    class TensorParallelPart(original, _Shared):  # type: ignore[valid-type, misc]  # a class that is known when it runs
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self.tensor_group.leave(super().forward(self.tensor_group.enter(x), *args, **kwargs))

    return TensorParallelPart


@functools.cache
def _embedding(original: type[nn.Module]) -> type[nn.Module]:
    """The embedding: a rank has the rows of its part of the vocabulary, and adds zeros for all other tokens."""

    class TensorParallelEmbedding(original, _Shared):  # type: ignore[valid-type, misc]  # as above
        def forward(self, token_ids: Tensor) -> Tensor:
            self.was_called = True
            row = token_ids - self.first_row
            is_other = (row < 0) | (row >= self.weight.size(0))
            # What is no token at all has a row on no rank, and is refused by the original as where one has all rows.
            is_none = (token_ids < 0) | (token_ids >= self.vocabulary)
            row = row.masked_fill(is_other, 0).masked_fill(is_none, self.weight.size(0))
            found = super().forward(row)
            return self.tensor_group.leave(found.masked_fill(is_other.unsqueeze(-1), 0))

    return TensorParallelEmbedding


@functools.cache
def _head(original: type[nn.Module]) -> type[nn.Module]:
    """The LM head: a rank returns the logits of its part of the vocabulary."""

    class TensorParallelHead(original, _Shared):  # type: ignore[valid-type, misc]  # as above
        def forward(self, x: Tensor) -> Tensor:
            self.was_called = True
            return super().forward(self.tensor_group.enter(x))

    return TensorParallelHead


def share_layers(model: Any, group: TensorGroup, first_row: int, vocabulary: int) -> None:
    """Let the layers of a ``cs336_basics`` model, whose weights are cut already, compute together with other ranks.

    Args:
        first_row: the token id of the first row of this rank's embedding.
        vocabulary: rows of all ranks.
    """
    parts = [part for block in model.layers for part in (block.attn, block.ffn)]
    for block in model.layers:
        block.attn.num_heads //= group.size
    for part in parts:
        _become(part, _block_part, group)
    _become(model.token_embeddings, _embedding, group)
    model.token_embeddings.first_row = first_row
    model.token_embeddings.vocabulary = vocabulary
    _become(model.lm_head, _head, group)


def require_called(model: Any) -> None:
    """Refuse a model that has computed logits without calling its embedding and its head."""
    for name in ("token_embeddings", "lm_head"):
        if not getattr(model, name).was_called:
            raise UsageError(
                f"the model has not called {name}, of whose weight this rank has a part: call the layer, and do not "
                "compute with its weight (or with one that is tied to it) elsewhere"
            )


def _become(layer: Any, shared: Any, group: TensorGroup) -> None:
    layer.__class__ = shared(type(layer))
    layer.tensor_group = group


# Torch 2.13's compiler, given the whole, computes the target's logit before the maximum has been all-reduced: its parts
# between the collectives are compiled instead. (torch.compiler.disable would import the compiler here and now, in every
# process that may train in parallel, which takes 2 s of CPU time.)
@torch._disable_dynamo
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, first_token: int, vocabulary: int, group: TensorGroup, *, compiles: bool = False
) -> Tensor:
    """Mean over all positions of ``-log softmax(logits)[target]``, in nats; no rank ever has logits of all tokens.

    With ``m`` the maximum and ``s`` the sum of ``exp(logits - m)`` over the vocabulary, the loss of a position is
    ``log(s) - (logit of the target - m)``. Ranks all-reduce the maximum, then the sum and the target's logit, which one
    of them has: 12 bytes a position.

    Args:
        logits: (..., own tokens), of the same positions on every rank; fp16 and bf16 are computed with in fp32.
        targets: token ids, (...), int64.
        first_token: the id that this rank's first column stands for.
        vocabulary: tokens of all ranks.
        compiles: compute what is between the collectives in kernels of torch.compile's, without tensors in fp32 of the
            size of the logits.

    Returns:
        A scalar, the same on every rank: fp64 for fp64 logits, fp32 for all others. It can be differentiated once.

    Raises:
        RuntimeError: a target is outside of the vocabulary (on a GPU: as of an index that is out of bounds).

    Source: Megatron-LM (https://arxiv.org/abs/1909.08053), section 3.
    """
    column = targets - first_token
    # What is no token would be nobody's, and count as one of the largest logit: it gets a column that does not exist.
    column = column.masked_fill((targets < 0) | (targets >= vocabulary), _NO_TOKEN)
    return _CrossEntropy.apply(logits, column, group.name, compiles)


_NO_TOKEN = 2**62


class _CrossEntropy(torch.autograd.Function):
    # The derivative is exp(x - m) / s, less 1 at the target, as where one rank has all logits.

    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor, group: str, compiles: bool) -> Tensor:
        column = column.unsqueeze(-1)
        largest = logits.amax(-1, keepdim=True).to(torch.promote_types(logits.dtype, torch.float32))
        m = all_reduced(largest, "max", group)
        sums = (_compiled(_sum_and_target) if compiles else _sum_and_target)(logits, column, m)
        s, target = all_reduced(sums, "sum", group).unbind()
        ctx.save_for_backward(logits, column, m, s)
        ctx.compiles = compiles
        return (s.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(grad_loss)
        logits, column, m, s = ctx.saved_tensors
        gradient = (_compiled(_gradient) if ctx.compiles else _gradient)(logits, column, m, s, grad_loss)
        return gradient, None, None, None


def _sum_and_target(logits: Tensor, column: Tensor, m: Tensor) -> Tensor:
    """(2, ..., 1): the sum of ``exp(logits - m)``, and the target's logit less ``m``, 0 where another rank has it."""
    is_own = (column >= 0) & (column < logits.size(-1))
    target = logits.gather(-1, torch.where(is_own | (column == _NO_TOKEN), column, 0)) - m
    return torch.stack(((logits - m).exp().sum(-1, keepdim=True), torch.where(is_own, target, 0)))


def _gradient(logits: Tensor, column: Tensor, m: Tensor, s: Tensor, grad_loss: Tensor) -> Tensor:
    share = grad_loss / column.numel()
    columns = torch.arange(logits.size(-1), device=logits.device)
    return ((logits - m).exp() * (share / s) - torch.where(columns == column, share, 0)).to(logits.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
