"""Communication of a training step: recorded, launched by itself, and seen by torch.profiler next to computing."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cs336sys.capture import taxonomy
from cs336sys.machine.device import synchronize
from cs336sys.parity.collectives import FUNCTIONAL, CollectiveMode, call_parameters, group_of_collective
from cs336sys.processes.files import written_whole
from cs336sys.timing.phases import TorchProfiler, activities_on, covered, elapsed_ms, mark


@dataclass(frozen=True)
class _Layout:
    """The layout in memory of a recorded call's tensor, without the memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Communication:
    """One collective that this rank launched; several tensors launched as one group count as one."""

    name: str  # Of torch's operator: ``allreduce_``, ``_allgather_base_``; functional ones are ``all_reduce``, ...
    bytes: int  # Of the whole array as nccl-tests counts: of an all-gather its output, of a reduce-scatter its input.
    dtype: str  # Of what is sent.
    ranks: int  # How many take part.
    _operator: Callable[..., Any]
    _arguments: dict[str, Any]

    @property
    def is_flags(self) -> bool:
        """Return whether ranks tell each other facts (``parallel.collectives.AnyRank``) or digests, and no numbers."""
        # Facts are reduced: bytes that are gathered are weights of fully sharded models. Digests are gathered.
        are_facts = self.dtype in ("uint8", "bool") and self.name.startswith("allreduce")
        return are_facts or (self.dtype == "int64" and "allgather" in self.name)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that a rank sends on average in a ring: an all-reduce sends everything twice.

        Of an all-to-all whose parts differ in size, what this rank sends to others.
        """
        sizes = self._arguments.get("input_split_sizes")
        if sizes:
            kept_elements = sizes[group_of_collective(self._arguments).rank()]
            return self._arguments["input"].bytes * (sum(sizes) - kept_elements) / sum(sizes)
        times = 2 if self.name.startswith(("allreduce", "all_reduce")) else 1
        return times * (self.ranks - 1) / self.ranks * self.bytes

    def launcher(self, tensors: dict[Any, Tensor] | None = None) -> Callable[[], Any]:
        """Return a function that launches the collective on zeros, without waiting, and returns one that waits for it.

        It uses ``tensors`` of other launchers where they fit, and adds new ones; None shares none.
        """
        tensors = {} if tensors is None else tensors
        leaves, structure = tree_flatten(self._arguments)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, _Layout):
                if (position, leaf) not in tensors:  # By position: no two tensors of a call share memory.
                    empty = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=leaf.device)
                    tensors[position, leaf] = empty.zero_()
                leaves[position] = tensors[position, leaf]
        arguments = tree_unflatten(leaves, structure)
        if "async_op" in call_parameters(self._operator):
            # Where the step waits at once (fully_shard) it is False, and NCCL returns a null pointer: wait() crashes.
            arguments["async_op"] = True
        return lambda: _wait_function(self._operator(**arguments))


class _Watcher(CollectiveMode):
    """Calls ``launched`` with the operator, the arguments by name and the result of every collective."""

    def __init__(self, launched: Callable[[Any, dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._launched = launched

    def after(self, operator: Any, arguments: dict[str, Any] | None, result: Any) -> None:
        if arguments is not None:
            self._launched(operator, arguments, result)


@contextmanager
def recorded_communication() -> Iterator[list[Communication]]:
    """Return a list that grows by every collective that this process launches within the ``with``, in order."""
    communications: list[Communication] = []
    with _Watcher(lambda operator, arguments, result: communications.append(_without_memory(operator, arguments))):
        yield communications


def communication_at_once() -> AbstractContextManager:
    """Let the launch of every collective within the ``with`` return when it is done; all ranks enter it together.

    For Gloo under torch.profiler with ``profile_memory``, which sees only what the launching thread allocates and
    frees: Gloo's threads hold tensors a moment longer than the step, and what they free would seem to be held for ever.
    Worse, the thread of a collective that ends after the profiler writes that end into memory that was the profiler's.
    """

    def finish(operator: Any, arguments: dict[str, Any], result: Any) -> None:
        _wait_function(result)()
        # How long Gloo's thread may hold tensors after their collective. Without this pause that thread freed tensors
        # in 2 of 90 steps of fsdp by six ranks on two cores; with it in none, nor in 960 steps of all strategies.
        time.sleep(0.001)

    return _Watcher(finish)


def run_alone(launchers: Sequence[Callable[[], Any]]) -> None:
    """Launch all one after another, then wait for all: on a GPU, let the current stream wait."""
    for wait in [launch() for launch in launchers]:
        wait()


def _wait_function(result: Any) -> Callable[[], Any]:
    """Return a function that waits for a collective by its result: tensors, a handle, or a tuple that ends in one."""
    if isinstance(result, Tensor) or (isinstance(result, list) and all(isinstance(item, Tensor) for item in result)):
        return partial(tree_map_only, Tensor, torch.ops._c10d_functional.wait_tensor, result)
    return result[-1].wait if isinstance(result, tuple) else result.wait


def _without_memory(operator: Any, arguments: dict[str, Any]) -> Communication:
    """Describe a collective, with the layouts of its tensors in place of these."""
    arguments = tree_map_only(
        Tensor, lambda tensor: _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device), arguments
    )
    layouts = [[leaf for leaf in tree_leaves(argument) if isinstance(leaf, _Layout)] for argument in arguments.values()]
    name, ranks = operator.overloadpacket.__name__, group_of_collective(arguments).size()
    array_bytes = max(sum(layout.bytes for layout in argument) for argument in layouts)  # Inputs, or longer outputs.
    if operator.namespace == FUNCTIONAL and name.startswith("all_gather"):
        array_bytes *= ranks  # Its output, which holds the inputs of all, is no argument.
    dtypes = [str(layout.dtype).removeprefix("torch.") for argument in layouts for layout in argument]
    return Communication(name, array_bytes, next(iter(dtypes), "none"), ranks, operator, arguments)


_COMMUNICATION = ("nccl", "gloo:")  # Names of NCCL's kernels, and of Gloo's work from its launch until it is done.
_COPIES = ("Memcpy PtoP", "Memcpy DtoD", "mean_kernel")  # Of what copy engines and their kernel do for NCCL.

TimeSpan = tuple[float, float]


@dataclass(frozen=True)
class StepTimeline:
    """Two lanes of one step; all times in milliseconds from its first event."""

    compute: list[TimeSpan]  # When at least one kernel (on a CPU: operator) ran.
    communicate: list[TimeSpan]
    phases: dict[str, float]  # When each ended: on a GPU, when it was done with what the phase had launched.
    compute_ms: float  # Covered by that lane.
    communication_ms: float
    overlap_ms: float  # Covered by both.


def profile_step(
    phases: Mapping[str, Callable[[], None]], device: torch.device, *, copies_communicate: bool = False
) -> StepTimeline | None:
    """Run one step under the profiler; None where it saw nothing, as it cannot trace on this machine.

    On a GPU it watches the GPU alone, which does not slow the CPU's launches down. Ranks that run the step without a
    profiler call :func:`finish_communication` after it. ``copies_communicate``: copy engines send gradients, so that
    copies are communication, not computing.
    """
    kernels, phase_ends = _profile_events(phases, device)
    prefixes = (*_COMMUNICATION, *(_COPIES if copies_communicate else ()))
    compute = [(start, end) for name, start, end in kernels if not name.startswith(prefixes)]
    communicate = [(start, end) for name, start, end in kernels if name.startswith(prefixes)]
    return _communication_timeline(compute, communicate, phase_ends) if compute else None


@dataclass(frozen=True)
class StepShares:
    """Parts of one step's time: every moment counts once, under the first of these that ran."""

    products_ms: float  # Matrix products.
    attention_ms: float
    other_ms: float  # Other kernels.
    communication_ms: float  # Communication, and nothing else.
    idle_ms: float
    kernels: list[tuple[str, float, int]]  # Those that took most time: names, ms and numbers.


def profile_shares(phases: Mapping[str, Callable[[], None]], device: torch.device) -> StepShares | None:
    """Run a step as :func:`profile_step` does, and share out its time by kind of kernel; None if nothing was seen."""
    kernels, _ = _profile_events(phases, device)
    if not kernels:
        return None
    # A moment in which several run counts for the first of these.
    kinds = (taxonomy.Category.MATMUL, taxonomy.Category.ATTENTION_SOFTMAX, "other", taxonomy.Category.COMMUNICATION)
    intervals: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
    durations_ns: dict[str, list[int]] = {}
    for name, start, end in kernels:
        is_communication = name.startswith(_COMMUNICATION)
        kind = taxonomy.Category.COMMUNICATION if is_communication else taxonomy.category_of(name)
        intervals[kind if kind in kinds else "other"].append((start, end))
        durations_ns.setdefault(taxonomy.short_name(name), []).append(end - start)
    # Of the first kind, the first two, ...: what each kind adds is its share, and what is left is idle.
    covered_ns = [covered(together) for together in itertools.accumulate(intervals.values())]
    span_ns = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    shares_ms = ((after - before) / 1e6 for before, after in itertools.pairwise([0, *covered_ns, span_ns]))
    products_ms, attention_ms, other_ms, communication_ms, idle_ms = shares_ms
    longest = sorted(durations_ns.items(), key=lambda item: sum(item[1]), reverse=True)[:24]  # A table's rows.
    kernels_ms = [(name, sum(times) / 1e6, len(times)) for name, times in longest]
    return StepShares(products_ms, attention_ms, other_ms, communication_ms, idle_ms, kernels_ms)


def _profile_events(
    phases: Mapping[str, Callable[[], None]], device: torch.device
) -> tuple[list[tuple[str, int, int]], dict[str, float]]:
    """Run one step, and return its kernels (on a CPU: operators) with start and end in ns, and phases' ends in ms."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with TorchProfiler([activity]) as profiler:
        marks = [mark(on_gpu)]
        for run in phases.values():
            run()
            marks.append(mark(on_gpu))
        synchronize(device)
        finish_communication()
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    # How the names of CPU events begin that only hand work to another thread, or wait in :func:`finish_communication`.
    no_work = ("c10d::", "record_param_comms", "gloo:barrier")
    kernels = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == device_type and not event.name().startswith(no_work)
    ]
    return kernels, {name: elapsed_ms(marks[0], end) for name, end in zip(phases, marks[1:], strict=True)}


def write_trace(phases: Mapping[str, Callable[[], None]], device: torch.device, path: Path) -> None:
    """Run one step under the profiler and write what CPU and GPU did as a Chrome trace, a ``.json.gz``.

    Ranks that run the step without a profiler call :func:`finish_communication` after it.
    """
    with TorchProfiler(activities_on(device)) as profiler:
        for run in phases.values():
            run()
        synchronize(device)
        finish_communication()
    with written_whole(path) as whole:
        profiler.export_chrome_trace(str(whole))


def finish_communication() -> None:
    """Return when every collective that Gloo runs on this rank is done; all ranks call it together.

    Before a profiler of the CPU ends: Gloo's threads write the end of a collective into the profiler's memory, be it
    freed or not (torch 2.11 and 2.13: ranks died of SIGSEGV some time later). NCCL has no such threads.
    """
    if "nccl" not in dist.get_backend():
        dist.barrier()


def _communication_timeline(
    compute: list[tuple[int, int]], communicate: list[tuple[int, int]], phases: dict[str, float]
) -> StepTimeline:
    """Return the timeline of a step from its intervals in nanoseconds."""
    both = [*compute, *communicate]
    start, end = min(start for start, _ in both), max(end for _, end in both)
    # Pieces of a lane that are closer than this fraction of the step are drawn as one: no picture could show the gap.
    gap = (end - start) // 2000
    lanes = _merged(compute, start, gap), _merged(communicate, start, gap)
    compute_ns, communication_ns = covered(compute), covered(communicate)
    overlap_ns = compute_ns + communication_ns - covered(both)
    return StepTimeline(*lanes, phases, compute_ns / 1e6, communication_ns / 1e6, overlap_ns / 1e6)


def _merged(intervals: list[tuple[int, int]], origin: int, gap: int) -> list[TimeSpan]:
    """Return the union of intervals, in ms from ``origin``, all in ns; gaps of at most ``gap`` are filled."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(round((start - origin) / 1e6, 4), round((end - origin) / 1e6, 4)) for start, end in merged]
