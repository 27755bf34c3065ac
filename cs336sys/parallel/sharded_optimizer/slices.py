"""Optimizer-state sharding by slices: each rank updates a slice of every parameter, all of equal size.

Gradients are reduce-scattered while the backward pass computes the next ones, and updated slices are all-gathered while
the next forward pass already runs. Together they send as many bytes as one all-reduce (ZeRO,
https://arxiv.org/abs/1910.02054, section 7.2.1). A parameter that divides into aligned slices is cut where it is, so
nothing is copied on the way; the others of a bucket are moved into one padded buffer, and are views of it from then on.
Either memory is a *piece* of the bucket; a *segment* is what this rank updates of a parameter. Gradients of a step are
*complete* once they are averaged, *late* if they come afterwards, and *used* from the step until they are dropped.
"""

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import Piece, flat_pieces
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import GradientBucket, divide_into_buckets
from cs336sys.parallel.collectives import MeanScatter, SliceGather, is_dense, is_stream_captured, memory_view
from cs336sys.parallel.gradient_memory import require_own_gradient_dtype
from cs336sys.parallel.gradient_slices import clip_over_ranks, refuse_clipping_alone, refuse_other_scalers
from cs336sys.parallel.gradient_synchronizer import GradientSynchronizer
from cs336sys.parallel.sharded_optimizer.exchange import ExchangeBucket, ParameterExchange, move_into
from cs336sys.parallel.wrapped_modules import require_unsynchronized

_partitions: "weakref.WeakSet[SlicePartition]" = weakref.WeakSet()


@functools.cache
def _drop_slices_in_zero_grad() -> None:
    """Let ``zero_grad()`` of modules drop slices of gradients, too, which it would not find: ``grad`` is None."""
    zero_grad = nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def zero_slices_too(module: nn.Module, set_to_none: bool = True) -> None:
        ids = frozenset(map(id, module.parameters()))
        for partition in list(_partitions):
            partition.drop_gradients_of_module(ids, set_to_none)
        zero_grad(module, set_to_none)

    nn.Module.zero_grad = zero_slices_too  # type: ignore[assignment]


@dataclass(frozen=True)
class ParameterSegment:
    """The part of one parameter that this rank updates.

    Attributes:
        elements: which elements of the parameter these are, in memory order.
        weights: the elements, (n,), as a view of the parameter's memory.
        updated: what the optimizer updates, (n,): the same memory, or a master copy in another dtype.
        gradient_range: where in this rank's slices of a bucket, one after another, its gradient is.
    """

    elements: range
    weights: Tensor
    updated: nn.Parameter
    gradient_range: slice


class ScatteredBucket(GradientBucket):
    """Gradients of which each rank gets the mean of its slices, in one launch; whole gradients are dropped afterwards.

    Args:
        parameters: by name; dense in memory, of one dtype and device.
        master_dtype: dtype of the copies that are updated; None updates the parameters themselves.

    Attributes:
        pieces: the memory of the parameters, (W * slice,) each; a packed piece holds several parameters.
        segments: this rank's segments, by parameter; a parameter that lies wholly in other ranks' slices has none.
        predecessor: a bucket launched earlier, whose whole gradients are dropped when this one is launched.
        ids_with_gradient: ids of the parameters of which any rank has a gradient, those without a segment here, too.
        has_arrived: whether the last reduction brought a gradient of any rank.
    """

    hands_on = True

    def __init__(self, parameters: dict[str, nn.Parameter], master_dtype: torch.dtype | None):
        """Cut parameters where they are in memory; move those that do not divide into slices into one packed piece."""
        super().__init__(parameters, gradient_dtype=None)
        self.pieces: list[Tensor] = []
        self.segments: dict[nn.Parameter, ParameterSegment] = {}
        self.predecessor: ScatteredBucket | None = None
        self.ids_with_gradient: set[int] = set()
        self.has_arrived = False
        self._master_dtype = master_dtype
        members = list(parameters.values())
        sample = members[0]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._layout = flat_pieces([parameter.numel() for parameter in members], world_size)
        slice_start = 0  # Where this rank's slice of a piece begins in its slices of all pieces.
        for piece in self._layout:
            memory = _piece_memory(piece, members, world_size)
            self.pieces.append(memory)
            for index, start in piece.starts.items():  # Of each parameter in the piece, its first element there.
                elements = piece.owned(index, members[index].numel(), rank)
                if elements:
                    weights = memory[start + elements.start : start + elements.stop]
                    updated = nn.Parameter(weights if master_dtype is None else weights.to(master_dtype))
                    start_in_slice = start + elements.start - rank * piece.slice_size  # It begins at the product.
                    gradient_range = slice(slice_start + start_in_slice, slice_start + start_in_slice + len(elements))
                    self.segments[members[index]] = ParameterSegment(elements, weights, updated, gradient_range)
            slice_start += piece.slice_size
        self._scatter = MeanScatter(sample.dtype, sample.device, f"gradients of {', '.join(parameters)}")
        # This rank's slices of the mean gradients, between launch() and finish().
        self._mean_slices: Tensor | None = None

    def launch(self) -> None:
        """Start to reduce-scatter all gradients, with zeros for those that this rank lacks; ``grad`` becomes None."""
        # In the order of the parameters: pieces know each by its index.
        gradients = [tensor.view(-1) for tensor in self._tensors_to_average()]
        self._substitutes = {}  # The zeros are sent, and no parameter gets a mean in them.
        sent = []
        for piece, memory in zip(self._layout, self.pieces, strict=True):
            members = [gradients[index] for index in piece.starts]
            if piece.is_packed:
                packed = torch.zeros_like(memory)  # Zeroed, gaps included, so that NaN checks on the sent buffer pass.
                starts = piece.starts.values()
                targets = [packed[start : start + len(member)] for start, member in zip(starts, members, strict=True)]
                torch._foreach_copy_(targets, members)
                sent.append(packed)
            else:
                sent += members
        sizes = [piece.slice_size for piece in self._layout]
        self._mean_slices = self.pieces[0].new_empty(sum(sizes))
        self._scatter.start(self._mean_slices.split(sizes), sent)
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.predecessor is not None:
            self.predecessor.wait()  # It keeps whole gradients alive until then.

    def wait(self) -> None:
        """Return when this rank's slices may be used; the whole gradients are dropped."""
        self._scatter.wait()

    def finish(self, present_anywhere: list[bool]) -> None:
        """Give the optimizer its segments of the gradients that any rank had, and begin a new step."""
        assert self._mean_slices is not None, "launch() comes before"
        gradients = self._mean_slices.to(self._master_dtype or self._mean_slices.dtype)
        for parameter, is_present in zip(self.parameters.values(), present_anywhere, strict=True):
            if not is_present:
                continue
            self.ids_with_gradient.add(id(parameter))
            segment = self.segments.get(parameter)
            if segment is not None:
                gradient, updated = gradients[segment.gradient_range], segment.updated
                # The gradient of an earlier step is still there if zero_grad() was not called.
                updated.grad = gradient if updated.grad is None else updated.grad.add_(gradient)
        self.has_arrived = any(present_anywhere)
        self._mean_slices = None
        self.begin_step()

    @property
    def is_under_way(self) -> bool:
        """Return whether a backward pass has begun of which gradients have not reached the segments."""
        return len(self.waiting) < len(self.parameters)

    def drop(self, ids: AbstractSet[int], set_to_none: bool) -> None:
        """Drop or zero the slices of gradients of the parameters with these ids."""
        for parameter, segment in self.segments.items():
            if id(parameter) in ids and segment.updated.grad is not None:
                if set_to_none:
                    segment.updated.grad = None
                else:
                    segment.updated.grad.zero_()
        if set_to_none:  # Zeros are still gradients.
            self.ids_with_gradient.difference_update(ids)


def _piece_memory(piece: Piece, members: Sequence[nn.Parameter], world_size: int) -> Tensor:
    """Return the memory of a piece of a bucket: that of its one parameter, or a new one, into which several are moved.

    Its changes are not counted as those of parameters: exchange.start() counts those of a step.
    """
    if piece.is_packed:
        memory = members[0].detach().new_zeros(world_size * piece.slice_size)
        move_into(memory, piece.starts.values(), [members[index] for index in piece.starts])
        return memory
    (index,) = piece.starts
    return memory_view(members[index].data).view(-1)


class SliceSynchronizer(GradientSynchronizer):
    """Averages gradients in slices; launches nothing while the gradients of the last step are still there.

    A backward pass adds to those. If they are dropped after it, as those that a generator's loss gives to the
    discriminator are, it need not be averaged: its gradients stay with the parameters of this rank until then.

    Attributes:
        is_complete: whether this step's gradients are complete, so that no pass may add to them; the same on all ranks.
        holds_back: whether gradients stay on this rank for now.
        late: ids of parameters that got a gradient on this rank when those of the step were complete.
    """

    is_complete = False
    holds_back = False

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.late: set[int] = set()

    def gradient_ready(self, bucket: GradientBucket, name: str, parameter: nn.Parameter) -> None:
        if self.is_complete:
            # Another rank may have no gradient, and would not refuse here: the next method that all ranks call refuses.
            self.late.add(id(parameter))
            return
        if not self.holds_back:
            super().gradient_ready(bucket, name, parameter)
            return
        with self.no_sync():  # The gradient stays with the parameter, on this rank.
            super().gradient_ready(bucket, name, parameter)


class SlicePartition:
    """Slices of parameters that this rank updates; averages their gradients, and sends updates to all ranks.

    Attributes:
        exchange: completes every parameter from all ranks' slices, at most ``cap_bytes`` in one operation.
        synchronizer: averages the gradients, at most ``cap_bytes`` in one operation.
    """

    def __init__(self, cap_bytes: float | None, master_dtype: torch.dtype | None):
        self.exchange = ParameterExchange()
        self._cap_bytes = cap_bytes
        self._master_dtype = master_dtype
        self._buckets: list[ScatteredBucket] = []
        self._names: dict[int, str] = {}
        self._segments: dict[nn.Parameter, ParameterSegment] = {}
        # Each parameter's ``_version`` when it was last equal to its master: a higher one says that a user wrote it.
        self._versions: dict[nn.Parameter, int] = {}
        self.synchronizer = SliceSynchronizer([], overlap=True)
        # By id, the names of parameters whose gradients the last step has used and nobody has dropped since.
        self._used: dict[int, str] = {}
        # Whether zero_grad() of a module was called while its gradients were being averaged, and could not drop them.
        self._module_zero_grad_failed = False
        # Torch's clipping, scalers and Module.zero_grad() look at ``grad`` of parameters, which is None here: from the
        # first partition of a process on, the first two refuse what is sharded, and the last drops its gradients.
        refuse_clipping_alone()
        refuse_other_scalers()
        _drop_slices_in_zero_grad()
        _partitions.add(self)  # Where Module.zero_grad() looks.

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Cut parameters, given in the order in which the forward pass needs them."""
        not_empty = [(name, parameter) for name, parameter in parameters.items() if parameter.numel()]
        require_unsynchronized(not_empty)
        require_own_gradient_dtype(not_empty)
        for _, parameter in not_empty:
            if not is_dense(parameter):  # Slices are cut from memory without gaps.
                parameter.data = parameter.detach().contiguous()
        buckets = divide_into_buckets(not_empty, self._cap_bytes)  # As the backward pass needs them: the last first.
        adopted = [ScatteredBucket(bucket, self._master_dtype) for bucket in buckets]
        self._buckets += adopted
        self._names |= {id(parameter): name for name, parameter in not_empty}
        for bucket in adopted:
            self._segments |= bucket.segments
            self._versions |= {parameter: parameter._version for parameter in bucket.segments}
        # A launch waits for the last but one: with more under way, slow communication would keep all gradients alive.
        for earlier, later in zip(self._buckets, self._buckets[2:], strict=False):
            later.predecessor = earlier
        self.synchronizer.extend(adopted)
        self.exchange.extend(
            ExchangeBucket(bucket.parameters, SliceGather(bucket.pieces, ", ".join(bucket.parameters)))
            for bucket in reversed(adopted)  # As the forward pass needs them.
        )

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return this rank's slice of a parameter, None if that is empty, or the parameter itself if it is not cut."""
        segment = self._segments.get(parameter)
        if segment is None:
            return None if self._is_cut(parameter) else parameter
        return segment.updated

    def owned(self, parameter: nn.Parameter) -> range:
        """Return the elements of a parameter, in memory order, that :meth:`local` returns."""
        segment = self._segments.get(parameter)
        if segment is None:
            return range(0 if self._is_cut(parameter) else parameter.numel())
        return segment.elements

    def _is_cut(self, parameter: nn.Parameter) -> bool:
        """Return whether ranks have slices of a parameter, perhaps not this one; frozen and empty ones are not cut."""
        return id(parameter) in self._names

    def require_between_steps(self) -> None:
        """Refuse a change of parameters or groups while gradients are being averaged."""
        if self._is_under_way:
            raise UsageError("gradients are under way: call step() or zero_grad() first")

    def prepare_gradients(self) -> None:
        """Give every segment its mean gradient, unless this has been done."""
        if self._used:
            # To keep gradients over a step would be right, but it looks the same here as the program's attempt to drop
            # them by ``parameter.grad = None``, which leaves the slices.
            name = next(iter(self._used.values()))
            raise UsageError(
                f"{name} still has the gradient of the last step, which is kept in slices: call zero_grad() of the "
                "optimizer, or of the model, on every rank after each step()"
            )
        if not self.synchronizer.is_complete:
            self.synchronizer.finish()
            # If none has arrived, no rank has made a backward pass yet, and the one to come may add gradients.
            self.synchronizer.is_complete = any(bucket.has_arrived for bucket in self._buckets)

    def require_no_late_gradients(self) -> None:
        """Refuse gradients that came after those of the step were complete, or that a module was to drop."""
        if self._module_zero_grad_failed:
            raise UsageError(
                "zero_grad() of a module was called while gradients were being averaged over ranks, and has not "
                "dropped them: call zero_grad() of the optimizer instead, on every rank"
            )
        if self.synchronizer.late:
            raise UsageError(
                "a parameter got a gradient after the gradients of this step were completed, as clip_grad_norm_(), "
                "unscale_() and finish_gradient_synchronization() do: run all passes of a step before, all but the "
                "last under no_sync(), or call zero_grad() first"
            )

    def prepare_update(self) -> None:
        """Let master copies be the weights where these have been changed since they were published.

        Torch does not count changes through ``.data``, and they are not seen: comparing all weights with their masters
        would move 12 bytes of memory for each element in every step.
        """
        # In a CUDA graph versions would be read once, at the capture: changes between replays are not seen either.
        if self._master_dtype is None or is_stream_captured():
            return
        for parameter, segment in self._segments.items():
            if parameter._version != self._versions[parameter]:
                # Elements that are the rounded master still keep the master's precision.
                weights, master = segment.weights, segment.updated
                master.copy_(torch.where(weights == master.to(weights.dtype), master, weights))
                self._versions[parameter] = parameter._version

    def drop_gradients(self, set_to_none: bool) -> None:
        """Drop or zero all gradients, those being averaged, too. Every rank must call it."""
        # If gradients are complete or held back here, they are so on all ranks: none are being averaged. Else another
        # rank may have begun a backward pass, and its reductions wait for this rank's, which finish() launches.
        is_open = not (self.synchronizer.is_complete or self.synchronizer.holds_back)
        # In a CUDA graph, finish() refuses parameters without a gradient, so it is only called if a pass has begun.
        if is_open and (self._is_under_way or not is_stream_captured()):
            self.synchronizer.finish()
        self._module_zero_grad_failed = False
        self._drop(self._names.keys(), set_to_none)

    def drop_gradients_of_module(self, ids: AbstractSet[int], set_to_none: bool) -> None:
        """Drop or zero gradients for ``zero_grad()`` of a module, whose parameters have these ids.

        Some of them may be another optimizer's.
        """
        ids_here = ids & self._names.keys()
        if ids_here:
            # The next step refuses this on every rank. Another rank may have had no pass, and would not refuse here.
            for bucket in self._buckets:
                if bucket.is_under_way and not ids_here.isdisjoint(map(id, bucket.parameters.values())):
                    self._module_zero_grad_failed = True
            self._drop(ids_here, set_to_none)

    def _drop(self, ids: AbstractSet[int], set_to_none: bool) -> None:
        """Drop or zero gradients, and forget that they were used or late; after the last of them a new step begins."""
        if all(bucket.ids_with_gradient <= ids for bucket in self._buckets):
            self.synchronizer.is_complete = False  # Of the new step: passes may add gradients.
        for bucket in self._buckets:
            bucket.drop(ids, set_to_none)
        self.synchronizer.late.difference_update(ids)
        self._used = {id_: name for id_, name in self._used.items() if id_ not in ids}
        # While any is left, a backward pass would add to gradients of the last step: its own stay on this rank.
        self.synchronizer.holds_back = bool(self._used)

    def publish(self) -> None:
        """Start to send the slices that this rank has updated, in the parameters' dtype."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters.values()]
        ids_with_gradient = set().union(*(bucket.ids_with_gradient for bucket in self._buckets))
        self._used = {id_: name for id_, name in self._names.items() if id_ in ids_with_gradient}
        self.synchronizer.is_complete = False
        self.synchronizer.holds_back = bool(self._used)
        self._send([parameter for parameter in parameters if id(parameter) in ids_with_gradient])

    def _send(self, updated: Collection[nn.Parameter]) -> None:
        """Round the master copies to the weights, and start to send the slices; ``updated`` are those that changed."""
        if self._master_dtype is not None and self._segments:
            segments = self._segments.values()
            torch._foreach_copy_([segment.weights for segment in segments], [segment.updated for segment in segments])
        self.exchange.start(updated)
        self._versions = {parameter: parameter._version for parameter in self._segments}

    def load_masters(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Set this rank's master copies, from the parameters where none is given; then round all to the parameters."""
        if self._master_dtype is not None:
            for parameter, segment in self._segments.items():
                segment.updated.copy_(masters.get(parameter, segment.weights))
            self._send([member for bucket in self._buckets for member in bucket.parameters.values()])

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Complete the gradients and scale them; return their norm before, (), the same on every rank."""
        self.prepare_gradients()
        updated = [segment.updated for segment in self._segments.values()]
        dtypes = {self._master_dtype or bucket.sent_dtype for bucket in self._buckets}  # For the norm's.
        return clip_over_ranks(updated, whole=(), max_norm=max_norm, norm_type=2.0, groups=[None], dtypes=dtypes)

    @property
    def _is_under_way(self) -> bool:
        return any(bucket.is_under_way for bucket in self._buckets)
