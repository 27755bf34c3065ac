"""The collectives of this project: the same interface for torch 2.11 to 2.13, and for NCCL and Gloo.

Only this module knows what each version calls a collective and which reduce operations each backend offers. All
collectives run on one process group, of ``W`` ranks: the default one, unless another is given, as for one dimension of
a mesh. Ranks are those within it. Where two names are tried, torch 2.11 has only the second.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.errors import CapabilityError, UsageError

# Torch 2.13 warns that the second names are deprecated.
# (output of W * n elements, input of n elements, async_op=False): every rank gets all ranks' inputs, in rank order.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# (output of n elements, input of W * n elements, op=SUM, async_op=False): rank r gets the sum of all ranks' r-th parts.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def require_process_group(user: str) -> None:
    """Refuse to build ``user`` where no process group has been initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{user} needs a process group: call it in a function run by cs336sys.parallel.ranks.launch.run, "
            "or call torch.distributed.init_process_group first"
        )


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group itself, the group of a mesh of one dimension, or the default group for None."""
    if group is None:
        return c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"a mesh of {group.ndim} dimensions {group.mesh_dim_names}: give one of them, mesh[name]")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{group!r} is no process group that this rank is in")
    return group


def group_device() -> torch.device:
    """Return the device from which the default process group sends tensors: this rank's GPU, or the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_stream_captured() -> bool:
    """Return whether the current stream is captured in a CUDA graph, of which the CPU cannot read anything."""
    return torch.cuda.is_available() and torch.cuda.graphs.is_current_stream_capturing()


def is_readable(tensor: Tensor) -> bool:
    """Return whether the CPU can read numbers of the tensor without waiting for a GPU or breaking a compiled graph."""
    return tensor.is_cpu and not (torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor))


class _Launched:
    """An asynchronous collective on some tensors: start it, go on computing, wait for it.

    It calls the methods of the process group directly. Functions like ``dist.all_reduce`` end in the same methods, but
    spend several times as long in Python on every tensor before they get there, and a GPU often waits for the CPU.

    Args:
        contents: what the tensors are, for the note on an error.
        group: the ranks; None is all of them.
    """

    _collective: str

    def __init__(self, contents: str, group: dist.ProcessGroup | None = None):
        self.contents = contents
        # Looked up when it is needed (_group): a pickled wrapper may be loaded where there is no process group.
        self._group_argument = group
        # NCCL reads tensors on a stream of its own: freed before it has finished, their memory would be reused.
        self._tensors: Sequence[Tensor] = ()
        self._works: Sequence[Any] = ()

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup:
        return process_group(self._group_argument)

    def wait(self) -> None:
        """Return when the results may be used: on a GPU, as soon as the current stream has been told to wait for them.

        Raises:
            RuntimeError: another rank died or timed out; a note says what was communicated.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            error.add_note(f"in the {self._collective} of {self.contents}")
            raise
        self._tensors = self._works = ()  # NCCL reads them no longer: their memory may be freed.

    def record_end(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Record ``event`` when the results have arrived, to time them; only ``stream``, which must be idle, waits."""
        with torch.cuda.stream(stream):
            for work in self._works:
                work.wait()
            event.record()


class _Mean(_Launched):
    """A collective that computes means.

    The backend averages where it can. Where it cannot (Gloo on CUDA tensors), and for fp16 on Gloo, where the sum of
    two gradients of 40,000 overflows, each rank divides before the sum, as torch's DDP does.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, contents: str, group: dist.ProcessGroup | None = None):
        super().__init__(contents, group)
        self._dtype = dtype
        self._device_type = device.type

    @functools.cached_property
    def _averages_inside(self) -> bool:
        backend = dist.get_backend(self._group)
        if self._device_type == "cuda":
            return "nccl" in backend
        return "gloo" in backend and self._dtype != torch.float16

    def _divide_or_average(self, tensors: list[Tensor]) -> dist.ReduceOp:
        """Return the reduce operation that gives the mean; where it is a sum, divide the tensors before."""
        if not self._averages_inside:
            torch._foreach_div_(tensors, self._group.size())
        return self._reduce_op

    @property
    def _reduce_op(self) -> dist.ReduceOp:
        return dist.ReduceOp(dist.ReduceOp.AVG if self._averages_inside else dist.ReduceOp.SUM)


class MeanReduction(_Mean):
    """Replaces tensors with their mean over all ranks, in place and in one launch.

    NCCL gets several tensors as one group of operations; Gloo packs them itself.
    """

    _collective = "all-reduce"

    def start(self, tensors: list[Tensor]) -> None:
        """Launch. There must be at least one tensor, all contiguous, and every rank gives the same shapes in order."""
        # One launch for several tensors, which on a GPU only NCCL has: of the backends, it alone averages there.
        is_coalesced = len(tensors) > 1 and (self._device_type != "cuda" or self._averages_inside)
        options = c10d.AllreduceCoalescedOptions() if is_coalesced else c10d.AllreduceOptions()
        options.reduceOp = self._divide_or_average(tensors)
        options.asyncOp = True
        self._tensors = tensors
        if self._dtype.is_complex:
            tensors = [_real(tensor) for tensor in tensors]
        if is_coalesced:
            self._works = [self._group.allreduce_coalesced(tensors, options)]
        else:
            self._works = [self._group.allreduce([tensor], options) for tensor in tensors]


class MeanScatter(_Mean):
    """Gives each rank its slice of the mean of each tensor, in one launch and without copies."""

    _collective = "reduce-scatter"

    def start(self, slices: Sequence[Tensor], tensors: list[Tensor]) -> None:
        """Launch: rank r's ``slices[i]``, of n elements, becomes the r-th of W slices of the mean of ``tensors[i]``.

        All must be contiguous. The tensors, of W * n elements, may be overwritten; complex ones are sent as real ones.
        """
        options = c10d.ReduceScatterOptions()
        options.reduceOp = self._divide_or_average(tensors)
        options.asyncOp = True
        self._tensors = [*slices, *tensors]
        group = self._group
        scatter = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
        self._works = [scatter([_real(slice_) for slice_ in slices], [_real(tensor) for tensor in tensors], options)]


class SliceGather(_Launched):
    """Completes tensors of which every rank has one slice, in place and, on GPUs, in one launch.

    Args:
        tensors: contiguous, of W * n elements; rank r has filled in the r-th n.
    """

    _collective = "all-gather"

    def __init__(self, tensors: Sequence[Tensor], contents: str, group: dist.ProcessGroup | None = None):
        super().__init__(contents, group)
        rank, world_size = self._group.rank(), self._group.size()
        self._whole = [_sendable(_real(tensor)) for tensor in tensors]
        self._slices = [tensor.chunk(world_size)[rank] for tensor in self._whole]

    def start(self) -> None:
        """Launch; the slices of other ranks are overwritten."""
        if through_host(self._whole[0]):  # Gloo has no all-gather for CUDA. The results are there at once.
            for tensor, slice_ in zip(self._whole, self._slices, strict=True):
                on_host = tensor.cpu()
                all_gather_single(on_host, slice_.cpu(), group=self._group)
                tensor.copy_(on_host)
            return
        group = self._group
        if not self._whole[0].is_cuda:
            # Gloo's coalesced all-gather may corrupt the heap (torch 2.13: a signal ended 8 of 339 small trainings, and
            # none of 347 with single all-gathers, for which the group has this method).
            self._works = [group._allgather_base(*pair) for pair in zip(self._whole, self._slices, strict=True)]
            return
        gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
        self._works = [gather(self._whole, self._slices)]


class SliceExchange(_Launched):
    """Gives each rank its slice of every rank's tensor: a reduce-scatter that leaves the sum to the receiver.

    It sends as many bytes as a reduce-scatter. The receiver can sum in a wider dtype, and slices may differ in size.
    """

    _collective = "all-to-all"

    def start(self, received: Tensor, tensor: Tensor, sizes: list[int], received_sizes: list[int]) -> None:
        """Launch: rank r's ``received`` becomes the r-th slice of every rank's ``tensor``, in rank order.

        Args:
            received: (sum(received_sizes),).
            tensor: (sum(sizes),), contiguous.
            sizes: number of elements in each slice.
            received_sizes: size of this rank's slice on each rank.
        """
        received, tensor = _real(received), _real(tensor)  # Complex numbers as pairs of real ones.
        if len({*sizes, *received_sizes}) == 1:
            sizes = received_sizes = []  # The process group's notation for equal parts.
        if through_host(tensor):  # Gloo has no all-to-all for CUDA. The results are there at once.
            on_host = received.cpu()
            dist.all_to_all_single(on_host, tensor.cpu(), received_sizes, sizes, group=self._group)
            received.copy_(on_host)
            return
        self._tensors = [received, tensor]
        options = c10d.AllToAllOptions()
        options.asyncOp = True
        self._works = [self._group.alltoall_base(received, tensor, received_sizes, sizes, options)]


class Broadcasts(_Launched):
    """Overwrites each of several tensors with one rank's.

    NCCL gets them as one group of operations, which run at the same time: when two ranks send, both directions of the
    link are in use, as in an all-gather. One after the other they would take twice as long.

    Args:
        tensors: laid out alike on every rank, all on one device.
        sources: for each tensor, the rank that sends it.
    """

    _collective = "broadcast"

    def __init__(
        self, tensors: Sequence[Tensor], sources: Sequence[int], contents: str, group: dist.ProcessGroup | None = None
    ):
        super().__init__(contents, group)
        self._targets = [_without_repetition(tensor.detach()) for tensor in tensors]
        self._sources = sources

    def start(self) -> None:
        """Launch. A target with gaps in memory is sent or received as a copy, which :meth:`wait` copies back."""
        dense = (memory_view(target) if is_dense(target) else target.contiguous() for target in self._targets)
        self._tensors = [_sendable(tensor) for tensor in dense]  # float8 and the like as bytes.
        group = self._group
        coalescing = c10d._coalescing_manager(group, device=group_device(), async_ops=True)
        with coalescing if dist.get_backend() == "nccl" else nullcontext() as coalesced:  # Gloo has no coalescing.
            works = []
            for tensor, source in zip(self._tensors, self._sources, strict=True):
                # Not by dist.broadcast, for the reason in _Launched. The root tensor is the first in a list of one.
                options = c10d.BroadcastOptions()
                options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
                works.append(group.broadcast([tensor], options))
        self._works = works if coalesced is None else [coalesced]

    def wait(self) -> None:
        received = self._tensors
        super().wait()
        for target, tensor in zip(self._targets, received, strict=False):  # A second wait finds no tensors.
            if not is_dense(target):
                # The copy that was received for it, perhaps as bytes.
                target.copy_(tensor.view(target.dtype).view(target.shape))


class AnyRank:
    """Finds which facts hold on at least one rank, by an all-reduce of one byte for each, which starts here.

    In a CUDA graph nothing is sent: what is captured is the same in every replay, and so are the facts.
    """

    def __init__(self, facts: Sequence[bool], device: torch.device, group: dist.ProcessGroup | None = None):
        self._facts = list(facts)
        self._work = None
        if device.type == "cuda" and is_stream_captured():
            if not all(self._facts):
                raise CapabilityError(
                    "a parameter without a gradient on this rank: whether others have one is asked in every step, and "
                    "a CUDA graph cannot wait for the answer; freeze the parameter or launch the step"
                )
            return
        # Where all hold here, the answer is known: nothing is copied to a GPU, and wait() reads nothing back.
        if all(self._facts):
            self._anywhere = torch.ones(len(self._facts), dtype=torch.uint8, device=device)
        else:
            self._anywhere = torch.tensor(self._facts, dtype=torch.uint8, device=device)
        self._work = dist.all_reduce(self._anywhere, dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> list[bool]:
        """Return, for each fact, whether any rank has it; if this rank lacks one, wait until a GPU has the answer."""
        if self._work is not None:
            self._work.wait()
        return self._facts if all(self._facts) else [bool(fact) for fact in self._anywhere.tolist()]


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return every rank's n numbers (a scalar is one), (W, n), in rank order, on their device; all ranks call it."""
    sent = numbers.detach().view(-1).to(group_device())
    gathered = sent.new_empty(dist.get_world_size(group) * len(sent))
    all_gather_single(gathered, sent, group=group)
    return gathered.view(-1, len(sent)).to(numbers.device)


def through_host(tensor: Tensor) -> bool:
    """Return whether this tensor must be copied to the CPU first: Gloo has only broadcast and all-reduce for CUDA."""
    return tensor.is_cuda and "nccl" not in dist.get_backend()


def _without_repetition(tensor: Tensor) -> Tensor:
    """Return the elements that an expanded tensor stores, or the tensor itself if it is not expanded."""
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride()) if 0 in tensor.stride() else tensor


def _real(tensor: Tensor) -> Tensor:
    """Return the tensor, or a real view of a complex one: backends know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# What can be computed, sent and summed everywhere. Backends know no float8, no complex numbers and not all integers.
_FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
_SENDABLE = frozenset((*_FLOATS, torch.int64, torch.uint8))


def require_float(name: str, dtype: torch.dtype | None) -> None:
    """Refuse a dtype in which weights or gradients cannot be computed or summed; None stands for their own."""
    if dtype not in (None, *_FLOATS):
        raise UsageError(f"{name} {dtype}: choose {', '.join(map(str, _FLOATS[:-1]))} or {_FLOATS[-1]}")


def _sendable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor itself, or its bytes if not all backends know its dtype."""
    return tensor if tensor.dtype in _SENDABLE else tensor.view(-1).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory, each once, in any order; not expanded tensors or columns."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def memory_view(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor over a dense one's memory: itself, or (numel,) in memory order if it is permuted.

    Backends send memory in the order in which it is stored, and NCCL refuses tensors that are not contiguous.
    """
    tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank. Values are pickled."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
