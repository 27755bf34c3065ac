"""Analyses as saved cells, their tables, and those of ``trace --against``: what changed, and what of it is noise."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cs336sys.accounting.communication import BusBandwidths
from cs336sys.accounting.hardware import Ceilings
from cs336sys.capture.analysis import Analysis
from cs336sys.capture.difference import CaptureDifference, TimeChange, compare_captures
from cs336sys.capture.ranks import RanksFound
from cs336sys.capture.reading import Read
from cs336sys.capture.taxonomy import short_name
from cs336sys.report.numbers import format_number
from cs336sys.report.profile.trace import DisplayOptions, file_words, shape_words, trace_tables, verdict_table
from cs336sys.report.profile.verdict import damage_sentences
from cs336sys.report.table import Column, Table, fill_row, with_rows
from cs336sys.results.model import Cell, Samples
from cs336sys.results.statistics import SAME_PERCENT

_NAMED = 3


def difference_sentences(difference: CaptureDifference) -> list[str]:
    """Say in two or three sentences what changed."""
    subject = "the kernels of a step take" if difference.of_kernels else "a step takes"
    way = "longer" if difference.delta_ms >= 0 else "less"
    both = f"{_ms(difference.before_ms)} before, {_ms(difference.after_ms)} after"
    significant = [change for change in difference.changes if change.is_significant]
    if not significant:
        if all(change.verdict == "undecided" for change in difference.changes):
            return [
                "Undecided: the captures hold too few steps to tell a change from noise, record at least 5 in each; "
                f"{subject} {both}."
            ]
        return [f"No kernel and no cause of idling changed by more than noise: {subject} {both}."]
    largest = [
        f"{_change_name(change)} ({change.verdict}, {_signed(change.delta_ms)})" for change in significant[:_NAMED]
    ]
    most = f"Most: {', '.join(largest)}."
    if difference.explained_ms * difference.delta_ms <= 0:
        explained = f"the changes that are no noise add up to {_signed(difference.explained_ms)}"
        return [f"Undecided whether {subject} longer or less: {both}; {explained}.", most]
    explained = f"{_ms(abs(difference.explained_ms))} of {_ms(abs(difference.delta_ms))} explained"
    return [f"{subject[0].upper()}{subject[1:]} {_ms(abs(difference.delta_ms))} {way}: {both}; {explained}.", most]


def _ms(value: float) -> str:
    return f"{format_number(value, 'ms')} ms"


def _signed(ms: float) -> str:
    return f"{'+' if ms > 0 else ''}{_ms(ms)}"


def _change_name(change: TimeChange) -> str:
    return short_name(change.label) if change.is_kernel and " -> " not in change.label else change.label


def difference_tables(difference: CaptureDifference, title: str, shown: DisplayOptions) -> list[Table]:
    """The verdict and the changes."""
    # The largest, and of those that are no noise some more.
    listed = [
        change for number, change in enumerate(difference.changes) if number < shown.top or change.is_significant
    ][: 3 * shown.top]
    columns = (
        Column("verdict", "change is", value=lambda change: _verdict_text(change, difference.before_ms)),
        Column("before_ms", "before, of a step", "ms", lambda change: change.before_ms),
        Column("after_ms", "after", "ms", lambda change: change.after_ms),
        Column("delta_ms", "change", "ms", lambda change: change.delta_ms),
        Column("low_ms", "at least", "ms", lambda change: change.low_ms if math.isfinite(change.low_ms) else None),
        Column("high_ms", "at most", "ms", lambda change: change.high_ms if math.isfinite(change.high_ms) else None),
        Column("before_count", "times before", value=lambda change: change.before_count if change.is_kernel else None),
        Column("after_count", "times after", value=lambda change: change.after_count if change.is_kernel else None),
        Column("before_us", "one run before", "us", lambda change: change.before_us),
        Column("after_us", "one run after", "us", lambda change: change.after_us),
        Column(
            "change", "kernel or part", value=lambda change: change.label if shown.full_names else _change_name(change)
        ),
        Column("module", "module", value=lambda change: change.module or None),
        Column("operator", "operator", value=lambda change: change.operator or None),
        Column("shapes", "shapes of inputs", value=lambda change: shape_words(change.shape) or None),
    )
    rows = [fill_row(columns, item) for item in listed]
    notes = [
        f"differs, new, gone: by the rank test at 99 %; same: the interval at 95 % is within {SAME_PERCENT:g} % of a "
        "step; undecided: more steps would decide"
    ]
    if len(listed) < len(difference.changes):
        notes.append(f"{len(listed)} of {len(difference.changes)} shown: --top shows more")
    return [
        verdict_table(difference_sentences(difference), title),
        *with_rows(Table("changes", "trace: what changed", columns, rows, notes=notes)),
    ]


def _verdict_text(change: TimeChange, step_ms: float) -> str:
    if change.verdict == "same":
        return f"same within {100 * max(abs(change.low_ms), abs(change.high_ms)) / step_ms:.2g} % of a step"
    return f"differs: {change.verdict}" if change.verdict in ("slower", "faster") else change.verdict


def waterfall(difference: CaptureDifference) -> list[tuple[str, float]]:
    """Return the changes from one step to the other: the largest by name, sums of the others, noise."""
    significant = [change for change in difference.changes if change.is_significant]
    rows = [(f"{_change_name(change)} ({change.verdict})", change.delta_ms) for change in significant[:8]]
    if len(significant) > 8:
        rows.append((f"{len(significant) - 8} other changes", sum(change.delta_ms for change in significant[8:])))
    noise = difference.delta_ms - sum(ms for _, ms in rows)
    return [*rows, ("same, or undecided", noise)]


BEFORE, AFTER = "before", "after"


# The analyses of one capture, or of one training's ranks, and how these were matched.
Side = tuple[tuple[Analysis, ...], RanksFound | None]


def capture_cells(side: str, read: Read, shown: DisplayOptions, run_id: str) -> list[Cell]:
    """One cell for each GPU or rank; its samples are its steps."""
    ranks_json = read.ranks.matching.to_json() if read.ranks else None
    return [
        Cell(
            "trace",
            {"file": analysis.file, "gpu": analysis.label, "side": side, "roofline": shown.roofline},
            "ok",
            samples={"step": Samples("ms", "capture", analysis.step_ms)},
            derived={
                "trace": analysis.to_json(),
                "ranks": ranks_json,
                "ceilings": None if shown.ceilings is None else shown.ceilings.to_json(),
                "bandwidths": None if shown.bandwidths is None else shown.bandwidths.to_json(),
            },
            run_id=run_id,
        )
        for analysis in read.analyses
    ]


def saved_sides(cells: Sequence[Cell]) -> dict[str, Side]:
    """The sides that cells hold, the one before first."""
    sides: dict[str, Side] = {}
    for name in (BEFORE, AFTER):
        if side_cells := [cell for cell in cells if cell.configuration["side"] == name]:
            ranks = side_cells[0].derived["ranks"]
            analyses = tuple(Analysis.from_json(cell.derived["trace"]) for cell in side_cells)
            sides[name] = analyses, RanksFound.from_json(ranks) if ranks else None
    return sides


def difference_of(sides: dict[str, Side]) -> CaptureDifference | None:
    """Return the changes between two sides, in the first rank of each; None where there is one side."""
    return compare_captures(*(analyses[0] for analyses, _ in sides.values())) if len(sides) > 1 else None


def all_tables(sides: dict[str, Side], shown: DisplayOptions) -> list[Table]:
    """The tables of one capture, or of what changed between two."""
    difference = difference_of(sides)
    if difference is None:
        ((analyses, ranks),) = sides.values()
        return trace_tables(analyses, ranks, shown)
    before, after = (file_words(analyses) for analyses, _ in sides.values())
    tables = difference_tables(difference, f"trace: {before} before, {after} after", shown)
    compared = [replace(analyses[0], label=name) for name, (analyses, _) in sides.items()]
    rows = [*({"verdict": sentence} for sentence in damage_sentences(compared)), *tables[0].rows]
    notes = []
    if any(len(analyses) > 1 for analyses, _ in sides.values()):
        notes.append("of several ranks, the first of each side is compared")
    if difference.of_kernels:
        notes.append("the captures come from two profilers: only kernels are compared, by name")
    return [replace(tables[0], rows=rows, notes=(*tables[0].notes, *notes)), *tables[1:]]


def saved_trace_tables(cells: Sequence[Cell], top: int, full_names: bool) -> list[Table]:
    """The tables of saved cells."""
    ceilings = next((Ceilings.from_json(saved) for cell in cells if (saved := cell.derived.get("ceilings"))), None)
    bandwidths = next(
        (BusBandwidths.from_json(saved) for cell in cells if (saved := cell.derived.get("bandwidths"))), None
    )
    roofline = any(cell.configuration["roofline"] for cell in cells)
    return all_tables(saved_sides(cells), DisplayOptions(top, full_names, roofline, ceilings, bandwidths))
