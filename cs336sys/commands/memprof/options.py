"""``cs336sys memprof``: where the memory of a training step goes."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys.command_line.faults import say
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import read_memory_limit, reads_file, refuse_given, setting, writes_file
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell
from cs336sys.run.sweep import check_planned, refuse_what_does_not_fit, run_sweep
from cs336sys.settings.choices import MODES
from cs336sys.settings.profiling import LARGEST_ALLOCATIONS, MemoryWorkload
from cs336sys.settings.training import Workload
from cs336sys.tables.outputs import write_file

if TYPE_CHECKING:
    from cs336sys.allocations.diagnosis import MemoryDiagnosis

# The options that --from takes; all others say what to run.
_OF_SNAPSHOTS = ("source", "against", "top", "snapshot", "html", *(field.name for field in fields(OutputOptions)))


@dataclass(frozen=True)
class SnapshotOptions:
    """Recorded snapshots to read instead of running anything."""

    source: Annotated[
        Sequence[Path], reads_file("--from", help="Read snapshots, or folders of them: .pickle of any program.")
    ] = ()
    against: Annotated[Sequence[Path], reads_file("--against", help="Compare --from with these snapshots.")] = ()
    html: Annotated[Path | None, writes_file("--html", help="Also write --from to this page.")] = None

    def show(self, top: int, snapshot: Path | None, output: OutputOptions) -> None:
        """Print what fills memory in snapshots, or what changed between two, and write it to ``html`` and ``snapshot``.

        A UsageError says that a file is no snapshot, or that several are compared with several.
        """
        from cs336sys.commands.memprof import snapshots
        from cs336sys.commands.memprof.page import check_directory
        from cs336sys.tables.page import check_page_writable

        output.check()
        check_page_writable(self.html)
        check_directory(snapshot, ["memory"])  # Any name: those of the files are not known yet.
        diagnoses = _read_diagnoses(self.source)
        if self.against:
            before = _read_diagnoses(self.against)
            if len(before) > 1 and len(diagnoses) > 1:
                raise UsageError(f"--against {len(before)}, --from {len(diagnoses)} snapshots: one of them must be one")
            tables = snapshots.snapshot_difference_tables(before, diagnoses, top)
        else:
            tables = snapshots.snapshot_tables(diagnoses, top)
        if self.html is not None:
            write_file(self.html, snapshots.snapshot_page(diagnoses, tables).encode(), "--html")
        if snapshot is not None:
            snapshots.write_snapshot_files(diagnoses, top, snapshot)
        output.emit(tables)


@options.setting_options(MemoryWorkload, "checkpointing", "micro_batches", "plan", "memory", "top", "snapshot", "trace")
class RecordingOptions(options.OptionGroup):
    """Options for how a step saves memory, and for what is recorded of it."""

    plan: Annotated[bool, setting("--plan", help="Find the cheapest changes that fit into --memory.")] = False
    memory: Annotated[str | None, setting(help="Memory limit for --plan: 80GiB.")] = None
    top: Annotated[int, setting(help="Show this many of the largest allocations.", min=1, max=LARGEST_ALLOCATIONS)] = 5
    snapshot: Annotated[Path | None, writes_file(help="Write timelines, pages and snapshots to this folder.")] = None

    def workloads(self, trainings: Sequence[Workload], modes: Sequence[str]) -> list[MemoryWorkload]:
        """Return a workload for each training, mode, checkpointing and number of micro-batches.

        A UsageError says that forward passes alone would be checkpointed.
        """
        if modes == ["forward"] and "none" not in self.checkpoint:
            rule = "a forward pass alone saves nothing; choose none, or add another --mode"
            raise UsageError(f"--checkpoint {','.join(self.checkpoint)}: {rule}")
        directory = None if self.snapshot is None else str(self.snapshot)
        workloads = [
            MemoryWorkload(replace(training, mode=mode), strategy, self.predict, directory, micro_batches)
            for training in trainings
            for mode in modes
            # A forward pass without gradients saves nothing, so there is nothing to checkpoint.
            for strategy in (self.checkpoint if MODES[mode].has_backward else ["none"])
            for micro_batches in (self.micro_batches if MODES[mode].updates_parameters else [1])  # For one update.
        ]
        return list(dict.fromkeys(workloads))


def memprof(
    ctx: typer.Context,
    saved: SnapshotOptions = SnapshotOptions(),
    training: options.TrainingOptions = options.TrainingOptions(warmup=[1], steps=3),
    mode: options.ModesOption = ["train"],
    recording: RecordingOptions = RecordingOptions(),
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Find where the memory of a training step goes: peaks, categories, allocations, saved tensors, checkpointing.

    cs336sys memprof --size xl --context 128,256,512 --mode forward,train --snapshot xl

    cs336sys memprof --size 2.7b --context 2048 --checkpoint block,every=2,nested --dry-run

    cs336sys memprof --size xl --context 2048 --memory 80GiB --plan

    cs336sys memprof --from rank0.pickle,rank1.pickle

    cs336sys memprof --from after.pickle --against before.pickle
    """
    from cs336sys.commands.memprof.page import check_directory, write_files
    from cs336sys.commands.memprof.tables import memory_tables

    top, snapshot = recording.top, recording.snapshot
    if saved.source:
        refuse_given(ctx, [name for name in ctx.params if name not in _OF_SNAPSHOTS], "--from reads snapshots")
        saved.show(top, snapshot, output)
        return
    refuse_given(ctx, ["against", "html"], "is for snapshots that --from reads")
    # The mode of these is replaced: recording makes a workload of each for every mode.
    workloads = recording.workloads(training.workloads(mode[:1]), mode)
    output.check()
    if recording.plan or recording.memory is not None:
        _find_plan(workloads, recording, sweeping, output)
        return
    if dry_run:
        check_planned(sweeping, training.device, snapshot=snapshot)
        _predict(workloads, recording, sweeping, output)
        return
    check_directory(snapshot, (workload.name for workload in workloads))
    refuse_what_does_not_fit(workloads, training.device, force=force)
    tables = partial(memory_tables, top=top)
    output.check_selection("memprof", tables)
    configurations = [workload.configuration() for workload in workloads]
    sweep = run_sweep("memprof", "cs336sys.commands.memprof.measure:measure_memory", configurations, sweeping)
    sweep.report(tables, output, (snapshot, lambda cells, folder: write_files(cells, sweep.run, folder)))


def _predict(
    workloads: list[MemoryWorkload], recording: RecordingOptions, sweeping: SweepOptions, output: OutputOptions
) -> None:
    """Show the plan of ``--dry-run``: memory by formulas, with ``--predict`` by traces in worker processes, too."""
    from cs336sys.commands.memprof.tables import plan_tables
    from cs336sys.tables.saved import tidy

    configurations = [workload.configuration() for workload in workloads]
    if not recording.predict:
        planned = plan_tables([Cell("memprof", settings, "ok") for settings in configurations], recording.top)
        output.emit(tidy("memprof", planned, are_planned=True))
        return
    for workload in workloads:
        if workload.predicted_gib is not None:
            peak = workload.peak
            say(f"memprof: {workload.name}: {peak.total_gib:.2f} GiB by formulas ({peak.moment}); its trace follows")
    timeout = SweepOptions(cell_timeout=sweeping.cell_timeout)  # Nothing is measured, so nothing is saved or repeated.
    sweep = run_sweep("memprof", "cs336sys.training.memory_prediction:predict_memory", configurations, timeout)
    sweep.report(lambda cells, _: plan_tables(cells, recording.top), output)


def _find_plan(
    workloads: list[MemoryWorkload], recording: RecordingOptions, sweeping: SweepOptions, output: OutputOptions
) -> None:
    """Search and show the cheapest changes that make each workload fit into ``--memory``."""
    from cs336sys.commands.memprof.tables import memory_plan_tables

    memory = recording.memory
    if memory is None:
        raise UsageError("--plan needs to know how much memory there is: add --memory 80GiB")
    if not recording.plan:
        raise UsageError(f"--memory {memory}: is for --plan; add that, or leave it out")
    limit_bytes = read_memory_limit(memory, "--memory")
    check_planned(sweeping, workloads[0].training.device, snapshot=recording.snapshot)
    configurations = [workload.configuration() | {"limit_bytes": limit_bytes} for workload in workloads]
    timeout = SweepOptions(cell_timeout=sweeping.cell_timeout)  # Nothing is measured, so nothing is saved or repeated.
    sweep = run_sweep("memprof", "cs336sys.commands.memprof.measure:plan_memory", configurations, timeout)
    sweep.report(lambda cells, _: memory_plan_tables(cells), output)


def _read_diagnoses(paths: Sequence[Path]) -> list["MemoryDiagnosis"]:
    """Diagnose each device of the snapshots, of those in folders, too."""
    from cs336sys.allocations.diagnosis import diagnose_memory
    from cs336sys.allocations.dump import read_dump

    files: list[Path] = []
    for value in paths:
        # A file's own name may have commas.
        for path in [value] if value.exists() else map(Path, str(value).split(",")):
            snapshots = sorted(path.glob("*.pickle")) if path.is_dir() else [path]
            if not snapshots:
                raise UsageError(
                    f"{path}: this folder holds no .pickle; give a snapshot, or a folder of memprof --snapshot"
                )
            files += snapshots
    names = [path.name for path in files]
    diagnoses = []
    # Snapshots are millions of values that stay: the collector would look at them again and again.
    gc.disable()
    try:
        for path in files:
            name = path.name if names.count(path.name) == 1 else str(path)
            diagnoses += [diagnose_memory(name, record) for record in read_dump(path)]
    finally:
        gc.enable()
    if not diagnoses:
        raise UsageError(f"{', '.join(map(str, files))}: no device holds anything, and none did")
    return diagnoses
