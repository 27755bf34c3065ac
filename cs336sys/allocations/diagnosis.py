"""Find what fills a device at the moment of failure, or else at the peak, and known mistakes among the causes."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cs336sys.allocations.causes import Moment, find_causes, free_pieces, longer_ratio, memory_cause
from cs336sys.allocations.dump import DeviceRecord
from cs336sys.allocations.inference import FOREIGN_CATEGORIES, Inference, code_of, operation_of
from cs336sys.allocations.timeline import held_bytes
from cs336sys.findings import Finding

# Ranks hold the same model, or shards of it that are rounded.
_SAME_PARAMETERS = 0.02


@dataclass(frozen=True)
class Kind:
    """Blocks of one size that one line made for one purpose, at one moment."""

    size: int  # Of one, in bytes.
    count: int
    category: str
    code: str  # ``src/train.py:88 train_step``; like the operation empty where no stack says.
    operation: str  # ``linear``

    @property
    def total(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class MemoryDiagnosis:
    """One device of one snapshot."""

    source: str  # The file's name.
    moment: Moment = field(repr=False, compare=False)
    failed_at: str  # The line whose allocation failed; empty if none failed.
    peak: int  # Most bytes at once.
    by_category: Mapping[str, int]  # The bytes at the moment, by FOREIGN_CATEGORIES.
    kinds: Sequence[Kind]  # The blocks that hold them, the largest kind first.
    causes: Sequence[Finding]

    @property
    def name(self) -> str:
        """Return the file's name, with the device where it is not the first."""
        device = self.moment.record.device
        return self.source if device == 0 else f"{self.source}, device {device}"

    @property
    def size(self) -> int:
        """Return the bytes of all blocks at the moment."""
        return self.moment.size


def diagnose_memory(source: str, record: DeviceRecord) -> MemoryDiagnosis:
    """Find what fills a device at its last failure, or else at its peak, and why."""
    inference = Inference(record)
    totals = held_bytes(record.blocks, record.last_position)
    peak = max(totals)
    failure = record.failures[-1] if record.failures else None
    position = totals.index(peak) if failure is None else failure.position
    live = [index for index, block in enumerate(record.blocks) if block.start <= position < block.end]
    lines = [(code_of(stack), operation_of(stack)) for stack in record.stacks]
    by_category = dict.fromkeys(FOREIGN_CATEGORIES, 0)
    kind_counts: Counter[tuple[int, str, str, str]] = Counter()
    for index in live:
        block, category = record.blocks[index], inference.categories[index]
        by_category[category] += block.size
        line = inference.recorded_line(block) if inference.is_recorded else lines[block.stack]
        kind_counts[block.size, category, *line] += 1
    kinds = [Kind(size, count, *names) for (size, *names), count in kind_counts.items()]
    kinds.sort(key=lambda kind: (-kind.total, -kind.size, kind.code))
    segments = record.segments_at(record.entry_of_position[position] if failure is None else failure.entry)
    stream = None if failure is None else failure.stream
    free = free_pieces([record.blocks[index] for index in live], segments, stream)
    moment = Moment(record, inference, position, failure, live, totals[position], free)
    failed_at = "" if failure is None else code_of(record.stacks[failure.stack])
    return MemoryDiagnosis(source, moment, failed_at, peak, by_category, kinds, find_causes(moment))


def longest_batch(diagnoses: Sequence[MemoryDiagnosis]) -> Finding | None:
    """Find the rank whose forward pass allocates most in proportion to ranks with equal parameters, if there is one."""
    longer: list[Finding] = []
    for diagnosis in diagnoses:
        parameters = diagnosis.by_category["parameters"]
        others = [
            other
            for other in diagnoses
            if other is not diagnosis
            and abs(other.by_category["parameters"] - parameters) <= _SAME_PARAMETERS * parameters
        ]
        ratio = longer_ratio(diagnosis.moment, [other.moment for other in others])
        if others and ratio > 1:
            added_bytes = max(0, int(diagnosis.size - median(other.size for other in others)))  # It may hold no more.
            longer.append(memory_cause("longer batch", added_bytes, diagnosis.name, ratio=ratio, is_among_ranks=True))
    return max(longer, key=lambda finding: finding.facts["ratio"], default=None)


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
    def description(self) -> str:
        if not self.before:
            return "new"
        if not self.after:
            return "gone"
        return "larger" if self.difference > 0 else "smaller"


def changes(before: MemoryDiagnosis, after: MemoryDiagnosis) -> list[MemoryChange]:
    """Return the differences by category and line, the largest first; they add up to the difference of all."""
    sizes_by_line: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])  # Before and after.
    for side, diagnosis in enumerate((before, after)):
        for kind in diagnosis.kinds:
            sizes_by_line[kind.category, kind.code][side] += kind.total
    differences = [MemoryChange(*key, *sizes) for key, sizes in sizes_by_line.items() if sizes[0] != sizes[1]]
    return sorted(differences, key=lambda change: (-abs(change.difference), change.code))
