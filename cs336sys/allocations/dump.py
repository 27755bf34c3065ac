"""Snapshots of ``torch.cuda.memory._dump_snapshot``, ours and anybody's of any torch from 2.1 on, as plain records.

What versions write differs in what is missing: stacks (``frames``) of Python, of C++, or none; ``time_us``,
``compile_context``, ``user_metadata`` and ``pool_id`` of an entry; ``is_expandable`` and ``segment_pool_id`` of a
segment; ``allocator_settings``. Sources: torch/csrc/cuda/Module.cpp, memory_snapshot.cpp. No torch.
"""

import pickle
import re
import reprlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from cs336sys.allocations.timeline import Allocation, AllocationTimeline
from cs336sys.errors import UsageError
from cs336sys.processes.files import written_whole
from cs336sys.results.foreign import printable
from cs336sys.results.plain_pickle import read_plain_pickle

# The allocator hands out multiples of this.
ROUNDING = 512

_ACTIONS_OF_ENTRIES = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "user_defined",
}  # fmt: skip
# The pool of all memory that is in no private pool.
DEFAULT_POOL = (0, 0)


class Frame(NamedTuple):
    """A line of a stack, innermost first."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """Memory from one allocation until it could be used again.

    Positions are how many allocations and frees came before.
    """

    address: int
    size: int  # As asked for; of memory older than the record, as handed out.
    start: int  # Position; 0: before the record.
    end: int  # Likewise; beyond the record's end: never.
    stack: int  # Index into DeviceRecord.stacks.
    stream: int
    pool: tuple[int, int]
    requested: int  # Bytes that were asked for, whatever the size is.


class FailedAllocation(NamedTuple):
    """An allocation that failed."""

    position: int
    entry: int  # Its number in the trace.
    size: int
    device_free: int  # Bytes that the device had outside of the allocator.
    stack: int
    stream: int


class Segment(NamedTuple):
    """Memory of the device that the allocator has; an expandable segment grows in place."""

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    is_expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass
class DeviceRecord:
    """History and state of one device's allocator."""

    device: int
    blocks: list[Block] = field(default_factory=list)
    failures: list[FailedAllocation] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # By address.
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])  # Of all blocks; the first is empty.
    # For each position, the number of the trace's entry that led to it.
    entry_of_position: list[int] = field(default_factory=lambda: [-1])
    # Entries that changed segments: their numbers, 1 or -1, and the segment.
    segment_events: list[tuple[int, int, Segment]] = field(default_factory=list)
    unknown_frees: int = 0  # Of memory older than the record.
    # Positions after which a step had ended, by names with "step" that the program recorded, if any.
    step_marks: list[int] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        return len(self.entry_of_position) - 1

    @property
    def has_stacks(self) -> bool:
        return len(self.stacks) > 1

    def segments_at(self, entry: int) -> list[Segment]:
        """Return the segments after an entry of the trace: those of the end, with later changes undone."""
        segments = list(self.segments)
        for event_entry, change, segment in reversed(self.segment_events):
            if event_entry <= entry:
                break
            index = bisect_right(segments, segment.address, key=attrgetter("address"))
            if change < 0:
                segments.insert(index, segment)  # It was freed later: put it back.
            elif index and segment.end <= (whole := segments[index - 1]).end:
                # It was allocated later: take it out. Of an expandable segment only a part goes.
                remaining = ((whole.address, segment.address), (segment.end, whole.end))
                segments[index - 1 : index] = [
                    whole._replace(address=start, size=end - start) for start, end in remaining if start < end
                ]
        return segments


def read_dump(path: Path) -> list[DeviceRecord]:
    """Read the devices of a snapshot that hold or did anything.

    A file that is no snapshot, would run code, or is too large, is a UsageError.
    """
    try:
        snapshot = read_plain_pickle(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return parse_dump(snapshot)
    except _NoSnapshotError as error:
        raise UsageError(f"{path} is no snapshot of torch.cuda.memory._dump_snapshot: {error}") from None


_Entries: TypeAlias = Sequence[Mapping[str, Any]]
_NUMBER = re.compile(r"\d+")


class _NoSnapshotError(ValueError):
    """A value that no snapshot has, in one sentence."""


def parse_dump(snapshot: Any) -> list[DeviceRecord]:
    """Return a record for each device of a snapshot's dictionary, or raise if it is no snapshot of the allocator."""
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise _NoSnapshotError("it has no list of segments")
    traces = snapshot.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise _NoSnapshotError("its device_traces are no lists")
    # A device whose memory was all given back has a trace, but no segments.
    segments_of: dict[int, list[Mapping[str, Any]]] = {index: [] for index, trace in enumerate(traces) if trace}
    for segment in snapshot["segments"]:
        segments_of.setdefault(_integer_field(segment, "device", "a segment", default=0), []).append(segment)
    annotations = snapshot.get("external_annotations")
    return [
        _Parser(device, segments, traces[device] if device < len(traces) else [], annotations).parse()
        for device, segments in sorted(segments_of.items())
    ]


class _Parser:
    """Turns the segments and the trace of one device into a record."""

    def __init__(self, device: int, segments: _Entries, trace: _Entries, annotations: Any):
        self._record = DeviceRecord(device)
        self._segments = segments
        self._trace = trace
        self._annotations = annotations if isinstance(annotations, list) else []
        self._trace_has_pools = False
        # Snapshots share frames and lists of them: each is read once, by the id of an object that the snapshot holds.
        self._stack_of_list: dict[int, int] = {}
        self._frames: dict[int, Frame] = {}
        self._stacks: dict[tuple[Frame, ...], int] = {(): 0}

    def parse(self) -> DeviceRecord:
        """Return the record: blocks that the trace frees, those that it leaves, and those that it does not name."""
        record = self._record
        at_end = list(self._read_segments())  # Which notes the segments, too.
        record.segments.sort()  # By address: _pool() and segments_at() search them.
        live = self._read_trace()
        record.step_marks = self._step_marks()
        # A block that no entry names was there before the record.
        traced_addresses = {block.address for block in record.blocks} | live.keys()
        remaining = [*live.values(), *(block for block in at_end if block.address not in traced_addresses)]
        record.blocks += [block._replace(end=record.last_position + 1) for block in remaining]
        # Before torch 2.13 entries do not say in which pool they allocate; segments do.
        if not self._trace_has_pools and any(segment.pool != DEFAULT_POOL for segment in record.segments):
            record.blocks = [block._replace(pool=self._pool(block.address)) for block in record.blocks]
        return record

    def _read_segments(self) -> Iterator[Block]:
        """Note all segments, and yield the blocks in them that are allocated at the end."""
        for segment in self._segments:
            address = _integer_field(segment, "address", "a segment")
            size = _integer_field(segment, "total_size", "a segment")
            stream = _integer_field(segment, "stream", "a segment", default=0)
            pool = _pool_id(segment.get("segment_pool_id"))
            is_expandable = segment.get("is_expandable") is True
            self._record.segments.append(Segment(address, size, stream, pool, is_expandable))
            blocks = segment.get("blocks", [])
            if not isinstance(blocks, list):
                raise _NoSnapshotError("a segment's blocks are no list")
            for block in blocks:
                block_size = _integer_field(block, "size", "a block")
                # Blocks of old snapshots do not say where they begin: one follows another.
                block_address = _integer_field(block, "address", "a block", default=address)
                address = block_address + block_size
                if block.get("state") != "inactive":
                    requested = _integer_field(block, "requested_size", "a block", default=block_size)
                    stack = self._stack(block.get("frames"))
                    # Start 0 is before the record, where only blocks begin that no entry names; parse() sets the end.
                    yield Block(block_address, block_size, 0, 0, stack, stream, pool, requested)

    def _read_trace(self) -> dict[int, Block]:
        """Replay the trace into the record, and return the blocks that are allocated after it, by address."""
        record, live = self._record, dict[int, Block]()
        known_addresses: set[int] = set()  # That were freed before.
        actions = [entry.get("action") for entry in self._trace if isinstance(entry, dict)]
        # Memory can be used again once its free is completed, which some records leave out.
        free_action = "free_completed" if "free_completed" in actions else "free_requested"
        for number, entry in enumerate(self._trace):
            try:
                action, size = entry["action"], entry["size"]
                # A failed allocation has no address, but says what the device had left, which is checked like one.
                address = entry["addr"] if action != "oom" else entry.get("device_free", 0)
                if type(size) is not int or size < 0 or type(address) is not int or action not in _ACTIONS_OF_ENTRIES:
                    raise TypeError
            except (KeyError, TypeError, AttributeError):
                values = [entry.get(key) for key in ("action", "addr", "size")] if isinstance(entry, dict) else entry
                fault = f"entry {number:,} of device {record.device} has no known action, or no whole addr and size"
                raise _NoSnapshotError(f"{fault}: {printable(reprlib.repr(values))}") from None
            if action in ("alloc", free_action):
                record.entry_of_position.append(number)
            if action == "alloc":
                if address in live:  # Its free is missing, or this entry is repeated.
                    record.blocks.append(live.pop(address)._replace(end=record.last_position))
                stack, pool = self._stack(entry.get("frames")), _pool_id(entry.get("pool_id"))
                start, end = record.last_position, 0  # The end is set when it is freed, or by parse().
                live[address] = Block(address, size, start, end, stack, _stream(entry), pool, requested=size)
                self._trace_has_pools |= entry.get("pool_id") is not None
            elif action == free_action:
                block = live.pop(address, None)
                if block is None and address in known_addresses:
                    continue  # The entry is repeated.
                if block is None:  # It is older than the record, as start 0 says.
                    record.unknown_frees += 1
                    block = Block(address, size, start=0, end=0, stack=0, stream=0, pool=DEFAULT_POOL, requested=size)
                record.blocks.append(block._replace(end=record.last_position))
                known_addresses.add(address)
            elif action == "oom":
                position, device_free, stack = record.last_position, address, self._stack(entry.get("frames"))
                record.failures.append(FailedAllocation(position, number, size, device_free, stack, _stream(entry)))
            elif action.startswith("segment"):
                sign = 1 if action in ("segment_alloc", "segment_map") else -1
                is_expandable = action in ("segment_map", "segment_unmap")
                segment = Segment(address, size, _stream(entry), _pool_id(entry.get("pool_id")), is_expandable)
                record.segment_events.append((number, sign, segment))
        return live

    def _step_marks(self) -> list[int]:
        """Return the first position after each range with "step" in its name: the rarest name's, numbers left out."""
        entries = [self._trace[number] for number in self._record.entry_of_position[1:]]
        ends: dict[str, list[int]] = defaultdict(list)
        times = [time if type(time := entry.get("time_us")) is int else 0 for entry in entries]  # 0: it has no time.
        for annotation in self._annotations:  # Of record_function.
            match annotation:
                case {"name": str(name), "stage": "END", "time_us": int(time), **others} if (
                    others.get("device", self._record.device) == self._record.device
                ):
                    ends[_NUMBER.sub("#", name)].append(bisect_right(times, time) + 1)  # Entry 0 leads to position 1.
        labels = [label if isinstance(label := entry.get("user_metadata"), str) else "" for entry in entries]
        for position, (label, next_label) in enumerate(pairwise(labels), start=2):  # Labels begin at position 1.
            name = _NUMBER.sub("#", next_label)
            if label != next_label and name == _NUMBER.sub("#", label):  # From "step 1" to "step 2".
                ends[name].append(position)
        recurring = [sorted(set(marks)) for name, marks in ends.items() if "step" in name.lower() and len(marks) > 1]
        return min(recurring, key=len, default=[])  # Names with more marks occur several times in a step.

    def _pool(self, address: int) -> tuple[int, int]:
        """Return the pool of the segment around an address."""
        index = bisect_right(self._record.segments, address, key=attrgetter("address"))
        segment = self._record.segments[index - 1]
        return segment.pool if index and address < segment.end else DEFAULT_POOL

    def _stack(self, frames: Any) -> int:
        """Return the number of a stack of frames, noted at first sight; 0 without frames."""
        if not frames:
            return 0
        if id(frames) not in self._stack_of_list:  # Entries share lists: each is read once.
            if not isinstance(frames, list):
                raise _NoSnapshotError("frames are no list")
            for frame in frames:
                if id(frame) not in self._frames:
                    self._frames[id(frame)] = _frame(frame)
            stack = tuple(self._frames[id(frame)] for frame in frames)
            number = self._stack_of_list[id(frames)] = self._stacks.setdefault(stack, len(self._stacks))
            if number == len(self._record.stacks):
                self._record.stacks.append(stack)
        return self._stack_of_list[id(frames)]


def _frame(frame: Any) -> Frame:
    if not isinstance(frame, dict):
        raise _NoSnapshotError("a frame is no dictionary")
    line = frame.get("line", 0)
    filename = _frame_text(frame.get("filename")).replace("\\", "/")  # Of Windows, too.
    return Frame(filename, line if type(line) is int else 0, _frame_text(frame.get("name")))


def _frame_text(value: Any) -> str:
    return printable(value[:2000]) if isinstance(value, str) else ""


def _integer_field(values: Any, key: str, owner: str, default: int | None = None) -> int:
    value = values.get(key, default) if isinstance(values, dict) else None
    if type(value) is not int or value < 0:  # True is an instance of int, but no number here.
        raise _NoSnapshotError(f"{owner} has no whole {key}: {printable(reprlib.repr(value))}")
    return value


def _stream(entry: Mapping[str, Any]) -> int:
    stream = entry.get("stream")
    return stream if type(stream) is int else 0


def _pool_id(value: Any) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value[0], value[1]
    return DEFAULT_POOL


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot atomically, or raise a UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as whole, whole.open("wb") as file:
            # The viewer in the browser cannot read protocol 5 (https://github.com/pytorch/pytorch/issues/183842).
            pickle.dump(snapshot, file, protocol=4)
    except OSError as error:
        raise UsageError(f"cannot write the snapshot {path}: {error.strerror or error}") from error


def as_snapshot(timeline: AllocationTimeline) -> dict[str, Any]:
    """Return a timeline in the form of ``torch.cuda.memory._snapshot()``, for memory that is not CUDA's.

    Every allocation gets an address of its own in one segment, which shows what is left after the last event; from that
    and the events, viewers find out what was there before. ``time_us`` are positions: a timeline has no clock.
    """
    events: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    address = live_bytes = 0
    for allocation in timeline.allocations:
        frames = _frames(allocation)
        entry = {"addr": address, "size": allocation.size, "stream": 0, "frames": frames}
        if allocation.start > 0:  # What is older than the record was allocated by no event of it.
            events.append(entry | {"action": "alloc", "time_us": allocation.start})
        is_left = allocation.end > timeline.length
        if not is_left:
            entry["time_us"] = allocation.end
            events += [entry | {"action": action} for action in ("free_requested", "free_completed")]
        block = {"address": address, "size": allocation.size, "requested_size": allocation.size, "frames": frames}
        blocks.append(block | {"state": "active_allocated" if is_left else "inactive"})
        address += allocation.size
        live_bytes += is_left * allocation.size
    segment: dict[str, Any] = {"device": 0, "address": 0, "total_size": address, "stream": 0, "segment_type": "large"}
    segment |= dict.fromkeys(("allocated_size", "active_size", "requested_size"), live_bytes)
    segment |= {"segment_pool_id": DEFAULT_POOL, "is_expandable": False, "frames": [], "blocks": blocks}
    return {"segments": [segment], "device_traces": [sorted(events, key=lambda event: event["time_us"])]}


def _frames(allocation: Allocation) -> list[dict[str, Any]]:
    """Return a stack that names category and purpose, the line of code, and the phase, for viewers and `--from`."""
    origin = allocation.origin
    label = " ".join(filter(None, [origin.module or allocation.parameter, origin.operation, allocation.category]))
    frames = [{"filename": allocation.category, "line": 0, "name": label}]
    if line := re.fullmatch(r"(.*):(\d+) (.*)", origin.code):
        frames.append({"filename": line[1], "line": int(line[2]), "name": line[3]})
    return [*frames, {"filename": allocation.phase or "before the step", "line": 0, "name": ""}]
