"""The tables of ``memprof --dry-run``: every cell predicted by the accounting and by a trace of fake tensors."""

from collections.abc import Sequence

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.memory.checkpointing import predicted_strategies_table, workload_peak
from cs336sys.report.memory.tables import MEMORY_SETTINGS, allocations_table, identity_columns, phases_table
from cs336sys.report.tables import Column, Table
from cs336sys.report.titles import SIZE_COLUMNS
from cs336sys.results import Cell
from cs336sys.workload import MemoryWorkload


def plan_tables(cells: Sequence[Cell], top: int) -> list[Table]:
    """What each cell would hold; the traced tables are left out where nothing was traced."""
    traced = [cell for cell in cells if cell.derived]
    identity = identity_columns(cells)
    tables = [
        _plan(cells),
        phases_table(traced, identity),
        allocations_table(traced, identity, top),
        predicted_strategies_table([MemoryWorkload.from_configuration(cell.configuration) for cell in cells]),
    ]
    return [tables[0], *(table for table in tables[1:] if table is not None and table.rows)]


def _plan(cells: Sequence[Cell]) -> Table:
    columns = (
        *SIZE_COLUMNS,
        *MEMORY_SETTINGS.values(),
        Column("parameters_gib", "parameters", "gib"),
        Column("gradients_gib", "gradients", "gib"),
        Column("optimizer_state_gib", "optimizer state", "gib"),
        Column("activations_gib", "activations", "gib"),
        Column("predicted_peak_gib", "predicted peak", "gib"),
        Column("moment", "at"),
        Column("traced_peak_gib", "traced peak", "gib"),
        Column("traced_phase", "in"),
        Column("status", "status"),
    )
    rows = []
    for cell in cells:
        workload = MemoryWorkload.from_configuration(cell.configuration)
        memory = workload_peak(workload)
        row = cell.configuration | {
            "parameters": count_parameters(workload.training.size),
            "parameters_gib": memory.parameters / GIB,
            "gradients_gib": memory.gradients / GIB,
            "optimizer_state_gib": memory.optimizer_state / GIB,
            "activations_gib": memory.activations / GIB,
            "predicted_peak_gib": memory.total_gib,
            "moment": memory.moment,
            "status": None if cell.status == "ok" else cell.status,
        }
        if cell.derived:
            row |= {"traced_peak_gib": cell.derived["peak_gib"], "traced_phase": cell.derived["peak_phase"]}
        rows.append(row)
    notes = [
        "Predicted by formulas and traced on fake tensors, both for eager mode: what is alive when most is.",
        *dict.fromkeys(f"{cell.status}: {cell.reason}" for cell in cells if cell.reason),
    ]
    return Table("plan", "memprof: cells and predicted memory (nothing was computed)", columns, rows, notes=notes)
