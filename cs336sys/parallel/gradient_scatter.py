"""Takes the mean of whole gradients over ranks and gives each rank that of its rows."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.parallel.collectives import MeanScatter, SliceExchange, through_host
from cs336sys.parallel.sharded_parameter import ShardedParameter


class GradientScatter:
    """Averages the gradients of some parameters: start, go on computing, finish.

    Of gradients in the dtype of the slices, whose rows the ranks share equally, a reduce-scatter returns the mean. All
    others (half precision, uneven rows) are exchanged and averaged here: as many bytes are sent, the sum is exact to
    the slices' precision, and nothing is padded.

    Args:
        what: whose gradients they are, for errors.
        stream: on a GPU, where to average what was exchanged: beside the computation.
    """

    def __init__(self, what: str, stream: torch.cuda.Stream | None):
        self._what = what
        self._stream = stream
        self._scatters: dict[torch.dtype, MeanScatter] = {}
        self._exchange = SliceExchange(what)
        self._arriving: list[tuple[ShardedParameter, Tensor]] = []
        self._received: list[tuple[Tensor, Tensor]] = []
        # The memory of what is being sent must not be given to others, whichever stream has waited already.
        self._sent: Sequence[tuple[ShardedParameter, Tensor]] = ()

    def start(self, gradients: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """Launch; the gradients must be contiguous, and of the same parameters in this order on every rank."""
        self._sent = gradients
        self._arriving = [(parameter, torch.empty_like(parameter.shard)) for parameter, _ in gradients]
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        to_exchange = []
        for (parameter, gradient), (_, mean) in zip(gradients, self._arriving, strict=True):
            if parameter.divides_evenly and gradient.dtype == mean.dtype and not through_host(gradient):
                by_dtype.setdefault(gradient.dtype, []).append((mean, gradient))
            else:
                to_exchange.append((mean, gradient))
        for dtype, parts in by_dtype.items():
            scatter = self._scatters.setdefault(dtype, MeanScatter(dtype, parts[0][1].device, self._what))
            scatter.start([mean for mean, _ in parts], [gradient for _, gradient in parts])
        if to_exchange:
            self._start_exchange(to_exchange)

    def finish(self) -> None:
        """Add the means to the gradients of the slices; on a GPU, let the current stream wait for them."""
        self._wait()
        for parameter, mean in self._arriving:
            parameter.add_mean_gradient(mean)
        self._forget()

    def drop(self) -> None:
        """Wait for the means, and forget them."""
        self._wait()
        self._forget()

    def _start_exchange(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        world_size = dist.get_world_size()
        for mean, gradient in parts:
            self._received.append((mean, gradient.new_empty((world_size * len(mean), *mean.shape[1:]))))
        self._exchange.start([received for _, received in self._received], [gradient for _, gradient in parts])
        if self._stream is not None:
            with beside(self._stream):
                self._average()

    def _average(self) -> None:
        self._exchange.wait()
        for mean, received in self._received:
            of_ranks = received.view(dist.get_world_size(), *mean.shape)
            torch.mean(of_ranks, 0, dtype=mean.dtype, out=mean)

    def _wait(self) -> None:
        for scatter in self._scatters.values():
            scatter.wait()
        if self._stream is None:
            self._average()
        else:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _forget(self) -> None:
        self._arriving, self._received, self._sent = [], [], ()


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on this stream, after what the current one has been given so far; without a GPU (None) just run."""
    if stream is None:
        yield
    else:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield
