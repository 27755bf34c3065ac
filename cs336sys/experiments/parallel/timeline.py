"""Computing and communication of a rank during one step, seen by torch.profiler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from cs336sys.measure.profile import taxonomy
from cs336sys.measure.timing import covered, elapsed_ms, mark
from cs336sys.measure.torch_profiler import TorchProfiler, activities_on
from cs336sys.processes.atomic_write import written_whole

# How the names of CPU events begin that only hand work to another thread, or wait in :func:`finish_communication`.
_OVERHEAD = ("c10d::", "record_param_comms", "gloo:barrier")

# Names of communication: NCCL's kernels, and Gloo's work, from its launch until it is done.
_COMMUNICATION = ("nccl", "gloo:")
# Names of what copy engines and their kernel do in NCCL's place.
_COPIES = ("Memcpy PtoP", "Memcpy DtoD", "mean_kernel")

# Pieces of a lane that are closer than this fraction of the step are drawn as one: no picture could show the gap.
_RESOLUTION = 1 / 2000

TimeSpan = tuple[float, float]


@dataclass(frozen=True)
class StepTimeline:
    """Two lanes of one step; all times in milliseconds from its first event.

    Attributes:
        compute, communicate: when at least one kernel (on a CPU: operator) of that kind ran.
        phases: when each phase ended: on a GPU, when it was done with what the phase had launched.
        compute_ms, communication_ms: covered by each lane.
        overlap_ms: covered by both.
    """

    compute: list[TimeSpan]
    communicate: list[TimeSpan]
    phases: dict[str, float]
    compute_ms: float
    communication_ms: float
    overlap_ms: float


def profile_step(
    phases: Mapping[str, Callable[[], None]], device: torch.device, *, copies_communicate: bool = False
) -> StepTimeline | None:
    """Run one step under the profiler; on a GPU it watches the GPU alone, which does not slow the CPU's launches down.

    Ranks that run the step without a profiler call :func:`finish_communication` after it.

    Args:
        copies_communicate: whether copies on the GPU are communication.

    Returns:
        None when the profiler saw nothing (it cannot trace on this machine).
    """
    kernels, ends = _profiled(phases, device)
    communication = (*_COMMUNICATION, *(_COPIES if copies_communicate else ()))
    lanes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for name, start, end in kernels:
        lanes[name.startswith(communication)].append((start, end))
    if not lanes[False]:
        return None
    return _timeline(lanes[False], lanes[True], ends)


@dataclass(frozen=True)
class StepShares:
    """Parts of one step's time: every moment counts once, under the first of these that ran.

    Attributes:
        products_ms: matrix products.
        attention_ms: attention's kernels.
        other_ms: other kernels.
        communication_ms: communication, and nothing else.
        idle_ms: nothing ran.
        kernels: the names of the kernels that took most time, with their times in milliseconds and numbers.
    """

    products_ms: float
    attention_ms: float
    other_ms: float
    communication_ms: float
    idle_ms: float
    kernels: list[tuple[str, float, int]]


def profile_shares(phases: Mapping[str, Callable[[], None]], device: torch.device, top: int = 24) -> StepShares | None:
    """Run one step as :func:`profile_step` does, and share out its time by kind of kernel.

    Args:
        top: how many kernels to name.

    Returns:
        None when the profiler saw nothing.
    """
    kernels, _ = _profiled(phases, device)
    if not kernels:
        return None
    wanted = (taxonomy.MATMUL, taxonomy.ATTENTION_SOFTMAX)
    kinds: dict[str, list[tuple[int, int]]] = {name: [] for name in (*wanted, "other", taxonomy.COMMUNICATION)}
    times: dict[str, list[int]] = {}
    for name, start, end in kernels:
        kind = taxonomy.category_of(name)
        if name.startswith(_COMMUNICATION):
            kind = taxonomy.COMMUNICATION
        kinds[kind if kind in kinds else "other"].append((start, end))
        times.setdefault(taxonomy.short_name(name), []).append(end - start)
    so_far: list[tuple[int, int]] = []
    before, shares_ms = 0, []
    for intervals in kinds.values():
        so_far = [*so_far, *intervals]
        now = covered(so_far)
        shares_ms.append((now - before) / 1e6)
        before = now
    products_ms, attention_ms, other_ms, communication_ms = shares_ms
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    longest = sorted(times.items(), key=lambda item: sum(item[1]), reverse=True)[:top]
    return StepShares(
        products_ms,
        attention_ms,
        other_ms,
        communication_ms,
        (span - before) / 1e6,
        [(name, sum(each) / 1e6, len(each)) for name, each in longest],
    )


def _profiled(
    phases: Mapping[str, Callable[[], None]], device: torch.device
) -> tuple[list[tuple[str, int, int]], dict[str, float]]:
    """Kernels of one step (on a CPU: operators) with start and end in nanoseconds; when each phase ended, in ms."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    _synchronize(device)
    with TorchProfiler([activity]) as profiler:
        marks = [mark(on_gpu)]
        for run in phases.values():
            run()
            marks.append(mark(on_gpu))
        _synchronize(device)
        finish_communication()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == wanted and not event.name().startswith(_OVERHEAD)
    ]
    return kernels, dict(zip(phases, [elapsed_ms(marks[0], end) for end in marks[1:]], strict=True))


def write_trace(phases: Mapping[str, Callable[[], None]], device: torch.device, path: Path) -> None:
    """Run one step under the profiler and write what CPU and GPU did as a Chrome trace, a ``.json.gz``.

    Ranks that run the step without a profiler call :func:`finish_communication` after it.
    """
    with TorchProfiler(activities_on(device)) as profiler:
        for run in phases.values():
            run()
        _synchronize(device)
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


def _timeline(
    compute: list[tuple[int, int]], communicate: list[tuple[int, int]], phases: dict[str, float]
) -> StepTimeline:
    """From intervals in nanoseconds."""
    both = covered([*compute, *communicate])
    computing, communicating = covered(compute), covered(communicate)
    start = min(start for start, _ in [*compute, *communicate])
    end = max(end for _, end in [*compute, *communicate])
    gap = int((end - start) * _RESOLUTION)
    return StepTimeline(
        _merged(compute, start, gap),
        _merged(communicate, start, gap),
        phases,
        computing / 1e6,
        communicating / 1e6,
        (computing + communicating - both) / 1e6,
    )


def _merged(intervals: list[tuple[int, int]], origin: int, gap: int) -> list[TimeSpan]:
    """The union of intervals, in milliseconds from ``origin``; gaps shorter than ``gap`` are filled."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(round((start - origin) / 1e6, 4), round((end - origin) / 1e6, 4)) for start, end in merged]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
