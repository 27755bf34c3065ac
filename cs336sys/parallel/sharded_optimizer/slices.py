"""Optimizer-state sharding by slices: each rank updates a slice of every parameter, all of equal size.

Gradients are reduce-scattered while the backward pass computes the next ones, and updated slices are all-gathered while
the next forward pass already runs. Together they send as many bytes as one all-reduce (ZeRO,
https://arxiv.org/abs/1910.02054, section 7.2.1). A parameter that divides into aligned slices is cut where it is, so
nothing is copied on the way; the others of a bucket are moved into one padded buffer, and are views of it from then on.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import flat_pieces
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import (
    MeanScatter,
    SliceGather,
    group_device,
    is_dense,
    memory_view,
    sum_over_ranks,
)
from cs336sys.parallel.gradient_buckets import GradientBucket, divide_into_buckets
from cs336sys.parallel.gradient_memory import require_own_gradient_dtype
from cs336sys.parallel.gradient_synchronizer import GradientSynchronizer, require_unsynchronized
from cs336sys.parallel.sharded_optimizer.exchange import ExchangeBucket, ParameterExchange, move_into


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that this rank updates.

    Attributes:
        elements: which elements of the parameter these are, in memory order.
        weights: the elements, (n,), as a view of the parameter's memory.
        updated: what the optimizer updates, (n,): the same memory, or a master copy in another dtype.
    """

    elements: range
    weights: Tensor
    updated: nn.Parameter


class ScatteredBucket(GradientBucket):
    """Gradients of which each rank gets the mean of its slices, in one launch; whole gradients are dropped afterwards.

    Args:
        parameters: by name; dense in memory, of one dtype and device.
        master_dtype: dtype of the copies that are updated; None updates the parameters themselves.

    Attributes:
        pieces: the memory of the parameters, (W * slice,) each; a packed piece holds several parameters.
        segments: this rank's segments, by parameter; a parameter that lies wholly in other ranks' slices has none.
        predecessor: a bucket launched earlier, whose whole gradients are dropped when this one is launched.
    """

    hands_on = True

    def __init__(self, parameters: dict[str, nn.Parameter], master_dtype: torch.dtype | None):
        super().__init__(parameters, gradient_dtype=None)
        self.pieces: list[Tensor] = []
        self.segments: dict[nn.Parameter, Segment] = {}
        self.predecessor: ScatteredBucket | None = None
        self._master_dtype = master_dtype
        members = list(parameters.values())
        sample = members[0]
        sizes = [parameter.numel() for parameter in members]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._layout = flat_pieces(sizes, world_size)
        # The sizes of what this rank's slices of all pieces consist of: gap, segment, gap, segment, ..., gap.
        self._split_sizes: list[int] = []
        # For each segment between the gaps, the index of its parameter.
        self._segment_indices: list[int] = []
        before = end = 0
        for piece in self._layout:
            if piece.is_packed:
                memory = sample.detach().new_zeros(world_size * piece.slice_size)
                for index, start in piece.starts.items():
                    move_into(memory, start, members[index])
            else:
                memory = memory_view(members[next(iter(piece.starts))]).view(-1)
            self.pieces.append(memory)
            for index, start in piece.starts.items():
                elements = piece.owned(index, sizes[index], rank)
                if elements:
                    weights = memory[start + elements.start : start + elements.stop]
                    updated = weights if master_dtype is None else weights.to(master_dtype)
                    self.segments[members[index]] = Segment(elements, weights, nn.Parameter(updated))
                    own_start = before + start + elements.start - rank * piece.slice_size
                    self._split_sizes += [own_start - end, len(elements)]
                    self._segment_indices.append(index)
                    end = own_start + len(elements)
            before += piece.slice_size
        self._split_sizes.append(before - end)
        self._scatter = MeanScatter(sample.dtype, sample.device, f"gradients of {', '.join(parameters)}")
        # This rank's slices of the mean gradients, between launch() and finish().
        self._own: Tensor | None = None

    def launch(self) -> None:
        """Start to reduce-scatter all gradients, with zeros for those that this rank lacks; ``grad`` becomes None."""
        gradients = [memory.view(-1) for memory in self._memory()]
        self._substitutes = {}
        whole = []
        for piece, memory in zip(self._layout, self.pieces, strict=True):
            if piece.is_packed:
                # Zeroed, gaps included, so that NaN checks on the sent buffer pass.
                packed = torch.zeros_like(memory)
                members = [gradients[index] for index in piece.starts]
                starts = piece.starts.values()
                targets = [packed[start : start + len(one)] for start, one in zip(starts, members, strict=True)]
                torch._foreach_copy_(targets, members)
                whole.append(packed)
            else:
                whole.append(gradients[next(iter(piece.starts))])
        sizes = [piece.slice_size for piece in self._layout]
        self._own = self.pieces[0].new_empty(sum(sizes))
        self._scatter.start(self._own.split(sizes), whole)
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.predecessor is not None:
            self.predecessor.wait()

    def wait(self) -> None:
        """Return when this rank's slices may be used; the whole gradients are dropped."""
        self._scatter.wait()

    def finish(self, present_anywhere: list[bool]) -> None:
        """Give the optimizer its segments of the gradients that any rank had, and begin a new step."""
        assert self._own is not None, "launch() comes before"
        own = self._own.to(self._master_dtype or self._own.dtype)
        parameters = list(self.parameters.values())
        for index, gradient in zip(self._segment_indices, own.split_with_sizes(self._split_sizes)[1::2], strict=True):
            if present_anywhere[index]:
                updated = self.segments[parameters[index]].updated
                # The gradient of an earlier step is still there if zero_grad() was not called.
                updated.grad = gradient if updated.grad is None else updated.grad.add_(gradient)
        self._own = None
        self.begin_step()


class SlicePartition:
    """Which slices of parameters this rank updates; averages their gradients, and sends updates to all ranks.

    It is a :class:`~cs336sys.parallel.sharded_optimizer.partition.Partition`.

    Args:
        cap_bytes: most bytes of gradients, and of parameters, in one operation.
        master_dtype: as in :class:`ScatteredBucket`.

    Attributes:
        exchange: completes every parameter from all ranks' slices.
    """

    def __init__(self, cap_bytes: float | None, master_dtype: torch.dtype | None):
        self.exchange = ParameterExchange()
        self._cap_bytes = cap_bytes
        self._master_dtype = master_dtype
        self._buckets: list[ScatteredBucket] = []
        self._segments: dict[nn.Parameter, Segment] = {}
        self._synchronizer = GradientSynchronizer([], overlap=True)
        # Whether segments already have this step's gradients.
        self._finished = False

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Cut parameters, given in the order in which the forward pass needs them."""
        named = [(name, parameter) for name, parameter in parameters.items() if parameter.numel()]
        require_unsynchronized(named)
        require_own_gradient_dtype(named)
        for _, parameter in named:
            if not is_dense(parameter):
                parameter.data = parameter.detach().contiguous()
        adopted = [
            ScatteredBucket(members, self._master_dtype) for members in divide_into_buckets(named, self._cap_bytes)
        ]
        self._buckets += adopted
        for bucket in adopted:
            self._segments |= bucket.segments
        # One bucket fills while two are being reduced: with more, slow communication would keep all gradients alive.
        for earlier, later in zip(self._buckets, self._buckets[2:], strict=False):
            later.predecessor = earlier
        self._synchronizer.extend(adopted)
        for bucket in reversed(adopted):
            gather = SliceGather(bucket.pieces, ", ".join(bucket.parameters))
            self.exchange.append(ExchangeBucket(frozenset(bucket.parameters.values()), gather))

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        segment = self._segments.get(parameter)
        return None if segment is None else segment.updated

    def owned(self, parameter: nn.Parameter) -> range:
        segment = self._segments.get(parameter)
        return range(0) if segment is None else segment.elements

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes accumulate gradients on this rank only."""
        return self._synchronizer.no_sync()

    def require_between_steps(self) -> None:
        """Refuse a change while gradients are being averaged.

        Raises:
            UsageError: they are.
        """
        if self._under_way:
            raise UsageError("gradients are under way: call step() or zero_grad() first")

    def prepare_gradients(self) -> None:
        """Give every segment its mean gradient, unless this has been done."""
        if self._under_way or not self._finished:
            self._synchronizer.finish()
        self._finished = True

    def discard_gradients(self) -> None:
        """Finish reductions in progress; the optimizer that updates the segments drops what they have got."""
        if self._under_way:
            self._synchronizer.finish()
        self._finished = False

    def publish(self) -> None:
        """Start to send the slices that this rank has updated, in the parameters' dtype."""
        self._finished = False
        if self._master_dtype is not None and self._segments:
            segments = self._segments.values()
            torch._foreach_copy_([segment.weights for segment in segments], [segment.updated for segment in segments])
        self.exchange.start()

    def load_masters(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Set this rank's master copies, missing ones from the parameters; then round them to the parameters."""
        if self._master_dtype is not None:
            for parameter, segment in self._segments.items():
                segment.updated.copy_(masters.get(parameter, segment.weights))
            self.publish()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Complete the gradients and scale them."""
        self.prepare_gradients()
        norms = []
        for bucket in self._buckets:
            gradients = [
                segment.updated.grad for segment in bucket.segments.values() if segment.updated.grad is not None
            ]
            if gradients:
                # Norms of half-precision gradients in fp32, and the sum of squares in fp64, so that it cannot overflow.
                dtype = torch.promote_types(gradients[0].dtype, torch.float32)
                norms.append(torch.stack(torch._foreach_norm(gradients, 2, dtype)).to(group_device(), torch.float64))
        square = (
            torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=group_device())
        )
        norm = sum_over_ranks(square).sqrt().to(torch.float32)
        nn.utils.clip_grads_with_norm_([segment.updated for segment in self._segments.values()], max_norm, norm)
        return norm

    @property
    def _under_way(self) -> bool:
        """Whether there are gradients that have not reached their segments."""
        return any(len(bucket.waiting) < len(bucket.parameters) for bucket in self._buckets)
