"""Find what fills a device at the moment of failure, or else at the peak, and known mistakes among the causes."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from statistics import median

from cs336sys.measure.allocations.dump import DEFAULT_POOL, ROUNDING, Block, DeviceRecord, FailedAllocation, Frame
from cs336sys.measure.allocations.inference import (
    FOREIGN_CATEGORIES,
    FORWARD,
    OPTIMIZER,
    USER,
    Inference,
    code_of,
    is_own,
    operation_of,
)

# A cause is named where it holds at least this part of the memory.
_TELLING = 0.01
_TELLING_LOGITS = 0.10
# Steps that a leak must have grown over.
_LEAK_STEPS = 3
# How many allocations before the backward pass the loss can be.
_NEAR_LOSS = 12


@dataclass(frozen=True)
class Kind:
    """Blocks of one size that one line made for one purpose, at one moment.

    Attributes:
        size: of one, in bytes.
        code, operation: ``src/train.py:88 train_step``, ``linear``; empty where no stack says.
    """

    size: int
    count: int
    category: str
    code: str
    operation: str

    @property
    def total(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class FreePieces:
    """Memory that the allocator has and nobody uses, in bytes.

    Attributes:
        usable: free for the stream that asked, outside of private pools.
        largest: the largest piece of it.
        elsewhere: free for other streams, or in private pools.
        is_cause: enough is free for what was asked for, and no piece is large enough.
        is_expandable: the segments grow in place already.
    """

    usable: int
    largest: int
    elsewhere: int
    is_cause: bool
    is_expandable: bool


@dataclass(frozen=True)
class Leak:
    """Memory that every step leaves behind.

    Attributes:
        step_bytes: by which a step grows.
        held: all that is left of earlier steps.
        code: the line that makes the largest part; of a graph, the one that all of it was called from.
        is_graph: activations of a whole forward pass are among it.
    """

    step_bytes: int
    steps: int
    held: int
    code: str
    is_graph: bool


@dataclass(frozen=True)
class Copies:
    """Memory of one purpose that is there more often than needed.

    Attributes:
        held: what the copies take, in bytes.
    """

    held: int
    code: str


@dataclass(frozen=True)
class MemoryDiagnosis:
    """One device of one snapshot.

    Attributes:
        source: the file's name.
        position: the moment that is looked at: so many allocations and frees after the record began.
        held, reserved: bytes of blocks, and of segments around them, at that moment.
        by_category: the bytes held, by FOREIGN_CATEGORIES.
        kinds: the blocks that hold them, the largest kind first.
        twice: optimizer state that exists twice.
        logits: fp32 copies of logits that were computed in half precision.
        steps: how many the record has.
        is_recorded: the snapshot names its categories itself.
    """

    source: str
    device: int
    position: int
    failure: FailedAllocation | None
    failed_at: str
    held: int
    reserved: int
    peak: int
    by_category: Mapping[str, int]
    kinds: Sequence[Kind]
    free: FreePieces
    leak: Leak | None
    twice: Copies | None
    logits: Copies | None
    steps: int
    is_recorded: bool
    has_stacks: bool
    record: DeviceRecord = field(repr=False, compare=False)
    inference: Inference = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file, and the device where it is not the first."""
        return self.source if self.device == 0 else f"{self.source}, device {self.device}"

    @property
    def is_failed(self) -> bool:
        return self.failure is not None


def totals(record: DeviceRecord) -> list[int]:
    """Bytes held at every position 0..length."""
    changes = [0] * (record.length + 2)
    for block in record.blocks:
        changes[block.start] += block.size
        changes[block.end] -= block.size
    return list(accumulate(changes[:-1]))


def diagnose_memory(source: str, record: DeviceRecord) -> MemoryDiagnosis:
    """Look at the last failure of a device, or at its peak."""
    inference = Inference(record)
    totals_bytes = totals(record)
    highest = max(range(len(totals_bytes)), key=totals_bytes.__getitem__)
    failure = record.failures[-1] if record.failures else None
    position = highest if failure is None else failure.position
    alive = [index for index, block in enumerate(record.blocks) if block.start <= position < block.end]
    by_category = dict.fromkeys(FOREIGN_CATEGORIES, 0)
    for index in alive:
        by_category[inference.categories[index]] += record.blocks[index].size
    codes = [code_of(stack) for stack in record.stacks]
    operations = [operation_of(stack) for stack in record.stacks]
    counted: Counter[tuple[int, str, str, str]] = Counter()
    for index in alive:
        block = record.blocks[index]
        named = inference.name_of(block) if inference.is_recorded else (codes[block.stack], operations[block.stack])
        counted[block.size, inference.categories[index], *named] += 1
    kinds = [Kind(size, count, *rest) for (size, *rest), count in counted.items()]
    kinds.sort(key=lambda kind: (-kind.total, -kind.size, kind.code))
    segments = record.segments_at(record.entries[position] if failure is None else failure.entry)
    blocks = [record.blocks[index] for index in alive]
    return MemoryDiagnosis(
        source,
        record.device,
        position,
        failure,
        "" if failure is None else codes[failure.stack],
        totals_bytes[position],
        sum(segment.size for segment in segments),
        totals_bytes[highest],
        by_category,
        kinds,
        _free_pieces(segments, blocks, failure),
        _leak(record, inference, blocks, codes),
        _state_twice(record, inference, alive),
        _half_logits(record, inference, blocks, failure, totals_bytes[position], codes),
        len(inference.steps),
        inference.is_recorded,
        len(record.stacks) > 1,
        record,
        inference,
    )


def _free_pieces(segments: Sequence, blocks: Sequence[Block], failure: FailedAllocation | None) -> FreePieces:
    """Subtract the blocks from the segments; blocks are rounded up, as the allocator does."""
    ordered = sorted((block.address, block.address + _round_up(block.size)) for block in blocks)
    usable, elsewhere, largest = 0, 0, 0
    next_block = 0
    stream = None if failure is None else failure.stream
    for segment in sorted(segments, key=lambda segment: segment.address):
        pieces, at, end = [], segment.address, segment.address + segment.size
        while next_block < len(ordered) and ordered[next_block][0] < end:
            start, stop = ordered[next_block]
            next_block += 1
            if start > at:
                pieces.append(start - at)
            at = max(at, min(stop, end))
        if end > at:
            pieces.append(end - at)
        if segment.pool == DEFAULT_POOL and stream in (None, segment.stream):
            usable += sum(pieces)
            largest = max(largest, *pieces, 0)
        else:
            elsewhere += sum(pieces)
    requested = 0 if failure is None else failure.size
    free_of_device = 0 if failure is None else failure.device_free
    is_cause = max(largest, free_of_device) < requested <= usable
    expandable = any(segment.is_expandable for segment in segments)
    return FreePieces(usable, largest, elsewhere, is_cause, expandable)


def _leak(record: DeviceRecord, inference: Inference, alive: Sequence[Block], codes: Sequence[str]) -> Leak | None:
    steps = inference.steps or _repetitions(record)
    if len(steps) < _LEAK_STEPS:
        return None
    members: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in alive:
        if block.start and inference.roles[block.stack] not in (OPTIMIZER, "initial"):
            members[block.stack, block.size].append(block)
    now = bisect_right(steps, max((block.start for block in alive), default=0))
    left: list[tuple[int, int, list[Block]]] = []
    for (stack, _), blocks in members.items():
        steps_of_blocks = {bisect_right(steps, block.start) for block in blocks}
        first, last = min(steps_of_blocks), max(steps_of_blocks)
        # Every other step at least, up to now.
        is_regular = len(steps_of_blocks) >= max(_LEAK_STEPS, 0.5 * (last - first + 1)) and last >= now - 2
        if is_regular:
            left.append((stack, sum(block.size for block in blocks) // len(steps_of_blocks), blocks))
    leaked_bytes = sum(block.size for _, _, blocks in left for block in blocks)
    if leaked_bytes < _TELLING * sum(block.size for block in alive):
        return None
    left.sort(key=lambda entry: -entry[1])
    forward = [stack for stack, _, _ in left if inference.roles[stack] == FORWARD]
    operations = {operation_of(record.stacks[stack]) for stack in forward}
    is_graph = len(left) >= 3 and max(len({codes[stack] for stack in forward}), len(operations)) >= 3
    code = codes[left[0][0]]
    if is_graph:
        code = _common_code([record.stacks[stack] for stack in forward]) or code
    grown = len({bisect_right(steps, block.start) for _, _, blocks in left for block in blocks})
    return Leak(sum(size for _, size, _ in left), grown, leaked_bytes, code, is_graph)


def _repetitions(record: DeviceRecord) -> list[int]:
    """Find steps where no backward pass and no optimizer tells them: the rarest allocation that recurs regularly."""
    starts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block in record.blocks:
        if block.start:
            starts[block.stack, block.size].append(block.start)
    best: list[int] = []
    for positions in starts.values():
        positions.sort()
        gaps = [later - earlier for earlier, later in pairwise(positions)]
        if len(gaps) < _LEAK_STEPS or max(gaps) > 1.5 * median(gaps) or min(gaps) < 3:
            continue
        if not best or (len(positions), positions[0]) < (len(best), best[0]):
            best = positions
    return best


def _common_code(stacks: Sequence[Sequence[Frame]]) -> str:
    outward = zip(*(reversed(stack) for stack in stacks), strict=False)
    common = [frames[0] for frames in takewhile(lambda frames: len(set(frames)) == 1, outward)]
    return code_of([frame for frame in reversed(common) if is_own(frame)])


def _state_twice(record: DeviceRecord, inference: Inference, alive: Iterable[int]) -> Copies | None:
    """Find lines of an optimizer that made more state than there are parameters."""
    parameters = inference.parameter_count
    if not parameters:
        return None
    blocks_by_line: dict[Frame, list[Block]] = defaultdict(list)
    for index in alive:
        block = record.blocks[index]
        if inference.categories[index] == "optimizer state" and inference.roles[block.stack] == OPTIMIZER:
            inner = next(frame for frame in record.stacks[block.stack] if frame.filename.endswith(".py"))
            blocks_by_line[inner].append(block)
    twice = [blocks for blocks in blocks_by_line.values() if len(blocks) >= 1.9 * parameters]
    if not twice:
        return None
    state_bytes = sum(block.size for blocks in twice for block in blocks)
    calls = {code_of(record.stacks[block.stack]) for blocks in twice for block in blocks}
    return Copies(state_bytes // 2, " and ".join(sorted(calls)[:2]))


def _half_logits(
    record: DeviceRecord,
    inference: Inference,
    alive: Sequence[Block],
    failure: FailedAllocation | None,
    held_bytes: int,
    codes: Sequence[str],
) -> Copies | None:
    """Find what is twice as large as a product that it follows, shortly before the backward pass."""
    computed = (FORWARD, USER)
    allocated = sorted((block for block in record.blocks if block.start), key=lambda block: block.start)
    order = {id(block): number for number, block in enumerate(allocated)}
    forward = [block for block in alive if block.start and inference.roles[block.stack] in computed]
    copies = []
    for block in forward:
        if block.size < _TELLING * held_bytes:
            continue
        number = order[id(block)]
        has_half = any(
            half.size * 2 == block.size and half.end > block.start and inference.roles[half.stack] in computed
            for half in allocated[max(0, number - _NEAR_LOSS) : number]
        )
        later = [inference.roles[following.stack] for following in allocated[number + 1 : number + 1 + _NEAR_LOSS]]
        if has_half and (len(later) < _NEAR_LOSS or not set(later) <= set(computed)):
            copies.append(block)
    size = sum(block.size for block in copies)
    code = codes[copies[0].stack] if copies else ""
    if failure is not None and inference.roles[failure.stack] in computed:
        recent = [block for block in allocated if block.start <= failure.position][-_NEAR_LOSS:]
        size_of_failure = _round_up(failure.size)
        if any(_round_up(2 * half.size) == size_of_failure and half.end > failure.position for half in recent):
            size, code = size + failure.size, code or codes[failure.stack]
    return Copies(size, code) if size >= _TELLING_LOGITS * held_bytes else None


def _round_up(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


@dataclass(frozen=True)
class Longer:
    """A rank whose activations are larger than those of others by the same lines.

    Attributes:
        ratio: of the sizes.
        difference: bytes that it holds more.
    """

    name: str
    ratio: float
    difference: int


def longer_batch(diagnoses: Sequence[MemoryDiagnosis]) -> Longer | None:
    """Find a rank that has the same parameters as the others, and larger activations by the same lines."""
    if len(diagnoses) < 2:
        return None
    sizes = [_largest_of_lines(diagnosis) for diagnosis in diagnoses]
    longer = []
    for number, line_sizes in enumerate(sizes):
        others = [other for place, other in enumerate(sizes) if place != number]
        ratios = []
        for line, size in line_sizes.items():
            theirs = [other[line] for other in others if other.get(line)]
            if theirs:
                ratios.append(size / median(theirs))
        if len(ratios) < 3:
            continue
        ratio = median(ratios)
        alike = sum(abs(rank_ratio / ratio - 1) < 0.02 for rank_ratio in ratios) / len(ratios)
        if ratio > 1.05 and alike >= 0.5:
            median_held = median(diagnosis.held for place, diagnosis in enumerate(diagnoses) if place != number)
            longer.append(Longer(diagnoses[number].name, ratio, int(diagnoses[number].held - median_held)))
    return max(longer, key=lambda candidate: candidate.ratio, default=None)


def _largest_of_lines(diagnosis: MemoryDiagnosis) -> dict[tuple[str, str], int]:
    """The largest allocation of each line of forward passes, whenever it was."""
    record, roles = diagnosis.record, diagnosis.inference.roles
    largest: dict[int, int] = defaultdict(int)
    for block in record.blocks:
        if block.start and roles[block.stack] in (FORWARD, USER):
            largest[block.stack] = max(largest[block.stack], block.size)
    lines: dict[tuple[str, str], int] = defaultdict(int)
    for stack, size in largest.items():
        key = code_of(record.stacks[stack]), operation_of(record.stacks[stack])
        lines[key] = max(lines[key], size)
    return lines


@dataclass(frozen=True)
class MemoryChange:
    """Bytes by which the memory of one category and line differs between two moments."""

    category: str
    code: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        return self.after - self.before

    @property
    def what(self) -> str:
        if not self.before:
            return "new"
        if not self.after:
            return "gone"
        return "larger" if self.difference > 0 else "smaller"


def changes(before: MemoryDiagnosis, after: MemoryDiagnosis) -> list[MemoryChange]:
    """Return the differences by category and line, the largest first; the differences add up to that of all held."""
    sizes_by_line: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for place, diagnosis in enumerate((before, after)):
        for kind in diagnosis.kinds:
            sizes_by_line[kind.category, kind.code][place] += kind.total
    differences = [MemoryChange(*key, *sizes) for key, sizes in sizes_by_line.items() if sizes[0] != sizes[1]]
    return sorted(differences, key=lambda change: (-abs(change.difference), change.code))
