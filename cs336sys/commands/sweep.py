"""Runs the cells of a sweep one after another, keeps what was measured, and shows progress."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cs336sys.commands.ranks import JoinedWorker
from cs336sys.commands.resuming import ResumeOptions, known_cells, shown_run
from cs336sys.errors import INTERRUPTED, CapabilityError, UsageError
from cs336sys.processes import started_outside
from cs336sys.results import Cell, ResultsFile, Run, configuration_key, read_results

if TYPE_CHECKING:
    from rich.progress import Progress

    from cs336sys.measure.cells import Outcome

CellTimeoutOption = Annotated[
    float | None, typer.Option("--cell-timeout", help="Give a cell up after this many seconds.", show_default=False)
]


@dataclass(frozen=True)
class Sweep:
    """What a sweep measured.

    Attributes:
        cells: one for each configuration, in their order; fewer when it was interrupted.
        run: the machine they were measured on; None when it was interrupted before that was known, or with
            ``--resume-any`` where there were several.
        ranks: where this process is one of the ranks that torchrun or Slurm started.
        stopped: those ranks could not go on after the last cell.
    """

    cells: tuple[Cell, ...]
    run: Run | None
    interrupted: bool
    ranks: JoinedWorker | None = None
    stopped: bool = False

    @property
    def is_reported_here(self) -> bool:
        """False on all but the first of the ranks that torchrun or Slurm started: they print and draw nothing."""
        return self.ranks is None or self.ranks.is_first

    def exit(self) -> None:
        """End the command as the documented exit codes say, once the cells are printed.

        Cells that ran out of memory, timed out or broke are results; a sweep in which nothing could be measured failed.
        """
        statuses = {cell.status for cell in self.cells}
        if self.ranks is not None:
            self.ranks.wait_for_report()
            if self.stopped:
                self.ranks.exit_at_once()
        if self.interrupted:
            raise typer.Exit(INTERRUPTED)
        if statuses and statuses <= {"unsupported"}:
            raise CapabilityError(self.cells[0].reason)
        if "error" in statuses and "ok" not in statuses:
            raise typer.Exit(1)


def run_sweep(
    command: str,
    measure: str,
    configurations: Sequence[dict[str, Any]],
    *,
    save: Path | None = None,
    resume: ResumeOptions = ResumeOptions(),
    cell_timeout: float | None = None,
    fresh_worker: bool = False,
    across_ranks: bool = False,
) -> Sweep:
    """Measure every configuration with ``measure`` (``module:function``, see :class:`Worker`).

    Args:
        fresh_worker: start a new process for every cell, so that none finds a GPU warmed up by another.
        across_ranks: ``measure`` runs its cells on ranks, see :mod:`cs336sys.commands.ranks`; where torchrun or Slurm
            started these, ``fresh_worker`` has no effect.

    Raises:
        UsageError: ``save`` cannot be written or, on ``resume``, read; the timeout is not positive.
        CapabilityError: the measuring process does not start.
    """
    from cs336sys.measure.cells import Worker

    if cell_timeout is not None and cell_timeout <= 0:
        raise UsageError(f"--cell-timeout {cell_timeout:g}: must be more than 0 seconds")
    if resume and save is None:
        raise UsageError("--resume needs --save: the file that holds the cells to skip")
    identity = started_outside() if across_ranks else None
    if identity is not None and cell_timeout is not None:
        raise UsageError("--cell-timeout: ranks that torchrun started cannot be ended and replaced; leave it out")
    ranks = JoinedWorker(measure, tuple(sys.argv[1:]), identity) if identity is not None else None
    if ranks is not None and not ranks.is_first:
        save, resume = None, ResumeOptions()
    results = read_results(save) if resume and save and save.exists() and save.stat().st_size else None
    file = ResultsFile(save) if save else None
    worker = ranks or Worker(measure, tuple(sys.argv[1:]))
    cells: list[Cell] = []
    run = None
    interrupted = stopped = False
    try:
        run = worker.run
        known: dict[str, Cell] = {}
        if results is not None:
            found = known_cells(results, command, configurations, run, take_any=resume.resume_any)
            known = found.cells
            for note in found.notes:
                print(note, file=sys.stderr)
        if ranks is not None:
            known = ranks.from_first_rank(known)
        run_is_saved = False
        with _progress_bar(ranks is None or ranks.is_first) as bar:
            task = bar.add_task(command, total=len(configurations), stage="")
            for configuration in configurations:
                cell = known.get(configuration_key(configuration))
                if cell is None:
                    outcome = worker.measure(
                        configuration,
                        timeout_s=cell_timeout,
                        progress=lambda stage: bar.update(task, stage=stage),
                    )
                    cell = _cell(command, configuration, outcome, run)
                    if file is not None:
                        if not run_is_saved:
                            file.append(run)
                            run_is_saved = True
                        file.append(cell)
                    if fresh_worker and ranks is None:
                        worker.close()
                    # Ranks that torchrun started cannot be replaced.
                    stopped = ranks is not None and not outcome.leaves_worker_sound
                cells.append(cell)
                bar.advance(task)
                if stopped:
                    break
        if ranks is not None and stopped:
            count = f"{len(cells)} of {len(configurations)} cells measured"
            print(f"rank {ranks.identity.rank}: {cells[-1].status}: {cells[-1].reason}; {count}", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
        if ranks is None or ranks.is_first:
            print(f"interrupted: {len(cells)} of {len(configurations)} cells measured", file=sys.stderr)
    finally:
        worker.close()
        if file is not None:
            file.close()
    if results is not None and run is not None:
        run = shown_run(cells, results, run)
    return Sweep(tuple(cells), run, interrupted, ranks, stopped)


def _cell(command: str, configuration: dict[str, Any], outcome: "Outcome", run: Run) -> Cell:
    return Cell(
        command, configuration, outcome.status, outcome.samples, outcome.derived, outcome.reason, run_id=run.run_id
    )


def _progress_bar(is_shown: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}"),
        console=console,
        transient=True,
        disable=not is_shown or not console.is_terminal or os.environ.get("TERM") == "dumb",
    )
