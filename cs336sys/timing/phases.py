"""Time the phases of a repeated step, by CUDA events and the CPU's clock; profile with torch."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType

from cs336sys.machine.device import synchronize
from cs336sys.results.model import Samples


def activities_on(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return the activities of the profiler that exist on a device."""
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


class TorchProfiler(torch.profiler.profile):
    """``torch.profiler.profile`` without :meth:`events` and :meth:`key_averages`, and so without the time they take.

    torch would make a Python object of each event when it stops: a third of the CPU time of ``shard`` with tiny.
    Read ``profiler.kineto_results``, or the file of ``export_chrome_trace``, instead.
    """

    def __init__(self, activities: Sequence[torch.profiler.ProfilerActivity], **options: Any):
        # acc_events silences a warning about further cycles, of which there are none.
        super().__init__(activities=activities, acc_events=True, **options)

    def prepare_trace(self) -> None:
        # torch would import what this list has, its compiler, in 1.1 CPU seconds, to ask whether it makes CUDA graphs.
        modules: set[str] = getattr(torch, "_lazy_modules", set())
        hidden = {"_inductor"} & modules if "torch._inductor" not in sys.modules else set()
        modules -= hidden
        try:
            super().prepare_trace()
        finally:
            modules |= hidden

    def start_trace(self) -> None:
        super().start_trace()
        assert self.profiler is not None, "it was prepared"
        self.profiler.acc_events = False  # Or torch would make the Python objects when it stops.


Mark = torch.cuda.Event | float  # A moment on the GPU, or by the CPU clock in seconds.


class StepTimer:
    """A timer that runs the phases of a step in order, again and again, and times every one of them.

    On CUDA a phase lasts from the end of the phase before it (of the first one: of earlier work) to the end of its last
    kernel. Where the GPU waits for launches, this is the time in which the CPU launches it: compare with
    :func:`gpu_busy_ms`. ``step`` is the sum of the phases. ``wall`` is the time by the CPU's clock from a step's start
    to its work's end where ``synchronize_steps``, else to the next step's start (the last step: to the end of work).
    """

    def __init__(
        self, phases: Mapping[str, Callable[[], None]], device: torch.device, *, synchronize_steps: bool = True
    ):
        self._phases = phases
        self._device = device
        self._synchronize_steps = synchronize_steps
        self._marks: list[list[Mark]] = []
        self._clocks: list[tuple[float, float]] = []

    def run(self) -> None:
        """Run one step, and mark the ends of its phases."""
        on_gpu = self._device.type == "cuda"
        started = time.perf_counter()
        step_marks = [mark(on_gpu)]
        for phase in self._phases.values():
            phase()
            step_marks.append(mark(on_gpu))
        if self._synchronize_steps:
            synchronize(self._device)
        self._marks.append(step_marks)
        self._clocks.append((started, time.perf_counter()))

    def samples(self, warmup: int) -> dict[str, Samples]:
        """Return the times (ms) of all steps, the first ``warmup`` apart: of phases, of ``step`` and of ``wall``."""
        synchronize(self._device)
        clocks = self._clocks
        if not self._synchronize_steps:  # A step lasts to the start of the next one, the last to the end of all work.
            starts = [started for started, _ in clocks] + [time.perf_counter()]
            clocks = list(pairwise(starts))
        times_ms = {
            name: [elapsed_ms(step[index], step[index + 1]) for step in self._marks]
            for index, name in enumerate(self._phases)
        }
        times_ms["step"] = list(map(sum, zip(*times_ms.values(), strict=True)))
        times_ms["wall"] = [(ended - started) * 1e3 for started, ended in clocks]
        methods = dict.fromkeys(times_ms, "cuda events" if self._device.type == "cuda" else "cpu clock")
        methods["wall"] = "cpu clock"
        return {
            name: Samples("ms", methods[name], measured=tuple(values[warmup:]), warmup=tuple(values[:warmup]))
            for name, values in times_ms.items()
        }


def time_phases(
    phases: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    steps: int,
    device: torch.device,
    synchronize_steps: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Samples]:
    """Run ``warmup + steps`` steps, and return the milliseconds of their phases as :class:`StepTimer` does."""
    synchronize(device)  # Without a warm-up, earlier work would count for the first step's wall.
    timer = StepTimer(phases, device, synchronize_steps=synchronize_steps)
    for index in range(warmup + steps):
        kind, number, count = ("warm-up", index, warmup) if index < warmup else ("step", index - warmup, steps)
        progress(f"{kind} {number + 1}/{count}")
        timer.run()
    return timer.samples(warmup)


def mark(on_gpu: bool) -> Mark:
    """Return a mark of the moment at which the GPU has done all work launched so far, or on a CPU of now."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Return the milliseconds from one mark to another of the same kind; the GPU must have reached both."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return (end - start) * 1e3
    assert not isinstance(end, float)
    return start.elapsed_time(end)


def gpu_busy_ms(step: Callable[[], None]) -> float | None:
    """Return the milliseconds in which the GPU ran at least one kernel or copy in ``step``, by torch.profiler.

    The profiler slows the CPU down but not the kernels: compare with the time of an unprofiled step. None where the
    profiler saw no GPU work, because it cannot trace on this machine.
    """
    torch.cuda.synchronize()
    with TorchProfiler([torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    intervals = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    return covered(intervals) / 1e6 if intervals else None


def covered(intervals: list[tuple[int, int]]) -> int:
    """Return the length of the union of intervals of (start, end)."""
    total = 0
    covered_to, _ = min(intervals, default=(0, 0))
    for start, end in sorted(intervals):
        total += max(0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total
