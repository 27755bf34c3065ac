"""What a cell of ``memprof`` keeps of a timeline: plain numbers, from which tables and pictures are made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cs336sys.accounting.memory import GIB
from cs336sys.measure.allocations.timeline import AllocationTimeline, largest_allocations, peak_position, thinned
from cs336sys.workload import LARGEST_ALLOCATIONS, MemoryWorkload

# What a cell keeps of its timeline: enough for a picture a page wide.
TIMELINE_POINTS = 400


@dataclass(frozen=True)
class PhasePeak:
    """Most bytes held at once in a phase.

    Attributes:
        reserved: what the CUDA allocator had taken from the device, None on a CPU.
    """

    phase: str
    allocated: int
    reserved: int | None


def timeline_peaks(timeline: AllocationTimeline) -> list[PhasePeak]:
    """The peaks of a timeline, which knows only the tensors' bytes."""
    totals = timeline.totals()
    return [PhasePeak(phase.name, totals[peak_position(totals, phase)], None) for phase in timeline.phases()]


def summary(
    workload: MemoryWorkload, timeline: AllocationTimeline, peaks: list[PhasePeak], block_names: Sequence[str]
) -> dict[str, Any]:
    """What a cell keeps of its timeline.

    Args:
        block_names: of the model's blocks, in order.
    """
    totals, categories = timeline.totals(), timeline.bytes_by_category()
    phases = []
    for phase, peak in zip(timeline.phases(), peaks, strict=True):
        position = peak_position(totals, phase)
        phases.append(asdict(peak) | {name: values[position] for name, values in categories.items()})
    highest = max(peaks, key=lambda peak: peak.allocated)
    reserved = [peak.reserved for peak in peaks if peak.reserved is not None]
    training = workload.training
    predicted = training.predicted_peak(workload.checkpointing) if training.is_ours else None
    return {
        "phases": phases,
        "peak_gib": highest.allocated / GIB,
        "peak_phase": highest.phase,
        "reserved_gib": max(reserved) / GIB if reserved else None,
        "predicted_gib": predicted and predicted.total_gib,
        "predicted_moment": predicted and predicted.moment,
        "lost_events": timeline.lost_events,
        "largest": [asdict(group) for group in largest_allocations(timeline, LARGEST_ALLOCATIONS)],
        "block": block_changes(timeline, block_names) if workload.checkpointing == "none" else None,
        "timeline": thinned(timeline, TIMELINE_POINTS),
        "regions": [asdict(region) for region in timeline.phases()],
    }


def block_changes(timeline: AllocationTimeline, block_names: Sequence[str]) -> dict[str, int | None] | None:
    """How memory changes over one block, in the middle of the model, in bytes.

    Returns:
        ``forward_growth`` and ``backward_change`` from the block's first allocation to the next block's, None in
        compiled code, whose modules are not seen; ``gradients``, those of the block's parameters. None without a
        backward pass or a second block.
    """
    block = len(block_names) // 2
    if block == 0:
        return None
    prefix = f"{block_names[block]}."
    gradients = sum(allocation.size for allocation in timeline.allocations if allocation.parameter.startswith(prefix))
    if not gradients:
        return None
    totals = timeline.totals()

    def held_at(index: int, phase: str) -> int | None:
        starts = (
            allocation.start
            for allocation in timeline.allocations
            if allocation.phase == phase and allocation.origin.module.startswith(f"{block_names[index]}.")
        )
        first = min(starts, default=None)
        return None if first is None else totals[first - 1]

    changes = {"forward_growth": ("forward", block - 1, block), "backward_change": ("backward", block, block - 1)}
    result: dict[str, int | None] = {"gradients": gradients}
    for name, (phase, start, end) in changes.items():
        before, after = held_at(start, phase), held_at(end, phase)
        result[name] = None if before is None or after is None else after - before
    return result
