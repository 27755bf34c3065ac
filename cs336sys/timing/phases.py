"""Time the phases of a repeated step: CUDA events around each, the CPU clock around the step; torch.profiler."""

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
    """Return all that can be recorded of work on a device."""
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


class TorchProfiler(torch.profiler.profile):
    """``torch.profiler.profile`` without :meth:`events` and :meth:`key_averages`, and so without the time they take.

    torch would make a Python object of each event when it stops: a third of the CPU time of ``shard`` with tiny.
    What is read is ``profiler.kineto_results``, and what ``export_chrome_trace`` writes.

    Args:
        activities: what to record.
        options: others of ``torch.profiler.profile``.
    """

    def __init__(self, activities: Sequence[torch.profiler.ProfilerActivity], **options: Any):
        # acc_events silences a warning about further cycles, of which there are none.
        super().__init__(activities=activities, acc_events=True, **options)

    def prepare_trace(self) -> None:
        # torch asks its compiler whether that makes CUDA graphs, and imports it to ask: 1.1 CPU seconds.
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
        self.profiler.acc_events = False


# What is written to empty an L2 cache of what calls left there: several times an H200's 50 MB.
_L2_FLUSH_BYTES = 256_000_000
# A GPU's clocks in a millisecond, at most.
_CYCLES_PER_MS = 2_000_000

# A moment on the GPU, or by the CPU clock in seconds.
Mark = torch.cuda.Event | float


class StepTimer:
    """Runs a step again and again, each time the given phases in order, and times every one of them.

    On CUDA a phase lasts from the end of the phase before it (the first one: of what was launched before the step) to
    the end of its last kernel. Where the GPU waits for launches it is therefore the time in which the CPU launches it:
    compare with :func:`gpu_busy_ms`. ``step`` is the sum of the phases. ``wall`` is the CPU clock from a step's start
    to the end of its work where ``synchronize_steps``, else to the next step's start (the last step's to the end of all
    work).
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
        """One step."""
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
        """All steps so far, in milliseconds by phase name, and for ``step`` and ``wall``; waits for the device.

        Args:
            warmup: how many of the steps, the first ones, are kept apart.
        """
        on_gpu = self._device.type == "cuda"
        synchronize(self._device)
        clocks = self._clocks
        if not self._synchronize_steps:
            starts = [started for started, _ in clocks] + [time.perf_counter()]
            clocks = list(pairwise(starts))
        method = "cuda events" if on_gpu else "cpu clock"
        durations = {
            name: [elapsed_ms(step[number], step[number + 1]) for step in self._marks]
            for number, name in enumerate(self._phases)
        }
        durations["step"] = list(map(sum, zip(*durations.values(), strict=True)))
        samples = {
            name: Samples("ms", method, measured=tuple(values[warmup:]), warmup=tuple(values[:warmup]))
            for name, values in durations.items()
        }
        wall = [(ended - started) * 1e3 for started, ended in clocks]
        samples["wall"] = Samples("ms", "cpu clock", measured=tuple(wall[warmup:]), warmup=tuple(wall[:warmup]))
        return samples


def time_phases(
    phases: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    steps: int,
    device: torch.device,
    synchronize_steps: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Samples]:
    """Run ``warmup + steps`` steps and time the phases of every one of them, see :class:`StepTimer`.

    Returns:
        Samples in milliseconds by phase name, and for ``step`` and ``wall``.
    """
    # What was launched before is no part of the first step's wall, where there is no warm-up.
    synchronize(device)
    timer = StepTimer(phases, device, synchronize_steps=synchronize_steps)
    for index in range(warmup + steps):
        kind, number, count = ("warm-up", index, warmup) if index < warmup else ("step", index - warmup, steps)
        progress(f"{kind} {number + 1}/{count}")
        timer.run()
    return timer.samples(warmup)


def time_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Times of one call (ms), repeated for as long as asked for, each with a cold L2 cache on a GPU."""
    if device.type == "cuda":
        import triton.testing

        times_ms = triton.testing.do_bench(call, warmup=warmup_ms, rep=repetition_ms, return_mode="all")
        return Samples("ms", "triton do_bench", tuple(times_ms))
    # Not with this module, which every worker and rank imports: setuptools comes along, in a twentieth of torch's time.
    from torch.utils.benchmark import Timer

    warm_at = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < warm_at:
        call()
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange(min_run_time=repetition_ms / 1e3)
    return Samples("ms", "torch.utils.benchmark", tuple(1e3 * seconds for seconds in measurement.times))


def time_queued_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Times of what one call does on a GPU (ms), with a cold L2 cache and without waiting for the CPU to launch it.

    Each call is queued behind a wait on the GPU that lasts twice as long as the CPU needs to launch it. On a CPU it is
    timed as by :func:`time_calls`.

    Args:
        warmup_ms, repetition_ms: how long calls and what is between them are repeated, five times at least.
    """
    if device.type != "cuda":
        return time_calls(call, device, warmup_ms, repetition_ms)
    cache = torch.empty(_L2_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def run(wait_ms: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(int(wait_ms * _CYCLES_PER_MS))
        start.record()
        call()
        end.record()
        return start, end

    def timed(function: Callable[[], Any]) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3

    # The first call may compile.
    call()
    wait_ms = 2 * max(timed(call) for _ in range(3))

    def turn() -> None:
        run(wait_ms)
        torch.cuda.synchronize(device)

    turn_ms = timed(turn)
    for _ in range(int(warmup_ms / turn_ms)):
        run(wait_ms)
    events = [run(wait_ms) for _ in range(max(5, int(repetition_ms / turn_ms)))]
    torch.cuda.synchronize(device)
    return Samples("ms", "cuda events, queued", tuple(start.elapsed_time(end) for start, end in events))


def mark(on_gpu: bool) -> Mark:
    """A moment: when the GPU has done what was launched before, or now."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds from one mark to another of the same kind; the GPU must have reached both."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return (end - start) * 1e3
    assert not isinstance(end, float)
    return start.elapsed_time(end)


def gpu_busy_ms(step: Callable[[], None]) -> float | None:
    """Return how long at least one kernel or copy ran on the GPU during ``step``, by torch.profiler.

    The profiler slows the CPU down but not the kernels, so set this against the time of an unprofiled step.

    Returns:
        Milliseconds, or None when the profiler saw no GPU work (it cannot trace on this machine).
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
    """Length of the union of intervals given as (start, end)."""
    total = 0
    reached, _ = min(intervals, default=(0, 0))
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
