"""The files that ``memprof --snapshot DIR`` leaves beside each cell's memory snapshot."""

from collections.abc import Sequence
from pathlib import Path

from cs336sys.report.memory.page import memory_page
from cs336sys.report.memory.plots import plot_timeline
from cs336sys.report.memory.tables import memory_tables
from cs336sys.report.outputs import check_writable, write_file
from cs336sys.report.titles import machine_words
from cs336sys.results import Cell, Run
from cs336sys.workload import LARGEST_ALLOCATIONS, MemoryWorkload


def check_directory(directory: Path | None) -> None:
    """Find out before anything is measured whether files can be written there.

    Raises:
        UsageError: they cannot.
    """
    if directory is not None:
        check_writable(directory / "memory.pickle", "--snapshot")


def write_files(cells: Sequence[Cell], run: Run | None, directory: Path) -> None:
    """The timeline of every measured cell as ``.png`` and ``.svg``, and its page as ``.html``.

    Raises:
        OutputError: a file cannot be written.
    """
    for cell in cells:
        if cell.status != "ok":
            continue
        workload = MemoryWorkload.from_configuration(cell.configuration)
        path = directory / workload.name
        title = timeline_title(cell, run)
        plot_timeline(cell, title, path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg"))
        page = memory_page(cell, title, memory_tables([cell], run, LARGEST_ALLOCATIONS))
        write_file(path.with_name(f"{path.name}.html"), page.encode(), "--snapshot")


def timeline_title(cell: Cell, run: Run | None) -> str:
    """What a picture or page of a cell says of it: what was run, and on which machine."""
    workload = MemoryWorkload.from_configuration(cell.configuration)
    training, size = workload.training, workload.training.size
    parts = [f"{size.name}: batch {size.batch_size} x context {size.context}", training.mode, training.precision]
    parts += [f"{training.attention} attention", f"compile {training.compile}"]
    return ", ".join([*parts, f"checkpointing {workload.checkpointing}", *machine_words(run)])
