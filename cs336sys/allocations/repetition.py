"""Extrapolate the timeline of a step of many equal blocks from those of steps of few."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cs336sys.allocations.timeline import Allocation, AllocationTimeline, Region, module_pattern


class _StepEvents(NamedTuple):
    """A step: allocations (1) and frees (-1) by kind, how many of each kind are older, and the phases."""

    events: Sequence[tuple[int, Allocation]]
    older: Counter[Allocation]
    phases: Sequence[Region]


def _step_events(timeline: AllocationTimeline) -> _StepEvents:
    """Return a step's events, each the start or the end of an allocation, without what tells its blocks apart."""
    events: list[tuple[int, Allocation]] = [(0, Allocation(0, 0, 0, 0, "", "other"))] * timeline.length  # Filled below.
    older: Counter[Allocation] = Counter()
    for allocation in timeline.allocations:
        kind = _kind(allocation)
        if allocation.start:
            events[allocation.start - 1] = 1, kind
        else:
            older[kind] += 1
        if allocation.end <= timeline.length:
            events[allocation.end - 1] = -1, kind
    return _StepEvents(events, older, timeline.phases())


def _kind(allocation: Allocation) -> Allocation:
    """Return the allocation without its address, positions and numbers of blocks."""
    origin = replace(allocation.origin, module=module_pattern(allocation.origin.module))
    return replace(allocation, address=0, start=0, end=0, origin=origin, parameter=module_pattern(allocation.parameter))


def repeated(timelines: Sequence[AllocationTimeline], times: int) -> AllocationTimeline | None:
    """Return the timeline of a step that has ``times`` times more blocks than the first of three steps.

    Each of the three has the same blocks more than the one before.

    Returns:
        the timeline, with ``*`` for numbers of blocks, without recomputations; None unless the third step follows.
    """
    first, second, third = map(_step_events, timelines)
    insertions = _insertions(first.events, second.events)
    if insertions is None:
        return None

    def with_more_blocks(times: int) -> _StepEvents:
        """Return the first step with ``times`` times what the second has more than it."""
        events: list[tuple[int, Allocation]] = []
        end = 0
        for position, inserted in insertions:
            events += [*first.events[end:position], *(inserted * times)]
            end = position
        older = {kind: first.older[kind] + times * (count - first.older[kind]) for kind, count in second.older.items()}
        phases = [
            Region(a.name, a.start + times * (b.start - a.start), a.end + times * (b.end - a.end))
            for a, b in zip(first.phases, second.phases, strict=True)
        ]
        return _StepEvents([*events, *first.events[end:]], Counter(older), phases)

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


def _insertions(shorter: Sequence, longer: Sequence) -> list[tuple[int, list]] | None:
    """Return positions in ``shorter`` and what ``longer`` has inserted there; None if they differ otherwise, too."""
    insertions = []
    position = shift = 0  # The place in ``shorter``, and how many events ``longer`` has had more until there.
    while shift < len(longer) - len(shorter):
        position += _common_length(shorter[position:], longer[position + shift :])
        start = position + shift
        # The likeliest end of the insertion is the one after which both are equal the farthest.
        ends = range(start + 1, start + len(longer) - len(shorter) - shift + 1)
        end = max(ends, key=lambda end: _common_length(shorter[position:], longer[end:]))
        insertions.append((position, list(longer[start:end])))
        shift += end - start
    return insertions if shorter[position:] == longer[position + shift :] else None


def _common_length(events: Sequence, others: Sequence) -> int:
    """Return how many events two sequences have in common at their beginning."""
    pairs = enumerate(zip(events, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(events), len(others)))
