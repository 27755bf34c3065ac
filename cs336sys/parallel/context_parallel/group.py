"""The ranks that share a sequence, and how tensors travel between them; ``attention.py`` explains its zigzag order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.accounting.sharding.partition import SequenceSplit
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import (
    SliceExchange,
    is_readable,
    is_stream_captured,
    process_group,
    require_process_group,
)
from cs336sys.parallel.rank_consistency import require_same_lines, same_on_every_rank


@dataclass(frozen=True)
class Arriving:
    """A tensor under way to this rank. What is sent and what is received must not be touched before :meth:`wait`."""

    received: Tensor
    exchange: SliceExchange | None = None

    def wait(self) -> Tensor:
        """Return the tensor; on a GPU as soon as the current stream has been told to wait for it.

        Raises:
            RuntimeError: another rank died or timed out; a note says what was communicated.
        """
        if self.exchange is not None:
            self.exchange.wait()
        return self.received


class ContextGroup:
    """The ranks that share every sequence, and which tokens of it each of them holds.

    Args:
        split: of as many ranks as the group has.
        group: a process group, or one dimension of a mesh; None is the default process group. One of its own lets keys
            and values overtake what else is under way.
        communicates: False computes with this rank's tensors in place of others', to time a step without communication.

    Attributes:
        rank: this rank's place in the group.

    Raises:
        UsageError: there is no process group, the split is for another number of ranks, or ranks differ in it.
    """

    def __init__(
        self, split: SequenceSplit, group: dist.ProcessGroup | DeviceMesh | None = None, *, communicates: bool = True
    ):
        require_process_group("context parallelism")
        if not isinstance(split, SequenceSplit):
            raise UsageError(f"{split!r} is no split of a sequence over ranks: give a SequenceSplit")
        self.split = split
        self._group = process_group(group)
        self.rank, self.world_size = self._group.rank(), self._group.size()
        if split.world_size != self.world_size:
            raise UsageError(f"a split over {split.world_size} ranks: the group has {self.world_size}; choose as many")
        order = "zigzag" if split.is_zigzag else "in rank order"
        require_same_lines([f"sequences of {split.length} tokens {order}"], self._group)
        self._communicates = communicates
        self._has_compared = False  # Whether checked() has compared shapes between ranks, which it does once.

    @property
    def length(self) -> int:
        """Return how many tokens of a sequence this rank holds."""
        return self.split.lengths[self.rank]

    @property
    def loss_weight(self) -> float:
        """Return the factor for the mean loss of this rank's tokens, with which the mean over ranks is that of all.

        Every token must have a target, see :meth:`mean_loss`.
        """
        return self.length * self.world_size / self.split.length

    def mean_loss(self, loss_sum: Tensor, targets: Tensor | int) -> Tensor:
        """Return a loss whose mean over ranks is that over all tokens that have a target. Every rank must call it.

        Args:
            loss_sum: the sum over those of this rank's tokens that have a target, a scalar; 0 if none has.
            targets: how many these are.

        Raises:
            UsageError: on every rank: no rank has a target, or one has fewer than 0; on a GPU the loss is NaN.
        """
        count = torch.as_tensor(targets, dtype=torch.int64, device=loss_sum.device)
        count = torch.where(count < 0, -(2**40), count)  # So that every rank sees it in the sum, which replaces this.
        if self._communicates:
            dist.all_reduce(count, group=self._group)
        else:
            count *= self.world_size  # As if each of the other ranks had as many.
        if is_readable(count) and count <= 0:
            raise UsageError(
                f"mean_loss with {int(targets)} targets on rank {self.rank}: choose at least 0 on each rank, and at "
                f"least 1 on all {self.world_size} together"
            )
        return loss_sum * self.world_size / torch.where(count > 0, count, math.nan)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return where in the sequence this rank's tokens are, (length,), int64: to take them and for rotary tables."""
        chunks = self.split.chunks[self.rank]
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])

    def checked(self, kind: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Refuse tensors of other tokens than this rank's and, in the first call, of other shapes than other ranks'.

        Args:
            kind: of attention, for messages.

        Returns:
            the tensors, under autocast in its dtype.

        Raises:
            UsageError: in the first call on every rank.
        """
        if self._has_compared or not self._communicates or is_stream_captured():
            self._require_local_tokens(kind, query, key, value)
        else:
            self._has_compared = True
            with same_on_every_rank(self._group) as lines:
                self._require_local_tokens(kind, query, key, value)
                # "S", whose quotes are dropped, is for the number of tokens, which may differ between ranks.
                shapes = [(*tensor.shape[:-2], "S", tensor.shape[-1]) for tensor in (query, key, value)]
                lines.append(f"{kind} of {query.dtype} {', '.join(map(str, shapes))}".replace("'", ""))
        device_type = query.device.type
        if not torch.is_autocast_enabled(device_type):
            return query, key, value
        dtype = torch.get_autocast_dtype(device_type)
        return query.to(dtype), key.to(dtype), value.to(dtype)

    def _require_local_tokens(self, kind: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse tensors of other tokens than this rank's, or whose shapes do not fit each other."""
        for tensor in (query, key, value):
            if tensor.shape[-2] != self.length:
                raise UsageError(
                    f"{kind} of {tensor.shape[-2]} tokens: this rank holds {self.length} of {self.split.length}; take "
                    "the tokens of context.positions()"
                )
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise UsageError(
                f"{kind} of queries, keys and values of shapes {shapes}: give all of them one width, and as many heads "
                "of values as of keys"
            )

    def to_next(self, tensor: Tensor, shape: Sequence[int], contents: str) -> Arriving:
        """Send a contiguous tensor to the next rank of the ring, and receive one of ``shape`` from the one before."""
        received = tensor.new_empty(shape)
        received_sizes, sizes = [0] * self.world_size, [0] * self.world_size
        received_sizes[(self.rank - 1) % self.world_size] = received.nbytes
        sizes[(self.rank + 1) % self.world_size] = tensor.nbytes
        return self._exchange(received, tensor, received_sizes, sizes, contents)

    def trade_rows(self, tensor: Tensor, rows: Sequence[int], received_rows: Sequence[int], contents: str) -> Arriving:
        """Send each rank its rows of a contiguous tensor; receive rows from each, in rank order.

        Args:
            rows: for each rank; they add up to ``len(tensor)``.
            received_rows: from each rank.
        """
        row_bytes = tensor[:1].nbytes  # As _exchange() counts. Every rank holds at least one token, and so a row.
        received = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        sizes, received_sizes = [count * row_bytes for count in rows], [count * row_bytes for count in received_rows]
        return self._exchange(received, tensor, received_sizes, sizes, contents)

    def _exchange(
        self, received: Tensor, tensor: Tensor, received_sizes: list[int], sizes: list[int], contents: str
    ) -> Arriving:
        """Start an all-to-all of bytes, which NCCL runs as one group of sends and receives; sizes are in bytes."""
        if not self._communicates:
            # This rank's own numbers, repeated or cut, and without a copy where as many are received.
            numbers = tensor.view(-1)
            if numbers.numel() != received.numel():
                numbers = numbers.repeat(math.ceil(received.numel() / numbers.numel()))[: received.numel()]
            return Arriving(numbers.view(received.shape))
        exchange = SliceExchange(contents, self._group)
        # Gloo has no all-to-all of every dtype.
        exchange.start(received.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8), sizes, received_sizes)
        return Arriving(received, exchange)
