"""torch.profiler for one stretch of work, of which the trace or Kineto's own events are read."""

import sys
from collections.abc import Sequence
from typing import Any

import torch


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
