"""Time calls of one operation, on a GPU each with a cold L2 cache."""

import time
from collections.abc import Callable
from typing import Any

import torch

from cs336sys.results.model import Samples

L2_FLUSH_BYTES = 256_000_000  # Bytes that are written to empty an L2 cache: several times an H200's 50 MB.
_CYCLES_PER_MS = 2_000_000  # A GPU's clock cycles in a millisecond, at most.


def time_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Time calls (ms each) for as long as asked for, on a GPU each with a cold L2 cache."""
    if device.type == "cuda":
        import triton.testing

        times_ms = triton.testing.do_bench(call, warmup=warmup_ms, rep=repetition_ms, return_mode="all")
        return Samples("ms", "triton do_bench", tuple(times_ms))
    # Imported late: it brings setuptools, which takes every worker and rank a twentieth of torch's time.
    from torch.utils.benchmark import Timer

    warm_up_end = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < warm_up_end:
        call()
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange(min_run_time=repetition_ms / 1e3)
    return Samples("ms", "torch.utils.benchmark", tuple(1e3 * seconds for seconds in measurement.times))


def time_queued_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Time a call's work on a GPU (ms), with a cold L2 cache and without waiting for the CPU to launch it.

    Each call is queued behind a wait on the GPU that lasts twice as long as the CPU needs to launch it, for the given
    times or at least five times. On a CPU it is timed as by :func:`time_calls`.
    """
    if device.type != "cuda":
        return time_calls(call, device, warmup_ms, repetition_ms)
    cache = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def run_queued(wait_ms: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()  # It fills the L2 cache.
        torch.cuda._sleep(int(wait_ms * _CYCLES_PER_MS))  # Meanwhile the CPU launches the call.
        start.record()
        call()
        end.record()
        return start, end

    def run_and_wait() -> None:
        run_queued(wait_ms)
        torch.cuda.synchronize(device)

    def cpu_ms(function: Callable[[], Any]) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3

    call()  # The first call may compile.
    wait_ms = 2 * max(cpu_ms(call) for _ in range(3))
    queued_ms = cpu_ms(run_and_wait)  # Of a call and its wait; the given times over this are numbers of calls.
    for _ in range(int(warmup_ms / queued_ms)):
        run_queued(wait_ms)
    events = [run_queued(wait_ms) for _ in range(max(5, int(repetition_ms / queued_ms)))]
    torch.cuda.synchronize(device)
    return Samples("ms", "cuda events, queued", tuple(start.elapsed_time(end) for start, end in events))
