"""One timeline of allocations and their purposes, into which every source of allocator events is turned.

Time is counted in events, as pytorch.org/memory_viz does: a CPU that runs ahead of its GPU allocates long before the
memory is used, so a clock would say nothing. Position ``p`` is the moment after ``p`` events. Of a step of many equal
blocks, :func:`repeated` extrapolates the timeline from those of steps of few.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any, NamedTuple

from cs336sys.capture.range_names import STEP_PHASES

# ``activations``: left to the backward pass by the forward pass, or by a checkpoint's recomputation; ``temporary``: all
# else that a step allocates; ``other``: there before the step, as batch, rotary table and workspaces are.
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")
RECOMPUTATION = "recomputation"


@dataclass(frozen=True)
class Event:
    """The allocator handed out ``size`` bytes at ``address``, or got them back where ``size`` is negative.

    ``code`` is the line that asked for it, where the allocator's own history knows it.
    """

    address: int
    size: int
    code: str = ""


@dataclass(frozen=True)
class Origin:
    """The origin of an allocation; unknown fields are empty."""

    module: str = ""  # Name in the model, ``layers.3.attn``.
    operation: str = ""  # ``mm``, or in the backward pass the node of the graph, ``MmBackward0``.
    # ``cs336_basics/model.py:51 forward``; of a backward node, the line of the forward pass that made it.
    code: str = ""


class Span(NamedTuple):
    """The events from ``start`` on and before ``end`` have this origin."""

    start: int
    end: int
    origin: Origin


@dataclass(frozen=True)
class Region:
    """A phase, or a recomputation inside the backward phase: the positions from ``start`` to ``end``."""

    name: str
    start: int
    end: int


class Gradient(NamedTuple):
    """The gradient of a parameter, which the memory at ``address`` became at ``position``."""

    position: int
    address: int
    parameter: str


@dataclass(frozen=True)
class Allocation:
    """One block of memory, alive from position ``start`` on and before ``end``."""

    address: int
    size: int
    start: int
    end: int
    phase: str  # In which it was allocated, empty if before all phases.
    category: str
    origin: Origin = Origin()
    parameter: str = ""  # Of a gradient, the parameter's name.


@dataclass(frozen=True)
class AllocationTimeline:
    """All allocations of one recorded step."""

    allocations: Sequence[Allocation]
    length: int  # The last position, the number of events.
    regions: Sequence[Region]  # Phases in order, and recomputations.
    lost_events: int = 0  # How many events before the first known one a bounded history has dropped.

    def phases(self) -> list[Region]:
        return [region for region in self.regions if region.name in STEP_PHASES]

    def bytes_by_category(self) -> dict[str, list[int]]:
        """Return the bytes held at every position 0..length, by category."""
        parts: dict[str, list[Allocation]] = {category: [] for category in MEMORY_CATEGORIES}
        for allocation in self.allocations:
            parts[allocation.category].append(allocation)
        return {category: held_bytes(blocks, self.length) for category, blocks in parts.items()}

    def totals(self) -> list[int]:
        """Return the bytes held at every position 0..length."""
        return held_bytes(self.allocations, self.length)


def held_bytes(blocks: Iterable[Any], length: int) -> list[int]:
    """Return the bytes of blocks, each with ``size``, ``start`` and ``end``, at every position 0..length."""
    changes = [0] * (length + 2)
    for block in blocks:
        changes[block.start] += block.size
        changes[block.end] -= block.size
    return list(accumulate(changes[:-1]))


def peak_position(totals: Sequence[int], region: Region) -> int:
    """Return the first position of the region at which the most bytes are held."""
    return max(range(region.start, region.end + 1), key=totals.__getitem__)


def build_timeline(
    events: Sequence[Event],
    *,
    regions: Sequence[Region],
    spans: Iterable[Span] = (),
    live_blocks: Mapping[int, tuple[int, str]] | None = None,
    held_size: int | None = None,
    gradients: Iterable[Gradient] = (),
    optimizer_state: Iterable[int] = (),
    lost_events: int = 0,
) -> AllocationTimeline:
    """Pair allocations with frees, and say what each is for.

    Args:
        regions: phases and recomputations.
        spans: origins of the events, which must not overlap.
        live_blocks: size in bytes and category of what is known to be there before the first event, by address.
        held_size: bytes of all that is there before the first event; those beyond ``live_blocks`` are ``other``.
        optimizer_state: addresses that belong to the optimizer after the last event.
    """
    length = len(events)
    origins = [Origin()] * length
    for span in spans:
        origins[span.start : span.end] = [span.origin] * (span.end - span.start)
    phases = [""] * length
    for region in regions:
        if region.name in STEP_PHASES:
            phases[region.start : region.end] = [region.name] * (region.end - region.start)
    live = {
        address: Allocation(address, size, start=0, end=length + 1, phase="", category=category)
        for address, (size, category) in (live_blocks or {}).items()
    }
    known_size = sum(allocation.size for allocation in live.values())
    freed = []
    # Regions of a history that was cut may end after its last event, which makes origins and phases longer.
    for position, (event, origin, phase) in enumerate(zip(events, origins, phases, strict=False), start=1):
        address, size = event.address, event.size
        if size > 0:
            if event.code and not origin.code:
                origin = replace(origin, code=event.code)
            live[address] = Allocation(address, size, position, length + 1, phase, "temporary", origin)  # At first.
        elif address in live:
            freed.append(replace(live.pop(address), end=position))
        else:
            # It was allocated before the first event.
            freed.append(Allocation(address, -size, start=0, end=position, phase="", category="other"))
            known_size -= size  # Of what was there before; a free's size is negative.
    allocations = [*freed, *live.values()]
    if held_size is not None and held_size > known_size:
        allocations.append(Allocation(0, held_size - known_size, start=0, end=length + 1, phase="", category="other"))
    categorized = _categorized(allocations, regions, gradients, set(optimizer_state), length)
    return AllocationTimeline(sorted(categorized, key=lambda a: (a.start, a.end)), length, regions, lost_events)


def _categorized(
    allocations: list[Allocation],
    regions: Sequence[Region],
    gradients: Iterable[Gradient],
    optimizer_state: set[int],
    length: int,
) -> Iterator[Allocation]:
    """Yield the allocations with their categories, by gradients, optimizer state, and how long they live."""
    gradients_at: dict[int, list[Gradient]] = defaultdict(list)
    for gradient in sorted(gradients, key=lambda gradient: gradient.position):
        gradients_at[gradient.address].append(gradient)
    activation_regions = [(region.start, region.end) for region in regions if region.name == RECOMPUTATION]
    # A step can have several passes, which add their gradients up.
    forward_start = 0
    for backward in (region for region in regions if region.name == "backward"):
        activation_regions.append((forward_start, backward.start))
        forward_start = backward.end
    # For each position, the first event's being 1, the end of its region of activations, the earliest if they overlap.
    region_ends = [length + 1] * (length + 1)
    for start, end in sorted(activation_regions, key=lambda bounds: -bounds[1]):  # Earlier ones overwrite.
        region_ends[start + 1 : end + 1] = [end] * (end - start)
    for allocation in allocations:
        if allocation.start == 0:  # Older than the step: it has its category.
            yield allocation
            continue
        of_address = gradients_at[allocation.address]  # The first gradient to be at its address while it lives.
        index = bisect_left(of_address, allocation.start, key=lambda gradient: gradient.position)
        if index < len(of_address) and of_address[index].position < allocation.end:
            yield replace(allocation, category="gradients", parameter=of_address[index].parameter)
        elif allocation.end > length and allocation.address in optimizer_state:
            yield replace(allocation, category="optimizer state")
        elif region_ends[allocation.start] < allocation.end:  # It outlives the pass or recomputation that made it.
            yield replace(allocation, category="activations")
        else:
            yield allocation


def largest_allocations(timeline: AllocationTimeline, limit: int) -> list[dict[str, Any]]:
    """Return the ``limit`` largest groups of allocations, by the size of one; each is of one line in one phase.

    Returns:
        of each ``size``, ``count``, ``peak_count`` (how many are alive when the step holds the most memory), ``phase``,
        ``category``, ``module`` (with ``*`` for the block's number where there are several), ``operation``, ``code``.
    """
    totals = timeline.totals()
    peak = max(range(len(totals)), key=totals.__getitem__)
    groups: dict[tuple, list[Allocation]] = defaultdict(list)
    for allocation in timeline.allocations:
        if allocation.start > 0:  # What is older was allocated by no line of the step.
            origin, pattern = allocation.origin, module_pattern(_module_of(allocation))
            key = (allocation.size, allocation.phase, allocation.category, pattern, origin.operation, origin.code)
            groups[key].append(allocation)
    rows: list[dict[str, Any]] = []
    for (size, phase, category, pattern, operation, code), members in groups.items():
        module = pattern if len(members) > 1 else _module_of(members[0])
        peak_count = sum(member.start <= peak < member.end for member in members)
        row = {"size": size, "count": len(members), "peak_count": peak_count, "phase": phase, "category": category}
        rows.append(row | {"module": module, "operation": operation, "code": code})
    return sorted(rows, key=lambda row: (-row["size"], -row["count"]))[:limit]


def _module_of(allocation: Allocation) -> str:
    """Return the module that allocated, or that of the parameter whose gradient or state was allocated."""
    return allocation.origin.module or allocation.parameter.rpartition(".")[0]


def module_pattern(module: str) -> str:
    """Return a module's name with ``*`` in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def thinned(by_category: Mapping[str, Sequence[int]], points: int = 400) -> dict[str, list[int]]:
    """Return bytes by category at the fullest position of each of ``points`` stretches, and at the first and last.

    400 points are enough for a picture as wide as a page. The result also has the positions, as ``position``.
    """
    totals = [sum(sizes) for sizes in zip(*by_category.values(), strict=True)]
    step = max(1, math.ceil(len(totals) / max(1, points - 2)))  # The first and the last position come on top.
    stretches = [range(start, min(start + step, len(totals))) for start in range(0, len(totals), step)]
    positions = sorted({0, len(totals) - 1, *(max(stretch, key=totals.__getitem__) for stretch in stretches)})
    thinned_sizes = {name: [sizes[position] for position in positions] for name, sizes in by_category.items()}
    return {"position": positions, **thinned_sizes}


class _StepEvents(NamedTuple):
    """A step: allocations (1) and frees (-1) by kind, how many of each kind are older, and the phases."""

    events: list[tuple[int, Allocation]]
    older: Counter[Allocation]
    phases: Sequence[Region]


def _step_events(timeline: AllocationTimeline) -> _StepEvents:
    """Return a step's events, each the start or the end of an allocation, without what tells its blocks apart."""
    events: list[tuple[int, Allocation]] = [(0, Allocation(0, 0, 0, 0, "", "other"))] * timeline.length  # Filled below.
    older: Counter[Allocation] = Counter()
    for allocation in timeline.allocations:
        # Without its address, positions and numbers of blocks.
        origin = replace(allocation.origin, module=module_pattern(allocation.origin.module))
        parameter = module_pattern(allocation.parameter)
        kind = replace(allocation, address=0, start=0, end=0, origin=origin, parameter=parameter)
        if allocation.start:
            events[allocation.start - 1] = 1, kind
        else:
            older[kind] += 1
        if allocation.end <= timeline.length:
            events[allocation.end - 1] = -1, kind
    return _StepEvents(events, older, timeline.phases())


def repeated(timelines: Sequence[AllocationTimeline], times: int) -> AllocationTimeline | None:
    """Return the timeline of a step that has ``times`` times more blocks than the first of three steps.

    Each of the three has the same blocks more than the one before.

    Returns:
        the timeline, with ``*`` for numbers of blocks, without recomputations; None unless the third step follows.
    """
    first, second, third = map(_step_events, timelines)
    differences = SequenceMatcher(None, first.events, second.events, autojunk=False).get_opcodes()
    if any(kind not in ("equal", "insert") for kind, *_ in differences):
        return None

    def with_more_blocks(times: int) -> _StepEvents:
        """Return the first step with ``times`` times what the second has more than it."""
        events: list[tuple[int, Allocation]] = []
        for kind, first_start, first_end, start, end in differences:
            events += first.events[first_start:first_end] if kind == "equal" else times * second.events[start:end]
        older = {kind: first.older[kind] + times * (count - first.older[kind]) for kind, count in second.older.items()}
        phases = [
            Region(a.name, a.start + times * (b.start - a.start), a.end + times * (b.end - a.end))
            for a, b in zip(first.phases, second.phases, strict=True)
        ]
        return _StepEvents(events, Counter(older), phases)

    if with_more_blocks(2) != third:
        return None
    step = with_more_blocks(times)
    # Which of several allocations of a kind is freed makes no difference to the bytes that are held.
    starts: dict[Allocation, list[int]] = defaultdict(list, {kind: [0] * count for kind, count in step.older.items()})
    allocations = []
    for position, (sign, kind) in enumerate(step.events, start=1):
        if sign > 0:
            starts[kind].append(position)
        else:
            allocations.append(replace(kind, start=starts[kind].pop(), end=position))
    length = len(step.events)
    allocations += [replace(kind, start=start, end=length + 1) for kind, live in starts.items() for start in live]
    return AllocationTimeline(sorted(allocations, key=lambda a: (a.start, a.end)), length, step.phases)
