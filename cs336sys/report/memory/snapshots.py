"""The tables, the page and the pictures of ``memprof --from``: snapshots of any program."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cs336sys.measure.allocations.diagnosis import MemoryDiagnosis, changes
from cs336sys.measure.allocations.inference import FOREIGN_CATEGORIES
from cs336sys.measure.allocations.timeline import Allocation, AllocationTimeline, Region, thinned
from cs336sys.report.memory.page import timeline_page, write_timeline
from cs336sys.report.memory.verdict import Verdict, size_words, verdicts
from cs336sys.report.outputs import write_file
from cs336sys.report.table import Column, Table, fill_row, named_columns, with_rows

_TIMELINE_POINTS = 400
_MOST_REGIONS = 30

_SNAPSHOT = Column("snapshot", "snapshot", value=lambda diagnosis: diagnosis.name)
_CATEGORIES = {name: Column(f"{name.replace(' ', '_')}_bytes", name, "bytes") for name in FOREIGN_CATEGORIES}


def snapshot_tables(diagnoses: Sequence[MemoryDiagnosis], top: int) -> list[Table]:
    """The verdict first; then causes and how sure they are, who holds what, the largest kinds."""
    diagnosed = verdicts(diagnoses)
    rows = [{"snapshot": verdict.diagnosis.name, "verdict": verdict.sentence} for verdict in diagnosed]
    ordered = [verdict.diagnosis for verdict in diagnosed]
    return [
        Table("verdict", "why memory ran out", (_SNAPSHOT, Column("verdict", "verdict")), rows),
        *with_rows(_cause_table(diagnosed), _holders(ordered), _ranks_table(ordered), _kinds(ordered, top)),
    ]


def _cause_table(diagnosed: Sequence[Verdict]) -> Table:
    columns = (
        _SNAPSHOT,
        Column("cause", "cause", value=lambda cause: cause.name),
        Column("certainty", "how sure", value=lambda cause: cause.certainty),
        Column("cause_bytes", "holds", "bytes", lambda cause: cause.size),
        Column("why", "why", value=lambda cause: cause.why),
        Column("advice", "what to do", value=lambda cause: cause.advice),
    )
    rows = [
        {"snapshot": verdict.diagnosis.name} | fill_row(columns[1:], cause)
        for verdict in diagnosed
        for cause in verdict.causes
    ]
    return Table("causes", "causes, and how sure they are", columns, rows)


def _holders(diagnoses: Sequence[MemoryDiagnosis]) -> Table:
    columns = (
        _SNAPSHOT,
        Column("moment", "moment", value=_moment_name),
        Column("held_bytes", "held", "bytes", lambda diagnosis: diagnosis.size),
        *_CATEGORIES.values(),
        Column("peak_bytes", "peak", "bytes", lambda diagnosis: diagnosis.peak),
        Column("reserved_bytes", "reserved", "bytes", lambda diagnosis: diagnosis.moment.free.reserved or None),
        Column("free_bytes", "free in segments", "bytes", lambda diagnosis: diagnosis.moment.free.usable),
        Column("largest_free_bytes", "largest piece", "bytes", lambda diagnosis: diagnosis.moment.free.largest),
        Column(
            "elsewhere_bytes", "free for others", "bytes", lambda diagnosis: diagnosis.moment.free.elsewhere or None
        ),
        Column("asked_bytes", "asked for", "bytes"),
        Column("device_free_bytes", "free of the device", "bytes"),
        Column("events", "events", "count", lambda diagnosis: diagnosis.moment.record.length),
        Column("steps", "steps", "count", lambda diagnosis: len(diagnosis.moment.inference.steps) or None),
    )
    rows: list[dict[str, Any]] = []
    notes = {"For a model that is there, memprof --memory 80GiB --plan finds the cheapest change that fits.": None}
    for diagnosis in diagnoses:
        row = fill_row(columns, diagnosis)
        if (failure := diagnosis.moment.failure) is not None:
            row |= {"asked_bytes": failure.size, "device_free_bytes": failure.device_free}
        row |= {_CATEGORIES[category].key: size or None for category, size in diagnosis.by_category.items()}
        rows.append(row)
        notes[_how_known(diagnosis)] = None
        if pools := diagnosis.by_category["graph pools"]:
            notes[
                f"{diagnosis.name}: private pools, as of CUDA graphs, hold {size_words(pools)}; what for cannot be told"
            ] = None
        if diagnosis.moment.record.unknown_frees and not diagnosis.moment.inference.is_recorded:
            notes[
                f"{diagnosis.name}: {diagnosis.moment.record.unknown_frees} blocks are older than the record and freed "
                "within it; they count from its beginning"
            ] = None
    return Table("memory", "who holds memory at that moment", columns, rows, notes=tuple(notes))


def _how_known(diagnosis: MemoryDiagnosis) -> str:
    if diagnosis.moment.inference.is_recorded:
        return "Categories are those that memprof has recorded."
    if not diagnosis.moment.record.has_stacks:
        return (
            f"{diagnosis.name}: no stacks were recorded, so categories are unknown: record with "
            "_record_memory_history(stacks='python')"
        )
    return (
        "Categories are inferred from stacks (optimizer, module construction, forward; autograd's threads have none) "
        "and lifetimes (what outlives the forward pass, the backward pass, the step). Memory older than the record is "
        "parameters or optimizer state where gradients of its sizes exist."
    )


def _ranks_table(diagnoses: Sequence[MemoryDiagnosis]) -> Table | None:
    """Return what each of several snapshots holds more than the median of all."""
    if len(diagnoses) < 2:
        return None
    columns = (_SNAPSHOT, Column("held_bytes", "held over the median", "bytes"), *_CATEGORIES.values())
    median_held = median(diagnosis.size for diagnosis in diagnoses)
    middle = {name: median(diagnosis.by_category[name] for diagnosis in diagnoses) for name in FOREIGN_CATEGORIES}
    rows: list[dict[str, Any]] = [
        {"snapshot": diagnosis.name, "held_bytes": diagnosis.size - median_held}
        | {
            _CATEGORIES[name].key: difference
            for name, size in diagnosis.by_category.items()
            if (difference := size - middle[name])
        }
        for diagnosis in diagnoses
    ]
    return Table("ranks", "who holds more than the median of all snapshots", columns, rows)


def _kinds(diagnoses: Sequence[MemoryDiagnosis], top: int) -> Table:
    columns = (
        _SNAPSHOT,
        Column("size_bytes", "size of one", "bytes", lambda kind: kind.size),
        Column("count", "alive", "count", lambda kind: kind.count),
        Column("total_bytes", "all", "bytes", lambda kind: kind.total),
        Column("share_percent", "share", "percent"),
        Column("category", "category", value=lambda kind: kind.category),
        Column("operation", "operation", value=lambda kind: kind.operation or None),
        Column("code", "code", value=lambda kind: kind.code or None),
    )
    rows = [
        fill_row(columns[1:], kind)
        | {"snapshot": diagnosis.name, "share_percent": 100 * kind.total / max(1, diagnosis.size)}
        for diagnosis in diagnoses
        for kind in diagnosis.kinds[:top]
    ]
    return Table("kinds", f"the {top} largest kinds of memory", columns, rows)


def snapshot_difference_tables(
    before: Sequence[MemoryDiagnosis], after: Sequence[MemoryDiagnosis], top: int
) -> list[Table]:
    """Build tables of memory that is new, gone, larger or smaller from one snapshot to another, each at its moment."""
    pairs = [(old, new) for new in after for old in before if old.moment.record.device == new.moment.record.device]
    rows: list[dict[str, Any]] = []
    sentences = []
    for old, new in pairs:
        size_changes = changes(old, new)
        name = f"{old.name} to {new.name}"
        for change in size_changes[:top]:
            rows.append(_block_change_row(name, change.what, change.category, change.code, change.before, change.after))
        rest = size_changes[top:]
        if rest:
            sizes = [sum(change.before for change in rest), sum(change.after for change in rest)]
            rows.append(_block_change_row(name, f"{len(rest)} more", "", "", *sizes))
        same = old.size - sum(change.before for change in size_changes)
        rows.append(_block_change_row(name, "the same", "", "", same, same))
        rows.append(_block_change_row(name, "all", "", "", old.size, new.size))
        most = size_changes[0] if size_changes else None
        sentence = f"{size_words(new.size)} is held after {size_words(old.size)}"
        if most is not None:
            sentence += (
                f"; the largest change is {most.what}: {most.category} from {most.code or 'no stack'}, "
                f"{size_words(most.before)} to {size_words(most.after)}"
            )
        sentences.append({"snapshot": name, "verdict": f"{sentence}."})
    verdict = Table("verdict", "what has changed", (_SNAPSHOT, Column("verdict", "verdict")), sentences)
    columns = (_SNAPSHOT, *named_columns("what", "category", "code", "before_bytes", "after_bytes", "difference_bytes"))
    note = "Each at the failure, or else at the peak; rows add up to the last one."
    return [verdict, Table("against", "memory by category and line, before and after", columns, rows, notes=(note,))]


def _block_change_row(name: str, label: str, category: str, code: str, before: int, after: int) -> dict[str, Any]:
    return {
        "snapshot": name, "what": label, "category": category or None, "code": code or None,
        "before_bytes": before, "after_bytes": after, "difference_bytes": after - before,
    }  # fmt: skip


def timeline_data(diagnosis: MemoryDiagnosis) -> dict[str, Any]:
    """Return the data of a snapshot's picture: bytes by category after each event, and where steps begin."""
    categories = diagnosis.moment.inference.categories
    allocations = [
        Allocation(block.address, block.size, block.start, block.end, "", category)
        for block, category in zip(diagnosis.moment.record.blocks, categories, strict=True)
    ]
    starts = diagnosis.moment.inference.steps if len(diagnosis.moment.inference.steps) < _MOST_REGIONS else []
    bounds = [0, *starts, diagnosis.moment.record.length]
    regions = [
        Region(f"step {number}", start, end) for number, (start, end) in enumerate(pairwise(bounds), 1) if starts
    ]
    timeline = AllocationTimeline(allocations, diagnosis.moment.record.length, regions, categories=FOREIGN_CATEGORIES)
    return {
        "timeline": thinned(timeline, _TIMELINE_POINTS),
        "regions": [{"name": region.name, "start": region.start, "end": region.end} for region in regions],
        "moment": {"position": diagnosis.moment.position, "name": _moment_name(diagnosis)},
    }


def _moment_name(diagnosis: MemoryDiagnosis) -> str:
    return "peak" if diagnosis.moment.failure is None else "failure"


def snapshot_page(diagnoses: Sequence[MemoryDiagnosis], tables: Sequence[Table]) -> str:
    """Return a page: what fills each device and what to do about it, its timeline, then all tables but the verdict."""
    diagnosed = verdicts(diagnoses)
    timelines = [(verdict.diagnosis.name, timeline_data(verdict.diagnosis)) for verdict in diagnosed]
    title = "memory: " + ", ".join(diagnosis.name for diagnosis in diagnoses)
    shown = [table for table in tables if table.name not in ("verdict", "causes")]
    return timeline_page(timelines, title, shown, diagnosed)


def write_snapshot_page(diagnoses: Sequence[MemoryDiagnosis], tables: Sequence[Table], path: Path) -> None:
    """Write all tables and the timeline of each snapshot as one page, or raise an OutputError."""
    write_file(path, snapshot_page(diagnoses, tables).encode(), "--html")


def write_snapshot_files(diagnoses: Sequence[MemoryDiagnosis], top: int, directory: Path) -> None:
    """Write each snapshot's timeline as ``.png``, ``.svg`` and ``.html`` into a folder, or raise an OutputError."""
    for diagnosis in diagnoses:
        device = diagnosis.moment.record.device
        stem = Path(diagnosis.source).stem + (f"-device{device}" if device else "")
        page = snapshot_page([diagnosis], snapshot_tables([diagnosis], top))
        write_timeline(directory / stem, timeline_data(diagnosis), diagnosis.name, page)
