"""A command's cells as tables: the records of functions that show saved ones, and columns for programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cs336sys.results.model import ORIGIN, Cell, Run
from cs336sys.settings.choices import import_named
from cs336sys.tables.table import Column, Table
from cs336sys.tables.titles import setting_columns


@dataclass(frozen=True)
class Presentation:
    """The options of commands about how cells are shown, with their names and defaults.

    Without a ``baseline``, ``bench`` compares with the defaults of settings, other commands with eager.
    """

    baseline: str = ""
    percentiles: Sequence[float] = ()
    top: int = 5
    full_names: bool = False
    compare_precision: bool = False


# The pictures of some cells by name, each drawn to a file.
Pictures = Mapping[str, Callable[[Path], None]]
RunTableBuilder = Callable[[Sequence[Cell], Run | None], list[Table]]
TableBuilder = Callable[[Sequence[Cell], Run | None, Presentation], list[Table]]
PictureBuilder = Callable[[Sequence[Cell], Run | None, Presentation], Pictures]


@dataclass(frozen=True)
class SavedCommand:
    """The functions that show a command's cells again; ``pooled`` joins rounds (``--rounds``) for the others."""

    tables: TableBuilder
    pictures: PictureBuilder = lambda cells, run, options: {}
    pooled: Callable[[Sequence[Cell]], list[Cell]] = list


def of_run(build: RunTableBuilder) -> TableBuilder:
    """Return the builder of tables that no option changes."""
    return lambda cells, run, options: build(cells, run)


def picture_of_measured(name: str, draw: Callable[[Sequence[Cell], Path], None]) -> PictureBuilder:
    """Return a function that offers the picture ``name`` of all cells, if any was measured."""
    return lambda cells, run, options: {name: partial(draw, cells)} if measured_cells(cells) else {}


def measured_cells(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status == "ok"]


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
    origin = () if are_planned else tuple(Column(name, name.replace("_", " ")) for name in ORIGIN)
    return [
        replace(table, settings=table.settings or setting_columns(names), origin=origin)
        if are_planned or all("run_id" in row for row in table.rows)
        else table
        for table in tables
    ]
