"""The verdict, the tables, the page and the pictures of ``memprof --from``: snapshots of any program."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cs336sys.allocations.causes import Moment
from cs336sys.allocations.diagnosis import MemoryDiagnosis, changes, longest_batch
from cs336sys.allocations.inference import FOREIGN_CATEGORIES, INITIAL, OPTIMIZER
from cs336sys.allocations.timeline import held_bytes, thinned
from cs336sys.commands.memprof.page import timeline_page, write_timeline
from cs336sys.commands.memprof.tables import CERTAINTIES, Verdict, say_memory
from cs336sys.tables.table import Column, Table, fill_row, named_columns, with_rows

_MOST_CATEGORIES = 3  # That the sentence on the event names.
_MOST_REGIONS = 30  # Names of more steps would not fit above the plot.

_SNAPSHOT = Column("snapshot", "snapshot", value=lambda diagnosis: diagnosis.name)
_CATEGORIES = {name: Column(f"{name.replace(' ', '_')}_bytes", name, "bytes") for name in FOREIGN_CATEGORIES}


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[Verdict]:
    """Return the verdict on each snapshot: on those that failed first, then on those that hold the most."""
    longest = longest_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda diagnosis: (diagnosis.moment.failure is None, -diagnosis.size))
    result = []
    for diagnosis in ordered:
        causes = list(diagnosis.causes)
        # The comparison with other ranks replaces that with this rank's own earlier steps.
        if longest is not None and longest.where == diagnosis.name:
            causes = [*(cause for cause in causes if cause.cause != "longer batch"), longest]
        causes.sort(key=lambda cause: cause.certainty != "measured")  # Proved causes first.
        event, advice = _event(diagnosis), ""
        # Say why no cause is known, unless the device holds nothing, or memprof itself recorded a step that went well.
        if not causes and diagnosis.kinds and not diagnosis.moment.inference.is_recorded:
            reason = next(reason for reason, test in _NO_CAUSE.items() if test(diagnosis.moment))
            event += " " + say_memory("no cause", cause=reason, kind=diagnosis.kinds[0])
            advice = say_memory("no cause remedy", cause=reason)
        result.append(Verdict(diagnosis, event, causes, advice))
    return result


def _event(diagnosis: MemoryDiagnosis) -> str:
    """Say which allocation failed, where, and which categories held the memory then."""
    sizes = sorted(((size, category) for category, size in diagnosis.by_category.items() if size), reverse=True)
    return say_memory("event", moment=diagnosis.moment, failed_at=diagnosis.failed_at, sizes=sizes[:_MOST_CATEGORIES])


# Why there is no cause: the first whose test holds.
_NO_CAUSE: dict[str, Callable[[Moment], bool]] = {
    "no history": lambda moment: not moment.record.last_position,
    "no stacks": lambda moment: not moment.record.has_stacks,
    "building": lambda moment: moment.failure is not None and moment.role(moment.failure) == INITIAL,
    "first update": lambda moment: _is_in_first_update(moment),
    # As many as growth is proved by.
    "no growth": lambda moment: len(moment.inference.steps) >= 3,
    # The record begins with the device's first allocation.
    "first step": lambda moment: (
        moment.failure is not None and not moment.inference.steps and all(block.start for block in moment.record.blocks)
    ),
    "few steps": lambda moment: True,
}


def _is_in_first_update(moment: Moment) -> bool:
    """Return whether the record's first update of an optimizer failed, with which its state is made."""
    record, steps, failure = moment.record, moment.inference.steps, moment.failure
    updates = [block.start for block in record.blocks if moment.role(block) == OPTIMIZER]
    return (
        failure is not None
        and moment.role(failure) == OPTIMIZER
        and all(block.start for block in record.blocks)
        and min(updates, default=failure.position) >= max(steps, default=0)
    )


def snapshot_tables(diagnoses: Sequence[MemoryDiagnosis], top: int) -> list[Table]:
    """Build the tables of the verdict, of causes and how sure they are, of who holds what, of the largest kinds."""
    sorted_verdicts = verdicts(diagnoses)
    rows = [{"snapshot": verdict.diagnosis.name, "verdict": verdict.sentence} for verdict in sorted_verdicts]
    ordered = [verdict.diagnosis for verdict in sorted_verdicts]
    return [
        Table("verdict", "why memory ran out", (_SNAPSHOT, Column("verdict", "verdict")), rows),
        *with_rows(_cause_table(sorted_verdicts), _holders_table(ordered), _ranks_table(ordered), _kinds(ordered, top)),
    ]


def _cause_table(sorted_verdicts: Sequence[Verdict]) -> Table:
    """Build the table of all causes: what each holds, what shows it, and what to do about it."""
    columns = (
        Column("cause", "cause", value=lambda finding: finding.cause),
        Column("certainty", "how sure", value=lambda finding: CERTAINTIES[finding.certainty]),
        Column("cause_bytes", "holds", "bytes", lambda finding: finding.amount),
        Column("why", "why", value=lambda finding: say_memory("why", finding)),
        Column("advice", "what to do", value=lambda finding: say_memory("remedy", finding)),
    )
    rows = [
        {"snapshot": verdict.diagnosis.name, **fill_row(columns, finding)}
        for verdict in sorted_verdicts
        for finding in verdict.causes
    ]
    return Table("causes", "causes, and how sure they are", (_SNAPSHOT, *columns), rows)


def _holders_table(diagnoses: Sequence[MemoryDiagnosis]) -> Table:
    """Build the table of who holds how much at the moment of each diagnosis, and what is free."""
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
        *named_columns(asked_bytes="asked for", device_free_bytes="free of the device"),
        Column("events", "events", "count", lambda diagnosis: diagnosis.moment.record.last_position),
        Column("steps", "steps", "count", lambda diagnosis: len(diagnosis.moment.inference.steps) or None),
    )
    rows: list[dict[str, Any]] = []
    # Keys of a dictionary: each sentence once, in order.
    notes = {"For a model that is there, memprof --memory 80GiB --plan finds the cheapest change that fits.": None}
    for diagnosis in diagnoses:
        by_category = {_CATEGORIES[name].key: size or None for name, size in diagnosis.by_category.items()}
        rows.append(fill_row(columns, diagnosis) | by_category)
        if (failure := diagnosis.moment.failure) is not None:
            rows[-1] |= {"asked_bytes": failure.size, "device_free_bytes": failure.device_free}
        # How the categories of memory were found, and what is not known of them.
        record, is_recorded = diagnosis.moment.record, diagnosis.moment.inference.is_recorded
        origin = "recorded" if is_recorded else "inferred" if record.has_stacks else "unknown"
        notes[say_memory(f"{origin} categories", name=diagnosis.name)] = None
        if pools := diagnosis.by_category["graph pools"]:
            notes[say_memory("private pools", name=diagnosis.name, pools=pools)] = None
        if record.unknown_frees and not is_recorded:
            notes[say_memory("older blocks", name=diagnosis.name, count=record.unknown_frees)] = None
    return Table("memory", "who holds memory at that moment", columns, rows, notes=tuple(notes))


def _ranks_table(diagnoses: Sequence[MemoryDiagnosis]) -> Table | None:
    """Build the table of what each of several snapshots holds more than the median of all."""
    if len(diagnoses) < 2:
        return None
    columns = (_SNAPSHOT, Column("held_bytes", "held over the median", "bytes"), *_CATEGORIES.values())
    median_held = median(diagnosis.size for diagnosis in diagnoses)
    medians = {name: median(diagnosis.by_category[name] for diagnosis in diagnoses) for name in FOREIGN_CATEGORIES}
    rows = []
    for diagnosis in diagnoses:
        row: dict[str, Any] = {"snapshot": diagnosis.name, "held_bytes": diagnosis.size - median_held}
        row |= {_CATEGORIES[name].key: size - medians[name] or None for name, size in diagnosis.by_category.items()}
        rows.append(row)
    return Table("ranks", "who holds more than the median of all snapshots", columns, rows)


def _kinds(diagnoses: Sequence[MemoryDiagnosis], top: int) -> Table:
    """Build the table of the ``top`` largest kinds of each diagnosis."""
    columns = (
        _SNAPSHOT,
        Column("size_bytes", "size of one", "bytes"),
        Column("count", "alive", "count"),
        Column("total_bytes", "all", "bytes"),
        *named_columns("share_percent", "category", "operation", "code"),
    )
    rows = [
        {key: value or None for key, value in vars(kind).items()}  # An empty text is shown as no value.
        | {"snapshot": diagnosis.name, "size_bytes": kind.size, "total_bytes": kind.total}
        | {"share_percent": 100 * kind.total / max(1, diagnosis.size)}
        for diagnosis in diagnoses
        for kind in diagnosis.kinds[:top]
    ]
    return Table("kinds", f"the {top} largest kinds of memory", columns, rows)


def snapshot_difference_tables(before: list[MemoryDiagnosis], after: list[MemoryDiagnosis], top: int) -> list[Table]:
    """Build tables of memory that is new, gone, larger or smaller from one snapshot to another, each at its moment."""
    pairs = [(old, new) for new in after for old in before if old.moment.record.device == new.moment.record.device]
    rows: list[dict[str, Any]] = []
    sentences = []
    for old, new in pairs:
        size_changes = changes(old, new)
        name = f"{old.name} to {new.name}"
        shown, others = size_changes[:top], size_changes[top:]
        lines = [(change.description, change.category, change.code, change.before, change.after) for change in shown]
        if others:
            before_bytes, after_bytes = sum(change.before for change in others), sum(change.after for change in others)
            lines.append((f"{len(others)} more", "", "", before_bytes, after_bytes))
        # What no change names is as large in both, so that the rows add up to the last.
        same_bytes = old.size - sum(change.before for change in size_changes)
        lines += [("the same", "", "", same_bytes, same_bytes), ("all", "", "", old.size, new.size)]
        rows += [
            {"snapshot": name, "what": label, "category": category or None, "code": code or None}
            | {"before_bytes": old_bytes, "after_bytes": new_bytes, "difference_bytes": new_bytes - old_bytes}
            for label, category, code, old_bytes, new_bytes in lines
        ]
        largest = next(iter(size_changes), None)
        sentence = say_memory("difference", before=old.size, after=new.size, change=largest)
        sentences.append({"snapshot": name, "verdict": sentence})
    verdict = Table("verdict", "what has changed", (_SNAPSHOT, Column("verdict", "verdict")), sentences)
    columns = (_SNAPSHOT, *named_columns("what", "category", "code", "before_bytes", "after_bytes", "difference_bytes"))
    note = "Each at the failure, or else at the peak; rows add up to the last one."
    return [verdict, Table("against", "memory by category and line, before and after", columns, rows, notes=(note,))]


def timeline_data(diagnosis: MemoryDiagnosis) -> dict[str, Any]:
    """Return the data of a snapshot's picture: bytes by category after each event, steps, and the moment."""
    record, inference = diagnosis.moment.record, diagnosis.moment.inference
    by_category = {name: held_bytes(inference.blocks_of(name), record.last_position) for name in FOREIGN_CATEGORIES}
    # inference.steps are the positions at which steps ended. Without any, one region would be all that is recorded.
    steps = pairwise([0, *inference.steps, record.last_position]) if 0 < len(inference.steps) < _MOST_REGIONS else ()
    regions = [{"name": f"step {number}", "start": start, "end": end} for number, (start, end) in enumerate(steps, 1)]
    return {
        "timeline": thinned(by_category),
        "regions": regions,
        "moment": {"position": diagnosis.moment.position, "name": _moment_name(diagnosis)},
    }


def _moment_name(diagnosis: MemoryDiagnosis) -> str:
    return "peak" if diagnosis.moment.failure is None else "failure"


def snapshot_page(diagnoses: Sequence[MemoryDiagnosis], tables: Sequence[Table]) -> str:
    """Return a page: what fills each device and what to do about it, its timeline, then all tables but the verdict."""
    sorted_verdicts = verdicts(diagnoses)
    timelines = [(verdict.diagnosis.name, timeline_data(verdict.diagnosis)) for verdict in sorted_verdicts]
    title = "memory: " + ", ".join(diagnosis.name for diagnosis in diagnoses)
    shown = [table for table in tables if table.name not in ("verdict", "causes")]
    return timeline_page(timelines, title, shown, sorted_verdicts)


def write_snapshot_files(diagnoses: Sequence[MemoryDiagnosis], top: int, directory: Path) -> None:
    """Write each snapshot's timeline as ``.png``, ``.svg`` and ``.html`` into a folder, or raise an OutputError."""
    for diagnosis in diagnoses:
        device = diagnosis.moment.record.device
        source = Path(diagnosis.source).with_suffix("").as_posix().lstrip("./")  # A path if several have the same name.
        stem = source.replace("/", "-") + (f"-device{device}" if device else "")
        page = snapshot_page([diagnosis], snapshot_tables([diagnosis], top))
        write_timeline(directory / stem, timeline_data(diagnosis), diagnosis.name, page)
