"""Measures one cell of ``memprof``: peaks, the timeline of a recorded step, a block's saved tensors, step time."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cs336sys.accounting.memory import GIB
from cs336sys.errors import CapabilityError
from cs336sys.experiments.checks.step import check_few_blocks
from cs336sys.experiments.flop_counting import counted_columns
from cs336sys.experiments.memory.prediction import PhasePeak, predicted_timeline, summary, timeline_peaks
from cs336sys.experiments.memory.step import MemoryStep
from cs336sys.experiments.training import set_matmul_precision, time_steps, training_warnings, with_notes
from cs336sys.experiments.user_models import telling_user_errors
from cs336sys.measure.allocations.history import AllocationHistory, CpuHistory, CudaHistory
from cs336sys.measure.allocations.recorder import StepRecorder
from cs336sys.measure.allocations.snapshot import as_snapshot, write_snapshot
from cs336sys.measure.allocations.timeline import AllocationTimeline
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.device import choose_device
from cs336sys.measure.memory import free_gpu_memory
from cs336sys.workload import MemoryWorkload

_WITHOUT_ONEDNN = (
    "recorded without oneDNN, which reorders copies of operands as no GPU does: a real step on this "
    "CPU takes more memory"
)


def measure_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``memprof``: runs in the worker process.

    Samples (ms): those of ``bench``. Derived columns: see ``docs/columns.md``.
    """
    workload = MemoryWorkload.from_configuration(configuration)
    with telling_user_errors(workload.training):
        return _measure(workload, progress)


def _measure(workload: MemoryWorkload, progress: Progress) -> Outcome:
    training = workload.training
    device = choose_device(training.device)
    set_matmul_precision(training)
    found, wrong = check_few_blocks(training, device, progress)
    if wrong is not None:
        return wrong
    derived: dict[str, Any] = {}
    if workload.trace:
        progress("tracing fake tensors")
        derived, notes = _traced(workload)
        found = [*notes, *found]
    progress("building the model")
    step = MemoryStep(workload, device)
    derived |= counted_columns(step, progress)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        found = [*found, _WITHOUT_ONEDNN]
    derived = with_notes(derived, found)
    for number in range(training.warmup):
        progress(f"warm-up {number + 1}/{training.warmup}")
        step()
    if training.cuda_graph == "on":
        # Warm-up was launched on a stream that no capture uses: its cuBLAS workspaces are no part of a captured step.
        free_gpu_memory()
    counted = None
    if device.type == "cuda":
        progress("counting peaks")
        counted = counted_peaks(step)
    progress("recording a step")
    timeline, history = record(step, follow_operations=training.compile == "off")
    peaks = counted or timeline_peaks(timeline)
    derived |= summary(workload, timeline, peaks, step.block_names)
    if workload.snapshot is not None:
        progress("writing the snapshot")
        snapshot = history.snapshot if isinstance(history, CudaHistory) else as_snapshot(timeline)
        path = Path(workload.snapshot) / f"{workload.name}.pickle"
        write_snapshot(snapshot, path)
        derived["snapshot"] = str(path)
    del timeline, history
    if step.graphs is not None:
        derived |= {"capture_s": step.graphs.capture_s, "graph_pool_gib": step.graphs.pool_bytes / GIB}
    samples = time_steps(step, step.phases, progress, warmup=0)
    last_loss = step.loss
    if training.mode != "forward":
        progress("looking into a block")
        derived["saved_tensors"] = [asdict(tensor) for tensor in step.block_saved_tensors()]
    return Outcome("ok", samples, with_notes(derived, training_warnings(last_loss, training)))


def _traced(workload: MemoryWorkload) -> tuple[dict[str, Any], list[str]]:
    """The peaks of the step on fake tensors, or a note where the user's model does not run on them."""
    try:
        traced = predicted_timeline(workload)
    except CapabilityError as error:
        if workload.training.is_ours:
            raise
        return {}, [str(error)]
    return {"traced": [asdict(peak) for peak in timeline_peaks(traced.timeline)]}, traced.notes(workload.training)


def counted_peaks(step: MemoryStep) -> list[PhasePeak]:
    """The CUDA allocator's own counters in each phase of one step, which nothing else observes."""
    peaks = []

    @contextlib.contextmanager
    def counted(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(step.device)
        yield
        allocated = torch.cuda.max_memory_allocated(step.device)
        peaks.append(PhasePeak(name, allocated, torch.cuda.max_memory_reserved(step.device)))

    step.release_graphs()
    step.run_phases(counted)
    return peaks


def record(step: MemoryStep, *, follow_operations: bool) -> tuple[AllocationTimeline, AllocationHistory]:
    """One step with the history of its allocations, see :class:`StepRecorder`."""
    step.release_graphs()
    on_gpu = step.device.type == "cuda"
    history: AllocationHistory = CudaHistory(step.device) if on_gpu else CpuHistory()
    held = step.held()
    held_size = torch.cuda.memory_allocated(step.device) if on_gpu else None
    recorder = StepRecorder(history, step.names, follow_operations=follow_operations)
    step.run_recorded(recorder)
    timeline = recorder.timeline(held=held, held_size=held_size, optimizer_state=step.optimizer_state())
    return timeline, history
