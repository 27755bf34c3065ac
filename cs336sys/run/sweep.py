"""A sweep: its cells are run one after another, what was measured is kept, and progress is shown."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from cs336sys.command_line.faults import interruption_code, interruptions_deferred, say
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.errors import TERMINATED, CapabilityError, OutputError, ReaderLeft, UsageError
from cs336sys.processes import RankIdentity, is_first_rank, started_outside
from cs336sys.results.file import ResultsFile, check_appendable
from cs336sys.results.model import (
    Cell,
    Results,
    Run,
    code_name,
    configuration_key,
    differing_conditions,
    distinguishing_settings,
    folders_of,
    read_results,
    same_code,
)
from cs336sys.results.recording import command_line, record
from cs336sys.run.progress import SweepProgress, showing_progress
from cs336sys.settings.choices import import_named
from cs336sys.settings.user_code import TO_FILE, named_object
from cs336sys.tables.table import Table, sentences, with_rows

if TYPE_CHECKING:
    from cs336sys.machine.system import Capacity
    from cs336sys.run.cells import Outcome

# A resumed sweep measures these again; every other status would come out the same.
_WORTH_RETRYING = ("error", "timeout")


def known_cells(
    results: Results, command: str, configurations: Sequence[Mapping[str, Any]], run: Run, *, take_any: bool
) -> tuple[dict[str, Cell], list[str]]:
    """Return the cells of a file that a sweep in ``run`` need not measure, by :func:`configuration_key`, and notes.

    They are those of a run under the same ``Run.conditions`` with the same code, or of any run with ``take_any``; the
    latest, where there are several. Cells that are measured in turn (``interleave``) are known together, from one run,
    or not at all. A cell that is asked for files (``--trace``) is known if it left them there. The notes say which
    cells are measured again although the file holds them, or taken although they were measured otherwise.
    """
    measured: dict[str, dict[str, Cell]] = {}  # By configuration, and by the run that measured it, the latest last.
    for cell in results.cells:
        if cell.command == command and cell.status not in _WORTH_RETRYING:
            measured.setdefault(configuration_key(cell.configuration), {})[cell.run_id] = cell
    turns: dict[str, list[Mapping[str, Any]]] = {}  # A turn is one configuration, or all that are interleaved.
    for configuration in configurations:
        turns.setdefault(_turn_key(configuration), []).append(configuration)
    run_ids = {cell.run_id for cell in results.cells}
    differences = {run_id: _differences(results.runs.get(run_id), run) for run_id in run_ids}
    reusable: dict[str, Cell] = {}
    differing: dict[str, tuple[Any, Any]] = {}
    differing_count = unpaired_count = 0
    for turn in turns.values():
        keys = [configuration_key(configuration) for configuration in turn]
        # For each cell, the runs that measured it, and left its files in all folders that are asked for now, if any.
        run_lists = []
        for key, folders in zip(keys, (folders_of(configuration).items() for configuration in turn), strict=True):
            cells = measured.get(key, {}).items()
            run_lists.append([run_id for run_id, cell in cells if folders <= folders_of(cell.configuration).items()])
        complete = [run_id for run_id in run_lists[0] if all(run_id in runs for runs in run_lists)]
        comparable = [run_id for run_id in complete if not differences[run_id]]
        if not complete:
            # No run has all cells of the turn: those that the file holds are measured again.
            unpaired_count += sum(map(bool, run_lists))
        elif not comparable:
            differing_count += len(keys)
            differing |= differences[complete[-1]]  # With the latest run, which --resume-any would take.
        usable = comparable or (complete if take_any else [])
        reusable |= {key: measured[key][usable[-1]] for key in keys if usable}  # The latest.
    counts = {"differing_count": differing_count, "unpaired_count": unpaired_count}
    return reusable, list(sentences(__name__, "resumed", differing=differing, take_any=take_any, **counts))


def run_of_one_machine(cells: Sequence[Cell], results: Results, run: Run) -> Run | None:
    """Return the run whose machine a title may name: that of the cells; None where they are of several machines."""
    runs = [run if cell.run_id == run.run_id else results.runs.get(cell.run_id) for cell in cells] or [run]
    machines = [None if source is None else source.machine for source in runs]
    return runs[0] if all(machine == machines[0] for machine in machines) else None


def _differences(then: Run | None, now: Run) -> dict[str, tuple[Any, Any]]:
    """Return the conditions in which two runs differ, and their ``code`` if it does, with both values."""
    code = {} if same_code(then, now) else {"code": (code_name(then), code_name(now))}
    return differing_conditions(then, now) | code


def _turn_key(configuration: Mapping[str, Any]) -> str:
    """Return a key that configurations measured in turn share: all but the setting that ``interleave`` names."""
    return configuration_key(configuration, ignore=(configuration.get("interleave", ""),))


@dataclass(frozen=True)
class Sweep:
    """A sweep's measurements.

    Attributes:
        cells: one for each configuration, in their order; fewer when it was interrupted.
        run: the run whose machine the tables name; None where no process has started that could say it, or with
            ``--resume-any`` where there were several.
        runs: all that measured the cells, by their ids.
        interruption: the command's exit code after Ctrl-C or SIGTERM; None if neither came.
        faults: why some of the cells are not in the ``--save`` file, or in a tracker.
        ranks: a ``JoinedWorker`` where this process is one of the ranks that torchrun or Slurm started.
        stopped: those ranks could not go on after the last cell.
    """

    cells: tuple[Cell, ...]
    run: Run | None
    interruption: int | None = None
    runs: Mapping[str, Run] = field(default_factory=dict)
    ranks: Any = None
    stopped: bool = False
    faults: tuple[OutputError, ...] = ()

    @property
    def is_reported_here(self) -> bool:
        """Return whether this process prints and draws: of ranks that torchrun or Slurm started, only the first."""
        return self.ranks is None or self.ranks.is_first

    def report(
        self,
        tables: Callable[[Sequence[Cell], Run | None], Sequence[Table]],
        output: OutputOptions,
        *pictures: tuple[Path | None, Callable[[Sequence[Cell], Path], None]],
        pooled: Callable[[Sequence[Cell]], Sequence[Cell]] = lambda cells: cells,
    ) -> None:
        """Print the tables and draw the pictures, if there is a cell and this process reports, and :meth:`exit`.

        Pictures need a cell that was measured. Tables come first, so that numbers are seen if drawing fails.

        Args:
            pictures: files that were asked for, with the function that draws the cells to each.
            pooled: joins the rounds of cells before they are shown.
        """
        faults: list[OutputError | UsageError] = [*self.faults]
        if self.cells and self.is_reported_here:
            from cs336sys.tables.saved import tidy, with_origin

            cells = pooled(self.cells)
            rows = with_origin(cells, self.runs)
            faults += output.emit_measured(tidy(self.cells[0].command, with_rows(*tables(rows, self.run)), rows))
            drawn = [(path, draw) for path, draw in pictures if path is not None]
            if drawn and all(cell.status != "ok" for cell in self.cells):
                # An empty picture would replace the last one that shows something.
                say("no cell was measured: no picture is drawn")
                drawn = []
            for path, draw in drawn:
                try:
                    draw(cells, path)
                except OutputError as fault:
                    faults.append(fault)
        self.exit(faults)

    def exit(self, faults: Sequence[OutputError | UsageError] = ()) -> None:
        """End the command as the documented exit codes say, once the cells are printed.

        Cells that ran out of memory, timed out or are not supported are results next to others; a sweep in which a cell
        was wrong or broke, or nothing could be measured, failed.
        """
        for fault in faults:
            if not isinstance(fault, ReaderLeft):  # ``| head`` has read what it wanted: no error to tell.
                say(f"error: {fault}")
        statuses = {cell.status for cell in self.cells}
        if self.ranks is not None:
            self.ranks.wait_for_report()
            if self.stopped:
                self.ranks.exit_at_once()
        if self.interruption is not None:
            raise typer.Exit(self.interruption)
        if faults:
            raise typer.Exit(faults[0].exit_code)
        if statuses and statuses <= {"unsupported"}:
            raise CapabilityError(self.cells[0].reason)
        if statuses and ("ok" not in statuses or statuses & {"wrong", "error"}):
            raise typer.Exit(1)


def run_sweep(
    command: str,
    measure: str,
    configurations: Sequence[dict[str, Any]],
    options: SweepOptions = SweepOptions(),
    **settings: Any,
) -> Sweep:
    """Measure every configuration with ``measure`` (``module:function``) and these settings of :class:`_RunningSweep`.

    Raises:
        UsageError: ``options.save`` cannot be written or, on ``--resume``, read.
        CapabilityError: the measuring process, or a tracker, does not start.
    """
    return _RunningSweep(command, measure, configurations, options, **settings).finish()


@dataclass
class _RunningSweep:
    """A sweep between its plan and its :class:`Sweep`: each method is one step of it.

    Attributes:
        fresh_worker: start a new process for every cell, so that none finds a GPU warmed up by another.
        across_ranks: ``measure`` runs its cells on ranks, see :mod:`cs336sys.run.ranks`; where torchrun or
            Slurm started these, ``fresh_worker`` has no effect.
        is_wanted: whether to measure a configuration, given the cells so far.
        predictions: derived columns by :func:`configuration_key`, kept next to those that were measured.
    """

    command: str
    measure: str
    configurations: Sequence[dict[str, Any]]
    options: SweepOptions
    fresh_worker: bool = False
    across_ranks: bool = False
    is_wanted: Callable[[Mapping[str, Any], Sequence[Cell]], bool] = lambda configuration, cells: True
    predictions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open what the sweep writes to, and choose the process that measures; refuse what cannot be."""
        configurations, options = self.configurations, self.options
        self.cells: list[Cell] = []
        self.interruption: int | None = None
        self.start_failure: Outcome | None = None  # The first cell's outcome, where no worker could start.
        self.stopped = self.run_is_saved = self.fault_is_told = False
        self.last_turn: str | None = None  # Of the cell before: see _cool_down().
        identity = started_outside() if self.across_ranks else None
        _refuse_timeout(options, identity)
        self.ranks: Any = None
        if identity is not None:
            # This and trackers are imported by name, only for sweeps that have them.
            self.ranks = import_named("cs336sys.run.ranks.JoinedWorker")(
                self.measure, command_line(), identity, configurations
            )
        self.is_shown = self.ranks is None or self.ranks.is_first
        save, trackers = (options.save, options.track) if self.is_shown else (None, ())
        self.tracking: Any = None
        if trackers:
            start_tracking = import_named("cs336sys.run.tracking.start_tracking")
            settings = distinguishing_settings(configurations)
            self.tracking = start_tracking(self.command, settings, trackers)
        self.file = ResultsFile(save) if save else None
        # ResultsFile() creates a file that was not there, which has nothing to resume.
        self.results = read_results(save) if options.resumes and save and save.stat().st_size else None
        # A worker process could not find a function that the user has passed as an object.
        needs_this_process = any(named_object(str(value)) for cell in configurations for value in cell.values())
        # Ranks, and a worker that a timeout can end, are such processes.
        if needs_this_process and (self.across_ranks or options.cell_timeout is not None):
            option = "ranks" if self.across_ranks else f"--cell-timeout {options.cell_timeout:g}"
            raise UsageError(f"{option}: needs processes of its own, which cannot find the object by name; {TO_FILE}")
        self.worker: Any = self.ranks or self._make_worker(needs_this_process)
        self.is_measured_here = self.ranks is not None or needs_this_process
        self.run: Run | None = None

    def _make_worker(self, needs_this_process: bool) -> Any:
        from cs336sys.run.cells import Worker, WorkerHere

        if needs_this_process:
            return WorkerHere(self.measure, command_line())
        timeouts_s = [cell["timeout_s"] for cell in self.configurations if self.across_ranks and "timeout_s" in cell]
        return Worker(self.measure, command_line(), silence_s=max(timeouts_s, default=None))  # See Worker.

    def finish(self) -> Sweep:
        """Go through all configurations, or as many as an interruption or lost ranks allow."""
        try:
            with (
                showing_progress(
                    self.command, self.configurations, is_shown=self.is_shown, measured_here=self.is_measured_here
                ) as progress,
                contextlib.closing(self.worker),
            ):
                try:
                    self._go_through(progress)
                except KeyboardInterrupt as interrupt:
                    # Told before the worker is ended: processes that fill their GPUs take seconds to end.
                    self._tell_interruption(interrupt)
                    raise
            if self.ranks is not None and self.stopped:
                last = self.cells[-1]  # Which is why the ranks stopped: see _go_through().
                say(f"rank {self.ranks.identity.rank}: {last.status}: {last.reason}; {self._count_words}")
        except KeyboardInterrupt as interrupt:  # Raised again above, or before or after all cells.
            self._tell_interruption(interrupt)
        finally:
            if self.tracking is not None:
                self.tracking.close()
            if self.file is not None:
                self.file.close()
                tell_notices(self.file)
        run = self.run
        runs = {} if self.results is None else self.results.runs
        if run is not None:
            runs = runs | {run.run_id: run}
            if self.results is not None:  # Some cells may be another machine's.
                run = run_of_one_machine(self.cells, self.results, run)
        faults = [] if self.file is None or self.file.fault is None else [self.file.fault]
        faults += self.tracking.faults if self.tracking else ()
        return Sweep(tuple(self.cells), run, self.interruption, runs, self.ranks, self.stopped, tuple(faults))

    @property
    def _count_words(self) -> str:
        return f"{len(self.cells)} of {len(self.configurations)} cells measured"

    def _tell_interruption(self, interrupt: KeyboardInterrupt) -> None:
        """Note the exit code of an interruption and tell of it, once."""
        if self.interruption is None:
            self.interruption = interruption_code(interrupt)
            if self.is_shown:
                say(f"{'terminated' if self.interruption == TERMINATED else 'interrupted'}: {self._count_words}")

    def _go_through(self, progress: SweepProgress) -> None:
        """Measure one configuration after another, or take its cell from the file, until ranks cannot go on."""
        # A worker that does not start is the first cell's outcome, by _measure(): later cells try to start it again.
        self.start_failure = self.worker.start(timeout_s=self.options.cell_timeout)
        self.run = self.worker.run
        resumed = self._resumed_cells()  # Which needs to know the machine: the worker finds it out.
        for configuration in self.configurations:
            if not self.is_wanted(configuration, self.cells):
                continue
            cell, took_s = resumed.get(configuration_key(configuration)), None
            if cell is None:
                self._cool_down(configuration, progress)
                started_s = time.monotonic()
                outcome = self._measure(configuration, progress)
                run_id = "" if self.run is None else self.run.run_id
                # Rounded before anything is shown, so that saved results show the same.
                samples = {name: series.to_keep for name, series in outcome.samples.items()}
                cell = Cell(
                    self.command, configuration, outcome.status, samples, outcome.derived, outcome.reason, run_id
                )
                took_s = time.monotonic() - started_s
                self._keep(cell)
                if self.tracking is not None:
                    self.tracking.track(cell, self.run, took_s)
                if self.fresh_worker and self.ranks is None:
                    self.worker.close()
                # Ranks that torchrun started cannot be replaced.
                self.stopped = self.ranks is not None and not outcome.leaves_worker_sound
            else:
                self.cells.append(cell)
            progress.cell_done(cell, took_s)
            if self.stopped:
                break

    def _resumed_cells(self) -> dict[str, Cell]:
        """Return the cells that were measured before, by configuration; say which are not taken, and why."""
        cells: dict[str, Cell] = {}
        if self.results is not None and self.run is not None:  # Without a worker it is not known which machine this is.
            cells, notes = known_cells(
                self.results, self.command, self.configurations, self.run, take_any=self.options.resume_any
            )
            for note in notes:
                say(note)
        if self.ranks is None:
            return cells
        self.ranks.require_same_cells(self.configurations)
        return self.ranks.from_first_rank(cells)  # That alone has read the file.

    def _cool_down(self, configuration: Mapping[str, Any], progress: SweepProgress) -> None:
        """Pause before a cell, unless it is the first or measured in turn with the one before."""
        turn, pause_s = _turn_key(configuration), self.options.cool_down
        if pause_s and self.last_turn not in (None, turn):
            progress.at_stage(f"cooling down for {pause_s:g} s")
            time.sleep(pause_s)
        self.last_turn = turn

    def _measure(self, configuration: dict[str, Any], progress: SweepProgress) -> "Outcome":
        """Measure a configuration, add its predictions, and say what its notes warn of."""
        if self.file is not None:
            self.file.catch_up()
            tell_notices(self.file)
        outcome = self.start_failure or self.worker.measure(
            configuration, timeout_s=self.options.cell_timeout, progress=progress.at_stage
        )
        self.start_failure, self.run = None, self.worker.run
        if self.predictions:
            outcome.derived.update(self.predictions.get(configuration_key(configuration, ignore=("round",)), {}))
        for note in outcome.derived.get("notes", ()) if self.is_shown else ():
            if note.startswith("warning: "):
                say(note)
        return outcome

    def _keep(self, cell: Cell) -> None:
        """Put a cell into the tables and the file: an interruption leaves it in both or in neither."""
        with interruptions_deferred():
            self.cells.append(cell)
            record(self.run, cell)
            if self.file is not None:
                if self.run is not None and not self.run_is_saved:
                    self.file.append(self.run)
                    self.run_is_saved = True
                self.file.append(cell)
        tell_notices(self.file)
        if self.file is not None and self.file.fault is not None and not self.fault_is_told:
            say(f"warning: {self.file.fault}; it is tried again after every cell")
            self.fault_is_told = True


def in_rounds(configurations: Sequence[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Return the configurations of all rounds, every second one backwards: none always comes after the same one."""
    return [
        configuration | {"round": number}
        for number in range(1, rounds + 1)
        for configuration in (configurations if number % 2 else reversed(configurations))
    ]


def show_plan(
    command: str,
    plan_table: Callable[["Capacity | None"], Table],
    options: SweepOptions,
    output: OutputOptions,
    device: str,
    *,
    across_ranks: bool = False,
    **measured_files: Path | None,
) -> None:
    """Print what ``--dry-run`` predicts, given the memory of the device, on the first rank alone.

    Refuse before, as :func:`check_planned` does, what a measured sweep would refuse, and files of measurements.
    """
    capacity = check_planned(options, device, across_ranks=across_ranks, **measured_files)
    if not across_ranks or is_first_rank():
        from cs336sys.tables.saved import tidy

        output.emit(tidy(command, [plan_table(capacity)], are_planned=True))


def check_planned(
    options: SweepOptions, device: str, *, across_ranks: bool = False, **measured_files: Path | None
) -> "Capacity | None":
    """Return the memory of the device for ``--dry-run``, None where it is not known.

    Raise a UsageError or CapabilityError where :func:`run_sweep` would, for a device that is not there, and for files
    to be ``measured_files`` (by the names of their options, ``--plot``, ``--trace``), which need measurements.
    """
    for name, path in measured_files.items():
        if path is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {path}: --dry-run measures nothing to write there; leave one of them out")
    _refuse_timeout(options, started_outside() if across_ranks else None)
    if options.track:
        import_named("cs336sys.run.tracking.check_installed")(options.track)
    if options.save is not None:
        check_appendable(options.save)
    from cs336sys.machine.system import capacity

    available = capacity(device)
    if available is None and device == "cuda":
        # nvidia-smi is not everywhere where torch finds a GPU: only if torch finds none, this raises an error.
        from cs336sys.machine.device import choose_device

        choose_device(device)
    return available


_SMALL_GIB = 4.0  # Any machine has so much: nvidia-smi is not asked.


class PredictedCell(Protocol):
    """A workload whose memory is predicted, if its model is ours."""

    @property
    def name(self) -> str: ...

    @property
    def predicted_gib(self) -> float | None: ...


def refuse_what_does_not_fit(
    workloads: Sequence[PredictedCell], device: str, *, force: bool, across_ranks: bool = False
) -> None:
    """Refuse, before anything is built, models that are predicted to need more main memory than there is.

    Too little memory of a GPU, and any with ``force``, is only warned of: there a cell fails, while a machine stalls.

    Ranks on GPUs are not refused: each has a GPU of its own, and checks its training on as many blocks as that holds.
    Nor are ranks that torchrun or Slurm started, which may be on several machines.
    """
    needed_gib = {workload.name: workload.predicted_gib or 0.0 for workload in workloads}  # 0.0: not predicted.
    if max(needed_gib.values(), default=0.0) < _SMALL_GIB or (across_ranks and started_outside()):
        return
    from cs336sys.machine.system import capacity

    available = capacity(device)
    if across_ranks and available is not None and available.is_gpu:
        return
    for name, gib in needed_gib.items():
        if available is not None and gib > available.memory_gib:
            needs = f"{name} is predicted to need {gib:.1f} GiB, and {available.device} has {available.memory_gib:.1f}"
            if not (force or available.is_gpu):
                raise UsageError(f"{needs}: choose a smaller size (--dry-run shows what fits), or add --force")
            say(f"warning: {needs}: it will run out of memory, or be killed; --dry-run shows what fits")


def _refuse_timeout(options: SweepOptions, identity: RankIdentity | None) -> None:
    if identity is not None and options.cell_timeout is not None:
        raise UsageError("--cell-timeout: ranks that torchrun started cannot be ended and replaced; leave it out")


def tell_notices(file: ResultsFile | None) -> None:
    """Say what others have done to the ``--save`` file."""
    while file is not None and file.notices:
        say(f"warning: {file.notices.pop(0)}")
