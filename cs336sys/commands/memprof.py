"""``cs336sys memprof``: where the memory of a training step goes."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.accounting.checkpointing import parse_checkpointing
from cs336sys.commands.options import training as options
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import among, between, one_of, read_value, split_list
from cs336sys.commands.sweep.run import check_planned, planned_capacity, run_sweep, tell_what_does_not_fit
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell
from cs336sys.workload import MODES, MemoryWorkload

ModesOption = Annotated[
    list[str], typer.Option("--mode", help=f"Phases of a step: {', '.join(MODES)}.", autocompletion=among(MODES))
]
CheckpointOption = Annotated[
    list[str],
    typer.Option(
        "--checkpoint",
        help="none; block: every block; every=K: K blocks; sublayer: attention and feed-forward each, or attention, "
        "ffn alone; nested: halves within halves.",
        autocompletion=among(("none", "block", "every=", "sublayer", "attention", "ffn", "nested")),
    ),
]
TopOption = Annotated[int, typer.Option("--top", help="Largest allocations shown.")]
SnapshotOption = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="Write timelines, pages and snapshots to this folder.",
        show_default=False,
    ),
]


def memprof(
    model: options.TrainedModelOptions = options.TrainedModelOptions(),
    mode: ModesOption = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    checkpoint: CheckpointOption = ["none"],
    top: TopOption = 5,
    snapshot: SnapshotOption = None,
    predict: Annotated[bool, typer.Option("--predict/--no-predict", help="Also predict by fake tensors.")] = True,
    steps: options.StepsOptions = options.StepsOptions(warmup=["1"], steps=3),
    run: options.RunOptions = options.RunOptions(),
    dry_run: options.DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Find where the memory of a training step goes: peaks, categories, allocations, saved tensors, checkpointing.

    cs336sys memprof --size xl --context 128,256,512 --mode forward,train --snapshot xl

    cs336sys memprof --size 2.7b --context 2048 --checkpoint block,every=2,nested --dry-run
    """
    from cs336sys.report.memory.page import check_directory, write_files
    from cs336sys.report.memory.tables import memory_tables, plan_tables
    from cs336sys.workload import LARGEST_ALLOCATIONS

    modes = split_list(mode, "--mode", one_of(MODES))
    strategies = split_list(checkpoint, "--checkpoint", parse_checkpointing)
    shown = int(read_value(str(top), "--top", between(1, LARGEST_ALLOCATIONS)))
    if modes == ["forward"] and "none" not in strategies:
        listed = ",".join(checkpoint)
        raise UsageError(
            f"--checkpoint {listed}: a forward pass alone saves nothing; choose none, or add another --mode"
        )
    training = options.expand_workloads(model, modes[0], precision, implementation, steps, run)
    directory = None if snapshot is None else str(snapshot)
    workloads = [
        MemoryWorkload(replace(workload, mode=phases), strategy, predict, directory)
        for workload in training
        for phases in modes
        # A forward pass without gradients saves nothing, so there is nothing to checkpoint.
        for strategy in (strategies if phases != "forward" else ["none"])
    ]
    workloads = list(dict.fromkeys(workloads))
    output.check()
    if dry_run:
        check_planned(sweeping, {"--snapshot": snapshot})
        planned_capacity(run.device)
    if dry_run and not predict:
        cells = [Cell("memprof", workload.configuration(), "ok") for workload in workloads]
        output.emit(plan_tables(cells, shown))
        return
    if not dry_run:
        check_directory(snapshot)
        tell_what_does_not_fit(workloads, run.device)
    measure = "prediction:predict_memory" if dry_run else "measurement:measure_memory"
    sweep = run_sweep(
        "memprof",
        f"cs336sys.experiments.memory.{measure}",
        [workload.configuration() for workload in workloads],
        SweepOptions(cell_timeout=sweeping.cell_timeout) if dry_run else sweeping,
    )
    if dry_run:
        sweep.report(lambda: plan_tables(sweep.cells, shown), output)
    else:
        sweep.report(
            lambda: memory_tables(sweep.cells, sweep.run, shown),
            output,
            pictures=[] if snapshot is None else [lambda: write_files(sweep.cells, sweep.run, snapshot)],
        )
