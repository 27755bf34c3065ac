"""The tables, the page and the pictures of ``memprof --from``: snapshots of any program."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cs336sys.allocations.diagnosis import MemoryDiagnosis, changes
from cs336sys.allocations.inference import FOREIGN_CATEGORIES
from cs336sys.allocations.timeline import Allocation, AllocationTimeline, Region, thinned
from cs336sys.commands.memprof.page import timeline_page, write_timeline
from cs336sys.commands.memprof.verdict import Verdict, size_words, verdicts
from cs336sys.tables.table import Column, Table, named_columns, with_rows

_MOST_REGIONS = 30

(_SNAPSHOT,) = named_columns("snapshot")
_CATEGORIES = {name: Column(f"{name.replace(' ', '_')}_bytes", name, "bytes") for name in FOREIGN_CATEGORIES}


def snapshot_tables(diagnoses: Sequence[MemoryDiagnosis], top: int) -> list[Table]:
    """The verdict first; then causes and how sure they are, who holds what, the largest kinds."""
    sorted_verdicts = verdicts(diagnoses)
    rows = [{"snapshot": verdict.diagnosis.name, "verdict": verdict.sentence} for verdict in sorted_verdicts]
    ordered = [verdict.diagnosis for verdict in sorted_verdicts]
    return [
        Table("verdict", "why memory ran out", (_SNAPSHOT, Column("verdict", "verdict")), rows),
        *with_rows(_cause_table(sorted_verdicts), _holders(ordered), _ranks_table(ordered), _kinds(ordered, top)),
    ]


def _cause_table(sorted_verdicts: Sequence[Verdict]) -> Table:
    columns = (
        *named_columns("snapshot", "cause"),
        Column("certainty", "how sure"),
        Column("cause_bytes", "holds", "bytes"),
        Column("why", "why"),
        Column("advice", "what to do"),
    )
    rows = [
        vars(cause) | {"snapshot": verdict.diagnosis.name, "cause": cause.name, "cause_bytes": cause.size}
        for verdict in sorted_verdicts
        for cause in verdict.causes
    ]
    return Table("causes", "causes, and how sure they are", columns, rows)


def _holders(diagnoses: Sequence[MemoryDiagnosis]) -> Table:
    columns = (
        *named_columns("snapshot", "moment", "held_bytes"),
        *_CATEGORIES.values(),
        *named_columns(
            "peak_bytes", "reserved_bytes", free_bytes="free in segments", largest_free_bytes="largest piece"
        ),
        *named_columns(
            elsewhere_bytes="free for others", asked_bytes="asked for", device_free_bytes="free of the device"
        ),
        Column("events", "events", "count"),
        Column("steps", "steps", "count"),
    )
    rows: list[dict[str, Any]] = []
    notes = {"For a model that is there, memprof --memory 80GiB --plan finds the cheapest change that fits.": None}
    for diagnosis in diagnoses:
        moment, free = diagnosis.moment, diagnosis.moment.free
        row = {
            "snapshot": diagnosis.name,
            "moment": _moment_name(diagnosis),
            "held_bytes": diagnosis.size,
            "peak_bytes": diagnosis.peak,
            "reserved_bytes": free.reserved or None,
            "free_bytes": free.usable,
            "largest_free_bytes": free.largest,
            "elsewhere_bytes": free.elsewhere or None,
            "events": moment.record.length,
            "steps": len(moment.inference.steps) or None,
        }
        if moment.failure is not None:
            row |= {"asked_bytes": moment.failure.size, "device_free_bytes": moment.failure.device_free}
        rows.append(row | {_CATEGORIES[name].key: size or None for name, size in diagnosis.by_category.items()})
        notes |= dict.fromkeys(_notes(diagnosis))
    return Table("memory", "who holds memory at that moment", columns, rows, notes=tuple(notes))


def _notes(diagnosis: MemoryDiagnosis) -> Iterator[str]:
    """Yield how categories are known, and what is not."""
    record = diagnosis.moment.record
    if diagnosis.moment.inference.is_recorded:
        yield "Categories are those that memprof has recorded."
    elif not record.has_stacks:
        advice = "record with _record_memory_history(stacks='python')"
        yield f"{diagnosis.name}: no stacks were recorded, so categories are unknown: {advice}"
    else:
        yield (
            "Categories are inferred from stacks (optimizer, module construction, forward; autograd's threads have "
            "none) and lifetimes (what outlives the forward pass, the backward pass, the step). Memory older than the "
            "record is parameters or optimizer state where gradients of its sizes exist."
        )
    if pools := diagnosis.by_category["graph pools"]:
        yield f"{diagnosis.name}: private pools, as of CUDA graphs, hold {size_words(pools)}; what for cannot be told"
    if record.unknown_frees and not diagnosis.moment.inference.is_recorded:
        blocks = f"{record.unknown_frees} blocks are older than the record and freed within it"
        yield f"{diagnosis.name}: {blocks}; they count from its beginning"


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
        Column("size_bytes", "size of one", "bytes"),
        Column("count", "alive", "count"),
        Column("total_bytes", "all", "bytes"),
        *named_columns("share_percent", "category", "operation", "code"),
    )
    rows = [
        {key: value or None for key, value in vars(kind).items()}
        | {"snapshot": diagnosis.name, "size_bytes": kind.size, "total_bytes": kind.total}
        | {"share_percent": 100 * kind.total / max(1, diagnosis.size)}
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
        shown, rest = size_changes[:top], size_changes[top:]
        sizes = [(change.what, change.category, change.code, change.before, change.after) for change in shown]
        if rest:
            label = f"{len(rest)} more"
            sizes.append((label, "", "", sum(change.before for change in rest), sum(change.after for change in rest)))
        same = old.size - sum(change.before for change in size_changes)
        sizes += [("the same", "", "", same, same), ("all", "", "", old.size, new.size)]
        rows += [
            {"snapshot": name, "what": label, "category": category or None, "code": code or None}
            | {"before_bytes": old_bytes, "after_bytes": new_bytes, "difference_bytes": new_bytes - old_bytes}
            for label, category, code, old_bytes, new_bytes in sizes
        ]
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


def timeline_data(diagnosis: MemoryDiagnosis) -> dict[str, Any]:
    """Return the data of a snapshot's picture: bytes by category after each event, and where steps begin."""
    record, inference = diagnosis.moment.record, diagnosis.moment.inference
    allocations = [
        Allocation(block.address, block.size, block.start, block.end, "", category)
        for block, category in zip(record.blocks, inference.categories, strict=True)
    ]
    starts = inference.steps if len(inference.steps) < _MOST_REGIONS else []
    bounds = [0, *starts, record.length]
    regions = [
        Region(f"step {number}", start, end) for number, (start, end) in enumerate(pairwise(bounds), 1) if starts
    ]
    timeline = AllocationTimeline(allocations, record.length, regions, categories=FOREIGN_CATEGORIES)
    return {
        "timeline": thinned(timeline),
        "regions": [asdict(region) for region in regions],
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


def write_snapshot_files(diagnoses: Sequence[MemoryDiagnosis], top: int, directory: Path) -> None:
    """Write each snapshot's timeline as ``.png``, ``.svg`` and ``.html`` into a folder, or raise an OutputError."""
    for diagnosis in diagnoses:
        device = diagnosis.moment.record.device
        stem = Path(diagnosis.source).stem + (f"-device{device}" if device else "")
        page = snapshot_page([diagnosis], snapshot_tables([diagnosis], top))
        write_timeline(directory / stem, timeline_data(diagnosis), diagnosis.name, page)
