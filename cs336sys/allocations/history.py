"""Sources of allocator events: the CUDA allocator's own history, the CPU allocator's through torch.profiler, and a
dry run on fake tensors, which have shapes but no memory.

Each is entered around a step, in which :meth:`AllocationHistory.mark` names moments; afterwards
:attr:`~AllocationHistory.events` and :meth:`~AllocationHistory.position` say what happened when.
"""

import weakref
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._profiler import _EventType, _ExtraFields_Allocation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336sys.allocations.timeline import Event
from cs336sys.allocations.without_values import code_line
from cs336sys.errors import CapabilityError
from cs336sys.timing.phases import TorchProfiler

# A train step of 48 layers makes about 30,000 allocations, each with three entries of a few KB of host memory.
MAX_ENTRIES = 400_000

_MARK = "cs336sys moment "


class AllocationHistory(AbstractContextManager):
    """Records what the allocator does while it is entered."""

    events: Sequence[Event] = ()  # Allocations and frees in their order, once it is left.
    lost_events: int = 0  # How many earlier events were dropped.

    @abstractmethod
    def mark(self) -> int:
        """Return a number for this moment; a later moment has a larger or equal one."""

    @abstractmethod
    def position(self, mark: int) -> int:
        """Return how many of ``events`` came before the moment."""

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor's memory in ``events``."""
        return dense_storage(tensor).data_ptr()


def dense_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage, or raise a CapabilityError for a sparse one, which has none."""
    if tensor.layout is not torch.strided:
        advice = "make it dense, as with nn.Embedding(sparse=False)"
        raise CapabilityError(f"a step makes a tensor of {tensor.layout}, whose memory is not followed; {advice}")
    return tensor.untyped_storage()


class CudaHistory(AllocationHistory):
    """``torch.cuda.memory._record_memory_history`` of one device, Python stacks only, bounded.

    A moment is the number of calls to the allocator until then, which its statistics count and its history lists one by
    one, so no clock is compared with another. Sizes are those asked for: the allocator rounds them up to 512 bytes.
    Once it is left, its ``snapshot`` is for pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device, max_entries: int = MAX_ENTRIES):
        self.device = device
        self.max_entries = max_entries
        self.snapshot: dict[str, Any] = {}
        self._start = 0

    def __enter__(self) -> Self:
        # context="alloc" keeps no second stack for each free; stacks="all" would resolve C++ symbols for minutes.
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=self.max_entries, clear_history=True
        )
        self._start = self.mark()
        return self

    def __exit__(self, *exception: object) -> None:
        calls = self.mark() - self._start
        try:
            self.snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        signs = {"alloc": 1, "free_requested": -1}  # The calls that mark() counts: free_completed is none.
        entries = [entry for entry in self.snapshot["device_traces"][index] if entry["action"] in signs]
        # Entries from before this history are left out, and those that the ring buffer dropped are counted.
        entries = entries[max(0, len(entries) - calls) :]
        self.lost_events = calls - len(entries)
        self.events = [
            Event(
                entry["addr"],
                signs[entry["action"]] * entry["size"],
                code_line((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())),
            )
            for entry in entries
        ]

    def mark(self) -> int:
        calls = torch.cuda.memory_stats_as_nested_dict(self.device)["allocation"]["all"]
        return calls["allocated"] + calls["freed"]

    def position(self, mark: int) -> int:
        return max(0, mark - self._start - self.lost_events)


class CpuHistory(AllocationHistory):
    """The memory events of torch.profiler, which see every call to torch's CPU allocator.

    A moment is a range of its own in the profile, so that moments and events have one clock. oneDNN is switched off,
    which on CPUs with bf16 instructions allocates reordered copies of a product's operands, as no GPU does.
    """

    def __init__(self) -> None:
        self._marks = 0
        self._mark_times: dict[int, int] = {}
        self._event_times: list[int] = []
        self._profiler = TorchProfiler([torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._had_onednn = torch.backends.mkldnn.enabled

    def __enter__(self) -> Self:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property that torch declares as its class
        self._profiler.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop recording, and turn the profile into events and the times of moments."""
        self._profiler.__exit__(*exception)
        torch.backends.mkldnn.enabled = self._had_onednn
        profiler = self._profiler.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        events = []
        nodes = list(profiler.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if node.name.startswith(_MARK):
                self._mark_times[int(node.name.removeprefix(_MARK))] = node.start_time_ns
            elif node.tag == _EventType.Allocation:
                fields = node.extra_fields
                assert isinstance(fields, _ExtraFields_Allocation)
                if fields.device.type == "cpu":
                    events.append((node.start_time_ns, Event(fields.ptr, fields.alloc_size)))
        events.sort(key=lambda event: event[0])
        self._event_times = [time for time, _ in events]
        self.events = [event for _, event in events]

    def mark(self) -> int:
        self._marks += 1
        with torch.profiler.record_function(f"{_MARK}{self._marks}"):
            return self._marks

    def position(self, mark: int) -> int:
        return bisect_left(self._event_times, self._mark_times[mark])


class FakeHistory(TorchDispatchMode, AllocationHistory):
    """History of the storages that operations return, under an active ``FakeTensorMode``: nothing is computed or held.

    It sees the results of operations, but not a kernel's own memory.

    Args:
        live_tensors: tensors that exist already.
        on_cpu: also count what convolutions unfold on a CPU without oneDNN, as :class:`CpuHistory` records them.
    """

    events: list[Event]

    def __init__(self, live_tensors: Sequence[Tensor], *, on_cpu: bool = False):
        super().__init__()
        self._on_cpu = on_cpu
        self._live: dict[int, weakref.ref] = {}
        self.events = []
        for tensor in live_tensors:
            self._follow(tensor, is_new=False)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._live.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        unfolded_size = _unfolded_bytes(func, args, result) if self._on_cpu else 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf, is_new=True)
                if unfolded_size:
                    # Once for each result: the input for the output and the weight's gradient, and its own gradient.
                    self.events += [Event(-1, unfolded_size), Event(-1, -unfolded_size)]  # No storage is at -1.
        return result

    def mark(self) -> int:
        return len(self.events)

    def position(self, mark: int) -> int:
        return mark

    def address(self, tensor: Tensor) -> int:
        return dense_storage(tensor)._cdata

    def _follow(self, tensor: Tensor, *, is_new: bool) -> None:
        """Note a tensor's memory as allocated if it is new, and as freed when its storage is gone."""
        storage = dense_storage(tensor)
        address, size = storage._cdata, storage.nbytes()  # A fake storage has no data_ptr().
        if address in self._live or not size:  # Followed already, or without memory.
            return

        def note_free(_: weakref.ref) -> None:
            if self._live.pop(address, None) is not None:  # __exit__ has cleared what outlives the step.
                self.events.append(Event(address, -size))

        self._live[address] = weakref.ref(storage, note_free)
        if is_new:
            self.events.append(Event(address, size))


def _unfolded_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes of a convolution's unfolded input (im2col, no groups or dilation), 0 for other operations.

    Source: aten/src/ATen/native/ConvolutionMM2d.cpp.
    """
    if func is torch.ops.aten.convolution.default:
        image, weight, _, stride, padding, dilation, is_transposed, _, groups = args
        output = result
    elif func is torch.ops.aten.convolution_backward.default:
        output, image, weight, _, stride, padding, dilation, is_transposed, _, groups, *_ = args
    else:
        return 0
    # A plain product has nothing to unfold, and the source is of 1-D and 2-D convolutions.
    is_product = {*weight.shape[2:], *stride} == {1} and not any(padding)
    if is_transposed or groups > 1 or {*dilation} != {1} or is_product or image.dim() > 4:
        return 0
    unfolded_elements = image.shape[0] * weight[0].numel() * output.shape[2:].numel()  # A patch for each output.
    return unfolded_elements * image.element_size()
