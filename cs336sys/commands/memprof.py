"""``cs336sys memprof``: where the memory of a training step goes."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.accounting.checkpointing import parse_checkpointing
from cs336sys.commands.options import training as options
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import choice
from cs336sys.commands.sweep.run import check_planned, run_sweep, tell_what_does_not_fit
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell
from cs336sys.workload import LARGEST_ALLOCATIONS, MODES, MemoryWorkload


def memprof(
    model: options.TrainedModelOptions = options.TrainedModelOptions(),
    mode: Annotated[list[str], choice(MODES, f"Phases of a step: {', '.join(MODES)}.")] = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    checkpoint: Annotated[
        list[str],
        choice(
            ("none", "block", "every=", "sublayer", "attention", "ffn", "nested"),
            "none; block: every block; every=K: K blocks; sublayer: attention and feed-forward each, or attention, "
            "ffn alone; nested: halves within halves.",
            parser=parse_checkpointing,
        ),
    ] = ["none"],
    top: Annotated[int, typer.Option(help="Largest allocations shown.", min=1, max=LARGEST_ALLOCATIONS)] = 5,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write timelines, pages and snapshots to this folder.", show_default=False)
    ] = None,
    predict: Annotated[bool, typer.Option("--predict/--no-predict", help="Also predict by fake tensors.")] = True,
    steps: options.StepsOptions = options.StepsOptions(warmup=[1], steps=3),
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

    if mode == ["forward"] and "none" not in checkpoint:
        listed = ",".join(checkpoint)
        raise UsageError(
            f"--checkpoint {listed}: a forward pass alone saves nothing; choose none, or add another --mode"
        )
    training = options.expand_workloads(model, mode[:1], precision, implementation, steps, run)
    directory = None if snapshot is None else str(snapshot)
    workloads = [
        MemoryWorkload(replace(workload, mode=phases), strategy, predict, directory)
        for workload in training
        for phases in mode
        # A forward pass without gradients saves nothing, so there is nothing to checkpoint.
        for strategy in (checkpoint if phases != "forward" else ["none"])
    ]
    workloads = list(dict.fromkeys(workloads))
    output.check()
    if dry_run:
        check_planned(sweeping, run.device, snapshot=snapshot)
    if dry_run and not predict:
        cells = [Cell("memprof", workload.configuration(), "ok") for workload in workloads]
        output.emit(plan_tables(cells, top))
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
        sweep.report(lambda cells, _: plan_tables(cells, top), output)
    else:
        sweep.report(
            lambda cells, run: memory_tables(cells, run, top),
            output,
            (snapshot, lambda cells, folder: write_files(cells, sweep.run, folder)),
        )
