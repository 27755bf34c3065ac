"""The tables of ``memprof --dry-run``: every cell predicted by the accounting and by a trace of fake tensors."""

from collections.abc import Sequence

from cs336sys.report.bench import PEAK_COLUMNS, peak_row
from cs336sys.report.memory.checkpointing import predicted_strategies_table, workload_peak
from cs336sys.report.memory.tables import MEMORY_SETTINGS, allocations_table, identity_columns, phases_table
from cs336sys.report.tables import Column, Table, with_rows
from cs336sys.report.titles import SIZE_COLUMNS, found_in_models, plan_settings, planned_package_notes, reasons
from cs336sys.results import Cell
from cs336sys.workload import MemoryWorkload


def plan_tables(cells: Sequence[Cell], top: int) -> list[Table]:
    """What each cell would hold; the traced tables are left out where nothing was traced."""
    traced = [cell for cell in cells if cell.derived]
    identity = identity_columns(cells)
    details = with_rows(
        phases_table(traced, identity),
        allocations_table(traced, identity, top),
        predicted_strategies_table([MemoryWorkload.from_configuration(cell.configuration) for cell in cells]),
    )
    return [_plan(cells), *details]


def _plan(cells: Sequence[Cell]) -> Table:
    workloads = [MemoryWorkload.from_configuration(cell.configuration) for cell in cells]
    columns = (
        *SIZE_COLUMNS,
        *plan_settings([workload.training for workload in workloads], MEMORY_SETTINGS),
        *PEAK_COLUMNS,
        Column("traced_peak_gib", "traced peak", "gib"),
        Column("traced_phase", "phase of the traced peak"),
        Column("status", "status"),
    )
    rows = []
    for cell, workload in zip(cells, workloads, strict=True):
        row = cell.configuration | {"parameters": workload.training.parameters}
        row["status"] = None if cell.status == "ok" else cell.status
        if workload.training.is_ours:
            row |= peak_row(workload_peak(workload))
        if cell.derived:
            row |= {"parameters": cell.derived.get("parameters", row["parameters"])}
            row |= {"traced_peak_gib": cell.derived["peak_gib"], "traced_phase": cell.derived["peak_phase"]}
        rows.append(row)
    traced = " and traced on fake tensors, both" if any(cell.derived for cell in cells) else ","
    notes = [
        f"Predicted by formulas{traced} for eager mode: what is alive when most is.",
        *found_in_models(cells),
        *reasons(cells),
        *planned_package_notes([workload.training for workload in workloads]),
    ]
    return Table("plan", "memprof: cells and predicted memory (nothing was computed)", columns, rows, notes=notes)
