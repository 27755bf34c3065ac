"""Averages whole gradients over ranks, and gives each rank the mean of its rows."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336sys.parallel.collectives import MeanScatter, SliceExchange, through_host
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.gradient_memory import in_own_memory


class GradientScatter:
    """Averages the gradients of some parameters: start, go on computing, finish.

    If gradients have the dtype of the slices and all ranks have equally many rows, a reduce-scatter returns the mean.
    All others (half precision, uneven rows) are exchanged in an all-to-all and averaged here: it sends as many bytes,
    the sum has the precision of the slices, and nothing is padded.

    Args:
        what: whose gradients they are, for errors.
        stream: on a GPU, the stream on which exchanged gradients are averaged while the next ones are computed.
    """

    def __init__(self, what: str, stream: torch.cuda.Stream | None):
        self._what = what
        self._stream = stream
        self._groups: list[tuple[_GradientGroup, list[int]]] = []

    def choose(self, parameters: Sequence[ShardedParameter]) -> None:
        """Average the gradients of these parameters from now on; averages in progress are dropped."""
        self.drop()
        indices_of_kind: dict[Any, list[int]] = {}
        for index, parameter in enumerate(parameters):
            kind = parameter.shard.dtype, parameter.gathered_dtype, parameter.divides_evenly
            indices_of_kind.setdefault(kind, []).append(index)
        self._groups = [
            (_GradientGroup([parameters[index] for index in indices], self._what), indices)
            for indices in indices_of_kind.values()
        ]

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Launch. Gradients, one for each parameter, must be contiguous and have the same dtypes on every rank."""
        for group, indices in self._groups:
            group.start([gradients[index] for index in indices])
        if self._stream is not None and self._exchanges:
            with on_side_stream(self._stream):
                for group, _ in self._groups:
                    group.average()

    def finish(self) -> None:
        """Add the means to the gradients of the slices; on a GPU, the current stream waits for them."""
        self._wait()
        for group, _ in self._groups:
            group.add_means()

    def drop(self) -> None:
        """Wait for the means, and discard them."""
        self._wait()
        for group, _ in self._groups:
            group.forget()

    @property
    def _exchanges(self) -> bool:
        return any(group.averages for group, _ in self._groups)

    def _wait(self) -> None:
        for group, _ in self._groups:
            group.wait()
            if self._stream is None:
                group.average()
        if self._stream is not None and self._exchanges:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _GradientGroup:
    """Parameters whose gradients have the same dtype and are averaged in one launch.

    Whatever can be done for all parameters at once is not done for each: a GPU that computes a layer in less than a
    millisecond waits for the CPU. Gradients to exchange are packed, and what arrives is averaged by one kernel. One
    launch per parameter would save that copy, which takes a GPU 0.1 ms for a layer of ``2.7b`` in bf16, but would cost
    the CPU 0.06 ms for each parameter.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], what: str):
        self._parameters = parameters
        self._shapes = [parameter.shard.shape for parameter in parameters]
        self._sizes = [parameter.shard.numel() for parameter in parameters]
        # How many elements each rank's slice has: of each parameter, and of all together.
        self._slice_sizes = [parameter.slice_sizes for parameter in parameters]
        self._rank_sizes = [sum(of_rank) for of_rank in zip(*self._slice_sizes, strict=True)]
        shard = parameters[0].shard
        # Asking the process group for its backend takes a CPU 2 us, and this is needed for every layer.
        self._can_scatter = parameters[0].divides_evenly and not through_host(shard)
        group = parameters[0].group
        self._scatter = MeanScatter(shard.dtype, shard.device, what, group)
        self._exchange = SliceExchange(what, group)
        # The means of all slices in one tensor, because they are made and dropped together.
        self._mean: Tensor | None = None
        self._received: Tensor | None = None
        # Held so that the memory is not reused while it is being sent, whichever stream has waited already.
        self._sent: Sequence[Tensor] = ()

    @property
    def averages(self) -> bool:
        """Whether gradients are being exchanged, and the mean is to be computed here."""
        return self._received is not None

    def start(self, gradients: list[Tensor]) -> None:
        shard = self._parameters[0].shard
        mean = self._mean = torch.empty(sum(self._sizes), dtype=shard.dtype, device=shard.device)
        if self._can_scatter and gradients[0].dtype == shard.dtype:
            # They are read, and by some backends divided, while the backward pass goes on.
            self._sent = own = [in_own_memory(gradient) for gradient in gradients]
            self._scatter.start(self._of_each(mean), own)
            return
        slices = [
            gradient.view(-1).split_with_sizes(sizes)
            for gradient, sizes in zip(gradients, self._slice_sizes, strict=True)
        ]
        # In rank order, so that what goes to each rank is contiguous.
        packed = torch.cat([piece for of_rank in zip(*slices, strict=True) for piece in of_rank])
        self._sent = [packed]
        self._received = packed.new_empty(len(self._rank_sizes) * len(mean))
        self._exchange.start(self._received, packed, self._rank_sizes)

    def wait(self) -> None:
        """Wait for means that the collective computes."""
        if not self.averages:
            self._scatter.wait()

    def average(self) -> None:
        if self._received is not None and self._mean is not None:
            self._exchange.wait()
            of_ranks = self._received.view(len(self._rank_sizes), len(self._mean))
            torch.mean(of_ranks, 0, dtype=self._mean.dtype, out=self._mean)

    def add_means(self) -> None:
        if self._mean is not None:
            for parameter, mean in zip(self._parameters, self._of_each(self._mean), strict=True):
                parameter.add_mean_gradient(mean)
        self.forget()

    def forget(self) -> None:
        self._mean = self._received = None
        self._sent = ()

    def _of_each(self, mean: Tensor) -> list[Tensor]:
        """The mean as one tensor for each parameter, in the shape of its slice."""
        pieces = mean.split_with_sizes(self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


@contextlib.contextmanager
def on_side_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on this stream, after all work queued on the current stream so far; None, without a GPU, changes nothing."""
    if stream is None:
        yield
    else:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with stream:
            yield
