"""The layers of a model that tensor parallel ranks share: what each does beside what it did alone.

A layer becomes an instance of a class made from its own, whose ``forward`` sends and receives around that of the
original. One such class serves all layers of a kind: code that ``torch.compile`` has compiled for one block serves all.
"""

import functools
from typing import Any

from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.tensor_parallel.group import TensorGroup


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
    """Refuse a model that has computed logits without calling its embedding and its head.

    Raises:
        UsageError: naming the layer.
    """
    for name in ("token_embeddings", "lm_head"):
        if not getattr(model, name).was_called:
            raise UsageError(
                f"the model has not called {name}, of whose weight this rank has a part: call the layer, and do not "
                "compute with its weight (or with one that is tied to it) elsewhere"
            )


def _become(layer: Any, shared: Any, group: TensorGroup) -> None:
    layer.__class__ = shared(type(layer))
    layer.tensor_group = group
