"""One cell of ``memprof``: peaks, the timeline of a recorded step, a block's saved tensors, step time."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.step import sharded_optimizer_state
from cs336sys.allocations.dump import as_snapshot, write_snapshot
from cs336sys.allocations.history import AllocationHistory, CpuHistory, CudaHistory
from cs336sys.allocations.recorder import StepRecorder
from cs336sys.allocations.timeline import AllocationTimeline
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.findings import sentence
from cs336sys.machine.device import choose_device, free_gpu_memory
from cs336sys.parity.step import check_few_blocks
from cs336sys.results.model import hide_home
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings import memory_changes
from cs336sys.settings.memory_changes import SettingChange
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.training import memory_prediction as prediction
from cs336sys.training.checkpoints import MemoryStep
from cs336sys.training.flop_counting import counted_columns
from cs336sys.training.step import set_matmul_precision, time_steps, training_warnings, with_notes
from cs336sys.training.user_models import telling_user_errors


def measure_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``memprof``: runs in the worker process.

    Samples (ms): those of ``bench``. Derived columns: see ``docs/columns.md``.
    """
    workload = MemoryWorkload.from_configuration(configuration)
    with telling_user_errors(workload.training):
        training = workload.training
        device = choose_device(training.device)
        set_matmul_precision(training)
        notes, failure = check_few_blocks(training, device, progress)
        if failure is not None:
            return failure
        derived: dict[str, Any] = {}
        if workload.trace:
            progress("tracing fake tensors")
            derived, notes_of_trace = _traced(workload)
            notes = [*notes_of_trace, *notes]
        progress("building the model")
        step = MemoryStep(workload, device)
        derived |= counted_columns(step, progress)
        if device.type == "cpu" and torch.backends.mkldnn.is_available():
            notes = [*notes, sentence(__package__, "without oneDNN")]
        derived = with_notes(derived, notes)
        for number in range(training.warmup):
            progress(f"warm-up {number + 1}/{training.warmup}")
            step()
        if training.uses_graphs:
            # Warm-up was launched on a stream that no capture uses: its cuBLAS workspaces are in no captured step.
            free_gpu_memory()
        counted = None
        if device.type == "cuda":
            progress("counting peaks")
            counted = counted_peaks(step)
        progress("recording a step")
        timeline, history = record(step, follow_operations=not training.is_compiled)  # Or it would run eagerly.
        peaks = counted or prediction.timeline_peaks(timeline)
        derived |= prediction.summary(workload, timeline, peaks, prediction.block_changes(timeline, step.block_names))
        if workload.snapshot is not None:
            progress("writing the snapshot")
            snapshot = history.snapshot if isinstance(history, CudaHistory) else as_snapshot(timeline)
            path = Path(workload.snapshot) / f"{workload.name}.pickle"
            write_snapshot(snapshot, path)
            derived["snapshot"] = str(path)
        del timeline, history  # The history of a large step is hundreds of MB.
        if step.graphs is not None:
            derived |= {"capture_s": step.graphs.capture_s, "graph_pool_gib": step.graphs.pool_bytes / GIB}
        samples = time_steps(step, step.phases, progress, warmup=0)
        if training.has_backward:
            progress("looking into a block")
            derived["saved_tensors"] = [asdict(tensor) for tensor in step.block_saved_tensors()]
        return Outcome("ok", samples, with_notes(derived, training_warnings(step.loss, training)))


def _traced(workload: MemoryWorkload) -> tuple[dict[str, Any], list[str]]:
    """Return the derived peaks of the step on fake tensors, none where a user's model cannot run on them, and notes."""
    try:
        traced = prediction.predicted_timeline(workload)
    except CapabilityError as error:
        if workload.training.is_ours:
            raise
        return {}, [str(error)]
    peaks = prediction.timeline_peaks(traced.timeline)
    return {"traced": [asdict(peak) for peak in peaks]}, traced.notes(workload.training)


def counted_peaks(step: MemoryStep) -> list[prediction.PhasePeak]:
    """Run a step, and return the peaks of the CUDA allocator's own counters in each phase."""
    peaks = []

    @contextlib.contextmanager
    def count_peak(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(step.device)
        yield
        allocated = torch.cuda.max_memory_allocated(step.device)
        peaks.append(prediction.PhasePeak(name, allocated, torch.cuda.max_memory_reserved(step.device)))

    step.release_graphs()  # Replays of graphs would allocate nothing; a capture does what a launched step does.
    step.run_phases(count_peak)
    return peaks


def record(step: MemoryStep, *, follow_operations: bool) -> tuple[AllocationTimeline, AllocationHistory]:
    """Run a step, and return its timeline and the history of its allocations; see :class:`StepRecorder`."""
    step.release_graphs()  # Replays of graphs would allocate nothing.
    on_gpu = step.device.type == "cuda"
    history: AllocationHistory = CudaHistory(step.device) if on_gpu else CpuHistory()
    live_tensors = step.held()
    held_size = torch.cuda.memory_allocated(step.device) if on_gpu else None
    recorder = StepRecorder(history, step.names, follow_operations=follow_operations)
    step.run_recorded(recorder)
    timeline = recorder.timeline(live_tensors=live_tensors, held_size=held_size, optimizer_state=step.optimizer_state())
    return timeline, history


# So many plans are tried where memory has no formula: a trace takes seconds.
MOST_TRACES = 60


def plan_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Plan one cell of ``memprof --plan``: runs in the worker process.

    Derived columns: ``limit_bytes``; ``base_bytes``, the peak as configured; ``changes``, each alone; ``plan``, changes
    one after another until the step fits, None where nothing fits.
    """
    workload = MemoryWorkload.from_configuration(configuration)
    return Outcome("ok", derived=_Planner(workload, configuration["limit_bytes"], progress).plan())


class _Planner:
    """Predicts a step with changes of its settings, and finds the cheapest ones that fit into a limit in bytes."""

    def __init__(self, workload: MemoryWorkload, limit_bytes: float, progress: Progress):
        self._workload, self._limit_bytes, self._progress = workload, limit_bytes, progress
        # On a CPU, what torch computes there differs from the formulas, which are a GPU's.
        training = workload.training
        self._by_formula = training.memory_is_known and training.device != "cpu"
        self._predictions: dict[tuple[MemoryWorkload, SettingChange | None], int | None] = {}
        self._traces = 0  # How many predictions were no formulas: each takes seconds.
        self._failure = ""  # Why the last trace could not run.

    def plan(self) -> dict[str, Any]:
        """Return the cell's derived columns: the peak as configured, what each change saves by itself, and the plan."""
        self._progress("predicting the step as it is")
        base_bytes = self._peak_bytes(())
        if base_bytes is None:
            raise CapabilityError(self._failure)
        changes = memory_changes.possible_changes(self._workload)
        peaks: dict[SettingChange, int] = {}
        for number, change in enumerate(changes, start=1):
            self._progress(f"predicting {change.option}, {number} of {len(changes)}")
            if (peak_bytes := self._peak_bytes((change,))) is not None:
                peaks[change] = peak_bytes
        plan = () if base_bytes <= self._limit_bytes else self._cheapest(list(peaks))  # None where nothing fits.
        derived: dict[str, Any] = {
            "limit_bytes": self._limit_bytes,
            "base_bytes": base_bytes,
            "changes": [
                asdict(c) | {"peak_bytes": peak, "saved_bytes": base_bytes - peak} for c, peak in peaks.items()
            ],
            "plan": None,
        }
        if plan is not None:
            # The peak once a change and those before it are made.
            peaks_bytes = [self._peak_bytes(plan[:count]) for count in range(1, len(plan) + 1)]
            derived["plan"] = [asdict(c) | {"peak_bytes": peak} for c, peak in zip(plan, peaks_bytes, strict=True)]
            planned, ranks = self._changed(plan)
            command = hide_home(memory_changes.command_line(planned or self._workload))  # It fits, so it is no None.
            # More ranks are another command's: ``shard --strategy ...`` in place of ``memprof``.
            program, memprof, options = command.split(" ", 2)
            derived["command"] = " ".join([program, memprof if ranks is None else ranks.option, options])
        least_bytes = min((size for size in self._predictions.values() if size is not None), default=base_bytes)
        return derived | {"by_formula": self._by_formula, "least_bytes": least_bytes, "tried": len(self._predictions)}

    def _changed(self, plan: Sequence[SettingChange]) -> tuple[MemoryWorkload | None, SettingChange | None]:
        """Return the workload with the plan's changes, None where they exclude each other, and the change of ranks."""
        ranks = next((change for change in plan if change.setting == "ranks"), None)
        return memory_changes.changed(self._workload, [change for change in plan if change is not ranks]), ranks

    def _cheapest(self, changes: Sequence[SettingChange]) -> tuple[SettingChange, ...] | None:
        """Return the first plan, the cheapest, that fits; None if none does."""
        for plan in memory_changes.plans(changes):
            self._progress(f"trying {' '.join(change.option for change in plan)}")
            size = self._peak_bytes(plan)
            if size is not None and size <= self._limit_bytes:
                # More GPUs come last: everything else is one command's settings.
                return tuple(sorted(plan, key=lambda change: change.setting == "ranks"))
        return None

    def _peak_bytes(self, plan: Sequence[SettingChange]) -> int | None:
        """Return a rank's peak, or None: changes exclude each other, no prediction, or :data:`MOST_TRACES` used up."""
        workload, ranks = self._changed(plan)
        is_ours = self._workload.training.is_ours
        # More ranks share a step of a user's model only if that is one micro-batch, see bytes_with_shared_state().
        if workload is None or (ranks is not None and not is_ours and workload.micro_batches > 1):
            return None
        if ranks is not None and is_ours:
            return memory_changes.sharded_bytes(workload, ranks)
        key = workload, ranks  # Several plans may lead to the same.
        if key not in self._predictions and self._traces < MOST_TRACES:
            self._predictions[key] = self._predict(workload, ranks)
        return self._predictions.get(key)

    def _predict(self, workload: MemoryWorkload, ranks: SettingChange | None) -> int | None:
        """Return the peak in bytes by formula or trace; None where there is no formula, or the model cannot run."""
        if self._by_formula:
            return workload.peak.total if workload.training.memory_is_known else None
        self._traces += 1
        try:
            if ranks is not None:  # Of a user's model: for ours, _peak_bytes() has a formula.
                return bytes_with_shared_state(workload, memory_changes.number_of_ranks(ranks))
            traced = prediction.predicted_timeline(workload)
        except (CapabilityError, UsageError) as error:
            self._failure = str(error)
            return None
        return max(peak.allocated for peak in prediction.timeline_peaks(traced.timeline))


def bytes_with_shared_state(workload: MemoryWorkload, ranks: int) -> int:
    """Return the peak, with ``--strategy optimizer``, of the rank that updates most, by tracing its part of a batch."""
    training = workload.training
    rank_size = replace(training.size, batch_size=training.size.batch_size // ranks)
    timeline = prediction.predicted_timeline(replace(workload, training=replace(training, size=rank_size))).timeline
    whole_state = timeline.bytes_by_category()["optimizer state"]
    # Parameters are fp32, and their state is two moments of 4 bytes: the rank's share of the whole.
    sizes = [allocation.size // 4 for allocation in timeline.allocations if allocation.category == "parameters"]
    share = max(state.optimizer_state for state in sharded_optimizer_state(sizes, ranks)) / (8 * sum(sizes))
    return max(int(total - (1 - share) * state) for total, state in zip(timeline.totals(), whole_state, strict=True))
