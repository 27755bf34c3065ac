"""Analyses as saved cells, and the tables of what was saved: the one way from ``trace`` to its tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.accounting.communication import BusBandwidths
from cs336sys.accounting.hardware import Ceilings
from cs336sys.measure.profile.analysis import Analysis
from cs336sys.measure.profile.difference import CaptureDifference, compare_captures
from cs336sys.measure.profile.ranks import RanksFound
from cs336sys.measure.profile.reading import Read
from cs336sys.report.profile.trace import DisplayOptions, file_words, trace_tables
from cs336sys.report.profile.trace_difference import difference_tables
from cs336sys.report.table import Table
from cs336sys.results.model import Cell, Samples

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class CaptureAnalyses:
    """The analyses of one capture, or of one training's ranks."""

    analyses: tuple[Analysis, ...]
    ranks: RanksFound | None = None


def capture_cells(
    side: str,
    read: Read,
    *,
    roofline: bool,
    ceilings: Ceilings | None = None,
    bandwidths: BusBandwidths | None = None,
    run_id: str = "",
) -> list[Cell]:
    """One cell for each GPU or rank; its samples are its steps."""
    found = read.ranks.found.to_json() if read.ranks else None
    return [
        Cell(
            "trace",
            {"file": one.file, "gpu": one.label, "side": side, "roofline": roofline},
            "ok",
            samples={"step": Samples("ms", "capture", one.step_ms)},
            derived={
                "trace": one.to_json(),
                "ranks": found,
                "ceilings": None if ceilings is None else ceilings.to_json(),
                "bandwidths": None if bandwidths is None else bandwidths.to_json(),
            },
            run_id=run_id,
        )
        for one in read.analyses
    ]


def saved_sides(cells: Sequence[Cell]) -> dict[str, CaptureAnalyses]:
    """The sides that cells hold, the one before first."""
    sides = {}
    for name in (BEFORE, AFTER):
        own = [cell for cell in cells if cell.configuration["side"] == name]
        if own:
            found = own[0].derived["ranks"]
            ranks = RanksFound.from_json(found) if found else None
            sides[name] = CaptureAnalyses(tuple(Analysis.from_json(cell.derived["trace"]) for cell in own), ranks)
    return sides


def difference_of(sides: dict[str, CaptureAnalyses]) -> CaptureDifference | None:
    """Return the changes between two sides, in the first rank of each; None where there is one side."""
    if len(sides) < 2:
        return None
    return compare_captures(sides[BEFORE].analyses[0], sides[AFTER].analyses[0])


def all_tables(sides: dict[str, CaptureAnalyses], shown: DisplayOptions) -> list[Table]:
    """The tables of one capture, or of what changed between two."""
    found = difference_of(sides)
    if found is None:
        ((_, side),) = sides.items()
        return trace_tables(side.analyses, side.ranks, shown)
    before, after = (file_words(sides[name].analyses) for name in (BEFORE, AFTER))
    tables = difference_tables(found, f"trace: {before} before, {after} after", shown)
    if any(len(side.analyses) > 1 for side in sides.values()):
        tables[0] = _with_notes(tables[0], ["of several ranks, the first of each side is compared"])
    if found.of_kernels:
        tables[0] = _with_notes(tables[0], ["the captures come from two profilers: only kernels are compared, by name"])
    return tables


def _with_notes(table: Table, notes: Sequence[str]) -> Table:
    return Table(table.name, table.title, table.columns, table.rows, (*table.notes, *notes), table.steadier)


def saved_trace_tables(cells: Sequence[Cell], top: int, full_names: bool) -> list[Table]:
    """The tables of saved cells."""
    measured = next((found for cell in cells if (found := cell.derived.get("ceilings"))), None)
    ceilings = None if measured is None else Ceilings.from_json(measured)
    alone = next((found for cell in cells if (found := cell.derived.get("bandwidths"))), None)
    bandwidths = None if alone is None else BusBandwidths.from_json(alone)
    roofline = any(cell.configuration["roofline"] for cell in cells)
    return all_tables(saved_sides(cells), DisplayOptions(top, full_names, roofline, ceilings, bandwidths))
