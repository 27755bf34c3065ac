"""Files that pytorch.org/memory_viz and ``torch.cuda._memory_viz`` open."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336sys.errors import UsageError
from cs336sys.measure.allocations.timeline import Allocation, AllocationTimeline
from cs336sys.processes.atomic_write import written_whole

# The viewer in the browser cannot read protocol 5 (https://github.com/pytorch/pytorch/issues/183842).
PICKLE_PROTOCOL = 4


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Raises:
    UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as whole, whole.open("wb") as file:
            pickle.dump(snapshot, file, protocol=PICKLE_PROTOCOL)
    except OSError as error:
        raise UsageError(f"cannot write the snapshot {path}: {error.strerror or error}") from error


def as_snapshot(timeline: AllocationTimeline) -> dict[str, Any]:
    """A timeline in the form of ``torch.cuda.memory._snapshot()``, for memory that is not CUDA's.

    Every allocation gets an address of its own in one segment, which shows what is left after the last event; from that
    and the events, viewers find out what was there before.
    """
    events: list[tuple[int, dict[str, Any]]] = []
    blocks: list[dict[str, Any]] = []
    address = 0
    for allocation in timeline.allocations:
        frames = _frames(allocation)
        entry = {"addr": address, "size": allocation.size, "stream": 0, "frames": frames}
        if allocation.start > 0:
            events.append((allocation.start, entry | {"action": "alloc", "time_us": allocation.start}))
        is_left = allocation.end > timeline.length
        if not is_left:
            events.append((allocation.end, entry | {"action": "free_requested", "time_us": allocation.end}))
            events.append((allocation.end, entry | {"action": "free_completed", "time_us": allocation.end}))
        block = {"address": address, "size": allocation.size, "requested_size": allocation.size, "frames": frames}
        blocks.append(block | {"state": "active_allocated" if is_left else "inactive"})
        address += allocation.size
    held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0,
        "address": 0,
        "total_size": address,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    trace = [entry for _, entry in sorted(events, key=lambda event: event[0])]
    return {"segments": [segment], "device_traces": [trace]}


def _frames(allocation: Allocation) -> list[dict[str, Any]]:
    origin = allocation.origin
    what = " ".join(filter(None, [origin.module or allocation.parameter, origin.operation, allocation.category]))
    frames = [{"filename": allocation.category, "line": 0, "name": what}]
    code = re.fullmatch(r"(.*):(\d+) (.*)", origin.code)
    if code:
        frames.append({"filename": code[1], "line": int(code[2]), "name": code[3]})
    return [*frames, {"filename": allocation.phase or "before the step", "line": 0, "name": ""}]
