"""Columns for programs: all settings of a table's command, and the machine that measured each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cs336sys.results.model import ORIGIN, Cell, Run
from cs336sys.settings.choices import import_named
from cs336sys.tables.table import Column, Table
from cs336sys.tables.titles import setting_columns

_ORIGIN_COLUMNS = tuple(Column(name, name.replace("_", " ")) for name in ORIGIN)

# By command: the dotted name of its cells' workload, imported for its tables, and the settings that the command adds.
_CELLS: dict[str, tuple[str, ...]] = {
    "bench": ("cs336sys.settings.training.Workload", "rounds", "interleave", "interleaved"),
    "losses": ("cs336sys.settings.profiling.LossWorkload",),
    "nsys": ("cs336sys.settings.profiling.ProfileWorkload",),
    "memprof": ("cs336sys.settings.profiling.MemoryWorkload",),
    "attn": ("cs336sys.settings.operations.AttentionWorkload",),
    "flash": ("cs336sys.settings.operations.AttentionWorkload", "rounds"),
    "kernels": ("cs336sys.settings.operations.KernelWorkload",),
    "allreduce": ("cs336sys.settings.operations.CollectiveWorkload",),
    "tune": ("cs336sys.settings.parallel.ParallelWorkload", "accumulation"),
    "ddp": ("cs336sys.settings.parallel.ParallelWorkload", "rounds"),
    "shard": ("cs336sys.settings.parallel.ParallelWorkload", "board"),
    "precision": ("", "precision", "loss_function", "accumulation", "device"),
}


def with_origin(cells: Sequence[Cell], runs: Mapping[str, Run]) -> list[Cell]:
    """Return the cells with the machine and the run that measured them among their settings, for rows of tables."""
    origins = {run_id: run.origin for run_id, run in runs.items()}
    completed = []
    for cell in cells:
        origin = origins.get(cell.run_id, {}) | {"run_id": cell.run_id, "reason": cell.reason}
        completed.append(replace(cell, configuration=cell.configuration | origin))
    return completed


def tidy(
    command: str, tables: Sequence[Table], cells: Sequence[Cell] = (), *, are_planned: bool = False
) -> list[Table]:
    """Return the tables with columns for programs of all settings, and of the origin of rows, where rows are cells.

    Args:
        cells: as :func:`with_origin` returns them; settings that only they have come after those of today.
        are_planned: rows are cells that nothing has measured.
    """
    workload, *added = _CELLS.get(command, ("",))  # The name of a class with most of the settings, and further ones.
    names = dict.fromkeys((*(import_named(workload).settings() if workload else ()), *added))
    names |= dict.fromkeys(name for cell in cells for name in cell.configuration if name not in ORIGIN)
    if command == "nsys":
        # Its tables have a column "kernels" for the number of kernels that a phase launched.
        names = dict.fromkeys("model_kernels" if name == "kernels" else name for name in names)
    # The rows of a table are cells if all name their run; other tables, of verdicts or sums, stay as they are.
    return [
        replace(table, settings=table.settings or setting_columns(names), origin=() if are_planned else _ORIGIN_COLUMNS)
        if are_planned or all("run_id" in row for row in table.rows)
        else table
        for table in tables
    ]
