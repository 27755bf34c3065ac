"""The timeline of a step of many equal blocks, from those of steps of few."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from cs336sys.allocations.timeline import Allocation, AllocationTimeline, Region, module_pattern


class _Steps:
    """One step as the kinds of its allocations: with addresses, positions and numbers of blocks left out."""

    def __init__(self, timeline: AllocationTimeline):
        events: list[tuple[int, Allocation]] = [(0, Allocation(0, 0, 0, 0, "", "other"))] * timeline.length
        before = []
        for allocation in timeline.allocations:
            kind = _kind(allocation)
            if allocation.start:
                events[allocation.start - 1] = 1, kind
            else:
                before.append(kind)
            if allocation.end <= timeline.length:
                events[allocation.end - 1] = -1, kind
        self.events, self.before, self.phases = events, Counter(before), timeline.phases()


def _kind(allocation: Allocation) -> Allocation:
    origin = replace(allocation.origin, module=module_pattern(allocation.origin.module))
    return replace(allocation, address=0, start=0, end=0, origin=origin, parameter=module_pattern(allocation.parameter))


def repeated(
    timelines: tuple[AllocationTimeline, AllocationTimeline, AllocationTimeline], times: int
) -> AllocationTimeline | None:
    """Return the timeline of a step, given three steps, of which each has the same blocks more than the one before.

    Args:
        times: how often the step has these blocks more than the first.

    Returns:
        the timeline, with ``*`` in the place of numbers of blocks, without recomputations; None where the third step is
        not what follows from the first two.
    """
    first, second, third = map(_Steps, timelines)
    insertions = _insertions(first.events, second.events)
    if insertions is None:
        return None

    def with_more_blocks(times: int) -> tuple[list[tuple[int, Allocation]], Counter[Allocation], list[Region]]:
        """Add the second step's further blocks to the first so often: its events, earlier allocations and phases."""
        events = []
        end = 0
        for position, inserted in insertions:
            events += first.events[end:position] + inserted * times
            end = position
        grown = {
            kind: first.before[kind] + times * (count - first.before[kind]) for kind, count in second.before.items()
        }
        phases = [
            Region(a.name, a.start + times * (b.start - a.start), a.end + times * (b.end - a.end))
            for a, b in zip(first.phases, second.phases, strict=True)
        ]
        return events + first.events[end:], Counter(grown), phases

    if with_more_blocks(2) != (third.events, third.before, third.phases):
        return None
    events, before, phases = with_more_blocks(times)
    # Which of several allocations of a kind is freed makes no difference to what is held.
    starts: dict[Allocation, list[int]] = defaultdict(list, {kind: [0] * count for kind, count in before.items()})
    allocations = []
    for position, (sign, kind) in enumerate(events, start=1):
        if sign > 0:
            starts[kind].append(position)
        else:
            allocations.append(replace(kind, start=starts[kind].pop(), end=position))
    allocations += [replace(kind, start=start, end=len(events) + 1) for kind, left in starts.items() for start in left]
    return AllocationTimeline(sorted(allocations, key=lambda a: (a.start, a.end)), len(events), phases)


def _insertions(shorter: Sequence, longer: Sequence) -> list[tuple[int, list]] | None:
    """Return positions in ``shorter`` and what ``longer`` has there in addition, None if that is not all."""
    insertions = []
    position = shift = 0
    while shift < len(longer) - len(shorter):
        position += _alike(shorter[position:], longer[position + shift :])
        start = position + shift
        # After the insertion both go on alike, the farther the likelier.
        ends = range(start + 1, start + len(longer) - len(shorter) - shift + 1)
        end = max(ends, key=lambda end: _alike(shorter[position:], longer[end:]))
        insertions.append((position, list(longer[start:end])))
        shift += end - start
    return insertions if shorter[position:] == longer[position + shift :] else None


def _alike(events: Sequence, others: Sequence) -> int:
    """Return how many events two sequences have in common at their beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(events, others, strict=False)) if a != b), min(len(events), len(others))
    )
