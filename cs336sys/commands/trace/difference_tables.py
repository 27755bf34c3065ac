"""Analyses as saved cells, their tables, and those of ``trace --against``: what changed, and what of it is noise."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cs336sys.accounting.communication import BusBandwidths
from cs336sys.accounting.hardware import Ceilings
from cs336sys.capture.analysis import Analysis
from cs336sys.capture.difference import CaptureDifference, TimeChange, compare_captures
from cs336sys.capture.ranks import RankMatching
from cs336sys.capture.reading import AnalysedCaptures
from cs336sys.capture.taxonomy import short_name
from cs336sys.commands.trace.tables import (
    DisplayOptions,
    damage_sentences,
    file_words,
    say_trace,
    shape_words,
    trace_tables,
    verdict_table,
)
from cs336sys.results.model import Cell, Samples
from cs336sys.results.statistics import SAME_PERCENT
from cs336sys.tables.numbers import format_quantity
from cs336sys.tables.saved import SavedCommand
from cs336sys.tables.table import Column, Table, fill_row, with_rows


def change_name(change: TimeChange) -> str:
    """Return the kernels' short names, or the part of a step."""
    return short_name(change.label) if change.is_kernel and " -> " not in change.label else change.label


def change_table(difference: CaptureDifference, shown: DisplayOptions) -> Table:
    """Build the table of the ``--top`` largest changes and of others that are no noise, three times as many at most."""
    listed = [change for index, change in enumerate(difference.changes) if index < shown.top or change.is_significant]
    listed = listed[: 3 * shown.top]
    columns = (
        Column("verdict", "change is", value=lambda change: _verdict_text(change, difference.before_ms)),
        Column("before_ms", "before, of a step", "ms", lambda change: change.before.ms),
        Column("after_ms", "after", "ms", lambda change: change.after.ms),
        Column("delta_ms", "change", "ms", lambda change: change.delta_ms),
        Column("low_ms", "at least", "ms", lambda change: change.low_ms if math.isfinite(change.low_ms) else None),
        Column("high_ms", "at most", "ms", lambda change: change.high_ms if math.isfinite(change.high_ms) else None),
        Column("before_count", "times before", value=lambda change: change.before.count if change.is_kernel else None),
        Column("after_count", "times after", value=lambda change: change.after.count if change.is_kernel else None),
        Column("before_us", "one run before", "us", lambda change: change.before.us),
        Column("after_us", "one run after", "us", lambda change: change.after.us),
        Column(
            "change", "kernel or part", value=lambda change: change.label if shown.full_names else change_name(change)
        ),
        Column("module", "module", value=lambda change: change.example.module or None),
        Column("operator", "operator", value=lambda change: change.example.operator or None),
        Column("shapes", "shapes of inputs", value=lambda change: shape_words(change.example.shape) or None),
    )
    count = len(difference.changes)
    notes = [say_trace("change verdicts", count=count, same_percent=SAME_PERCENT)]
    if len(listed) < count:
        notes.append(f"{len(listed)} of {count} shown: --top shows more")
    rows = [fill_row(columns, change) for change in listed]
    return Table("changes", "trace: what changed", columns, rows, notes=notes)


def _verdict_text(change: TimeChange, step_ms: float) -> str:
    if change.verdict == "same":
        return f"same within {100 * max(abs(change.low_ms), abs(change.high_ms)) / step_ms:.2g} % of a step"
    return f"differs: {change.verdict}" if change.verdict in ("slower", "faster") else change.verdict


BEFORE, AFTER = "before", "after"


def capture_cells(side: str, captures: AnalysedCaptures, shown: DisplayOptions, run_id: str) -> list[Cell]:
    """Return a cell for each GPU or rank, whose samples are its steps, with what is needed to show its tables again."""
    ranks = None if captures.ranks is None else captures.ranks.matching
    records = {"ranks": ranks, "ceilings": shown.ceilings, "bandwidths": shown.bandwidths}
    common = {name: None if record is None else record.to_json() for name, record in records.items()}
    return [
        Cell(
            "trace",
            {"file": analysis.file, "gpu": analysis.label, "side": side, "roofline": shown.roofline},
            status="ok",
            samples={"step": Samples("ms", "capture", analysis.step_ms)},
            derived={"trace": analysis.to_json(), **common},
            run_id=run_id,
        )
        for analysis in captures.analyses
    ]


def saved_trace_tables(cells: Sequence[Cell], top: int, full_names: bool) -> list[Table]:
    """Build the tables of one capture, or of what changed between two, in the first rank of each."""
    common = cells[0].derived  # All cells of a trace hold the same; files of earlier versions lack some.
    ceilings = Ceilings.from_json(saved) if (saved := common.get("ceilings")) else None
    bandwidths = BusBandwidths.from_json(saved) if (saved := common.get("bandwidths")) else None
    ranks = RankMatching.from_json(saved) if (saved := common["ranks"]) else None
    shown = DisplayOptions(top, full_names, cells[0].configuration["roofline"], ceilings, bandwidths)
    sides: dict[str, list[Analysis]] = {}
    for cell in cells:
        sides.setdefault(cell.configuration["side"], []).append(Analysis.from_json(cell.derived["trace"]))
    if len(sides) == 1:
        return trace_tables(next(iter(sides.values())), ranks, shown)
    first = [replace(sides[name][0], label=name) for name in (BEFORE, AFTER)]  # Damage is told by these labels.
    difference = compare_captures(*first)
    # By how much a step became longer and what explains it, by three changes at most, or why that is undecided.
    largest = [change for change in difference.changes if change.is_significant][:3]
    is_undecided = all(change.verdict == "undecided" for change in difference.changes)
    facts = {"change": difference, "largest": largest, "is_undecided": is_undecided}
    facts |= {"name": change_name, "signed": lambda ms: f"{'+' if ms > 0 else ''}{format_quantity(ms, 'ms')}"}
    sentences = [*damage_sentences(first), say_trace("difference", **facts)]
    sentences += [say_trace("largest changes", **facts)] if largest else []
    title = f"trace: {file_words(sides[BEFORE])} before, {file_words(sides[AFTER])} after"
    notes = []
    if any(len(analyses) > 1 for analyses in sides.values()):
        notes.append("of several ranks, the first of each side is compared")
    if difference.of_kernels:
        notes.append("the captures come from two profilers: only kernels are compared, by name")
    return [replace(verdict_table(sentences, title), notes=notes), *with_rows(change_table(difference, shown))]


SAVED = SavedCommand(lambda cells, run, options: saved_trace_tables(cells, options.top, options.full_names))
