"""One timeline of allocations and their purposes, into which every source of allocator events is turned.

Time is counted in events, as pytorch.org/memory_viz does: a CPU that runs ahead of its GPU allocates long before the
memory is used, so a clock would say nothing. Position ``p`` is the moment after ``p`` events.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from cs336sys.capture.range_names import STEP_PHASES

# What memory is for. ``activations`` is what the forward pass, or a checkpoint's recomputation, leaves to the backward
# pass; ``temporary`` is all else that a step allocates; ``other`` was there before: batch, rotary table, workspaces.
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")
RECOMPUTATION = "recomputation"


@dataclass(frozen=True)
class Event:
    """The allocator handed out ``size`` bytes at ``address``, or got them back where ``size`` is negative.

    Attributes:
        code: the line that asked for it, where the allocator's own history knows it.
    """

    address: int
    size: int
    code: str = ""


@dataclass(frozen=True)
class Origin:
    """The origin of an allocation; unknown fields are empty.

    Attributes:
        module: name in the model, ``layers.3.attn``.
        operation: ``mm``, or in the backward pass the node of the graph, ``MmBackward0``.
        code: ``cs336_basics/model.py:51 forward``; of a backward node, the line of the forward pass that made it.
    """

    module: str = ""
    operation: str = ""
    code: str = ""


@dataclass(frozen=True)
class Span:
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


@dataclass(frozen=True)
class Gradient:
    """At ``position`` the memory at ``address`` became the gradient of a parameter."""

    position: int
    address: int
    parameter: str


@dataclass(frozen=True)
class Allocation:
    """One block of memory, alive from position ``start`` on and before ``end``.

    Attributes:
        phase: in which it was made, empty if before all of them.
        parameter: of a gradient, the parameter's name.
    """

    address: int
    size: int
    start: int
    end: int
    phase: str
    category: str
    origin: Origin = Origin()
    parameter: str = ""


@dataclass(frozen=True)
class AllocationTimeline:
    """All allocations of one recorded step.

    Attributes:
        length: the last position, the number of events.
        regions: phases in order, and recomputations.
        lost_events: how many events before the first known one a bounded history has dropped.
        categories: those that its allocations can have.
    """

    allocations: Sequence[Allocation]
    length: int
    regions: Sequence[Region]
    lost_events: int = 0
    categories: Sequence[str] = MEMORY_CATEGORIES

    def phases(self) -> list[Region]:
        return [region for region in self.regions if region.name in STEP_PHASES]

    def bytes_by_category(self) -> dict[str, list[int]]:
        """Bytes held at every position 0..length, by category."""
        parts: dict[str, list[Allocation]] = {category: [] for category in self.categories}
        for allocation in self.allocations:
            parts[allocation.category].append(allocation)
        return {category: held_bytes(blocks, self.length) for category, blocks in parts.items()}

    def totals(self) -> list[int]:
        """Bytes held at every position 0..length."""
        return held_bytes(self.allocations, self.length)


def held_bytes(blocks: Iterable[Any], length: int) -> list[int]:
    """Return the bytes of blocks, each with ``size``, ``start`` and ``end``, at every position 0..length."""
    changes = [0] * (length + 2)
    for block in blocks:
        changes[block.start] += block.size
        changes[block.end] -= block.size
    return list(accumulate(changes[:-1]))


def peak_position(totals: Sequence[int], region: Region) -> int:
    """The first position of the region at which the most bytes are held."""
    return max(range(region.start, region.end + 1), key=lambda position: totals[position])


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
        address: Allocation(address, size, 0, length + 1, "", category)
        for address, (size, category) in (live_blocks or {}).items()
    }
    explained = sum(allocation.size for allocation in live.values())
    done = []
    for index, event in enumerate(events):
        if event.size > 0:
            origin = origins[index]
            if event.code and not origin.code:
                origin = replace(origin, code=event.code)
            live[event.address] = Allocation(
                event.address, event.size, index + 1, length + 1, phases[index], "temporary", origin
            )
        elif event.address in live:
            done.append(replace(live.pop(event.address), end=index + 1))
        else:
            # Nobody knew of it, so it was there before.
            done.append(Allocation(event.address, -event.size, 0, index + 1, "", "other"))
            explained -= event.size
    allocations = [*done, *live.values()]
    if held_size is not None and held_size > explained:
        allocations.append(Allocation(0, held_size - explained, 0, length + 1, "", "other"))
    categorized = _categorized(allocations, regions, gradients, set(optimizer_state), length)
    return AllocationTimeline(sorted(categorized, key=lambda a: (a.start, a.end)), length, regions, lost_events)


def _categorized(
    allocations: list[Allocation],
    regions: Sequence[Region],
    gradients: Iterable[Gradient],
    optimizer_state: set[int],
    length: int,
) -> Iterable[Allocation]:
    """Yield the allocations with their categories, by gradients, optimizer state, and how long they live."""
    by_address: dict[int, list[Gradient]] = {}
    for gradient in sorted(gradients, key=lambda gradient: gradient.position):
        by_address.setdefault(gradient.address, []).append(gradient)
    makers = [region for region in regions if region.name == RECOMPUTATION]
    # A step can have several passes, which add their gradients up.
    before = 0
    for backward in (region for region in regions if region.name == "backward"):
        makers.append(Region("before the backward pass", before, backward.start))
        before = backward.end
    # Where what makes activations ends, for each position in it; where several do, the first end counts.
    ends = [length + 1] * (length + 1)
    for maker in sorted(makers, key=lambda maker: -maker.end):
        ends[maker.start + 1 : maker.end + 1] = [maker.end] * (maker.end - maker.start)
    for allocation in allocations:
        if allocation.start == 0:
            yield allocation
            continue
        parameter = _parameter(allocation, by_address.get(allocation.address, ()))
        if parameter:
            yield replace(allocation, category="gradients", parameter=parameter)
        elif allocation.end > length and allocation.address in optimizer_state:
            yield replace(allocation, category="optimizer state")
        elif ends[allocation.start] < allocation.end:
            yield replace(allocation, category="activations")
        else:
            yield allocation


def _parameter(allocation: Allocation, gradients: Sequence[Gradient]) -> str:
    index = bisect_left(gradients, allocation.start, key=lambda gradient: gradient.position)
    is_gradient = index < len(gradients) and gradients[index].position < allocation.end
    return gradients[index].parameter if is_gradient else ""


def largest_allocations(timeline: AllocationTimeline, limit: int) -> list[dict[str, Any]]:
    """Return the ``limit`` largest groups of allocations, by the size of one; each is of one line in one phase.

    Returns:
        of each ``size``, ``count``, ``peak_count`` (how many are alive when the step holds the most memory), ``phase``,
        ``category``, ``module`` (``*`` instead of the block's number where there are several), ``operation``, ``code``.
    """
    totals = timeline.totals()
    peak = max(range(len(totals)), key=totals.__getitem__)
    groups: dict[tuple, list[Allocation]] = {}
    for allocation in timeline.allocations:
        if allocation.start > 0:
            origin = allocation.origin
            module = module_pattern(origin.module or allocation.parameter.rpartition(".")[0])
            key = (allocation.size, allocation.phase, allocation.category, module, origin.operation, origin.code)
            groups.setdefault(key, []).append(allocation)
    largest = []
    for key, members in sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1])))[:limit]:
        peak_count = sum(member.start <= peak < member.end for member in members)
        group: dict[str, Any] = {"size": key[0], "count": len(members), "peak_count": peak_count}
        group |= zip(("size", "phase", "category", "module", "operation", "code"), key, strict=True)
        if len(members) == 1 and members[0].origin.module:
            group["module"] = members[0].origin.module
        largest.append(group)
    return largest


def module_pattern(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def thinned(timeline: AllocationTimeline, points: int = 400) -> Mapping[str, list[int]]:
    """Bytes by category at about ``points`` positions: of equal stretches, where each holds the most.

    As many as are the default are enough for a picture a page wide.

    Returns:
        ``{"position": [...], "parameters": [...], ...}``, the first and last positions among them.
    """
    by_category = timeline.bytes_by_category()
    totals = timeline.totals()
    step = max(1, -(-(timeline.length + 1) // max(1, points - 2)))
    inner = [
        max(range(start, min(start + step, timeline.length + 1)), key=totals.__getitem__)
        for start in range(0, timeline.length + 1, step)
    ]
    positions = sorted({0, timeline.length, *inner})
    return {"position": positions} | {
        category: [values[position] for position in positions] for category, values in by_category.items()
    }
