"""``cs336sys memprof``: where the memory of a training step goes."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands import training_options as options
from cs336sys.commands.options import FormatOption, OutputOption, SaveOption, between, one_of, split_list
from cs336sys.commands.sweep import CellTimeoutOption, ResumeOption, run_sweep
from cs336sys.results import Cell
from cs336sys.workload import MODES, MemoryWorkload

ModesOption = Annotated[list[str], typer.Option("--mode", help=f"Phases of a step: {', '.join(MODES)}.")]
CheckpointOption = Annotated[
    list[str],
    typer.Option(
        "--checkpoint", help="none; block: every block; every=K: groups of K blocks; nested: halves within halves."
    ),
]
TopOption = Annotated[int, typer.Option("--top", help="How many of the largest allocations to show.")]
SnapshotOption = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="Write each cell's timeline (.png, .svg), page (.html) and memory snapshot (.pickle) to this directory.",
        show_default=False,
    ),
]


def memprof(
    size: options.SizeOption = ["small"],
    context: options.ContextOption = [],
    batch_size: options.BatchSizeOption = [],
    vocab_size: options.VocabSizeOption = None,
    d_model: options.DModelOption = None,
    d_ff: options.DFfOption = None,
    num_layers: options.NumLayersOption = None,
    num_heads: options.NumHeadsOption = None,
    mode: ModesOption = ["train"],
    precision: options.PrecisionOption = [],
    bf16: options.Bf16Option = False,
    fp16: options.Fp16Option = False,
    compile: options.CompileOption = ["off"],
    attention: options.AttentionOption = ["reference"],
    optimizer: options.OptimizerOption = ["course"],
    checkpoint: CheckpointOption = ["none"],
    top: TopOption = 5,
    snapshot: SnapshotOption = None,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Also predict each cell on fake tensors.")] = True,
    warmup: options.WarmupOption = ["1"],
    steps: options.StepsOption = 3,
    device: options.DeviceOption = "auto",
    seed: options.SeedOption = 0,
    tf32: options.Tf32Option = False,
    synchronize: options.SynchronizeOption = "step",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells with their predicted memory and run nothing.")
    ] = False,
    save: SaveOption = None,
    resume: ResumeOption = False,
    cell_timeout: CellTimeoutOption = None,
    format: FormatOption = None,
    output: OutputOption = None,
) -> None:
    """Find where the memory of a training step goes: peaks, categories, allocations, saved tensors, checkpointing.

    cs336sys memprof --size xl --context 128,256,512 --mode forward,train --snapshot xl

    cs336sys memprof --size 2.7b --context 2048 --checkpoint block,every=2,nested --dry-run
    """
    from cs336sys.experiments.memory.summary import LARGEST_ALLOCATIONS
    from cs336sys.report.memory.files import check_directory, write_files
    from cs336sys.report.memory.plan import plan_tables
    from cs336sys.report.memory.tables import memory_tables
    from cs336sys.report.tables import check_output, emit

    modes = split_list(mode, "--mode", one_of(MODES))
    strategies = split_list(checkpoint, "--checkpoint")
    shown = int(split_list([str(top)], "--top", between(1, LARGEST_ALLOCATIONS))[0])
    training = options.expand_workloads(
        size=size,
        context=context,
        batch_size=batch_size,
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        mode=modes[0],
        precision=precision,
        bf16=bf16,
        fp16=fp16,
        compile=compile,
        attention=attention,
        optimizer=optimizer,
        warmup=warmup,
        steps=steps,
        device=device,
        seed=seed,
        tf32=tf32,
        synchronize=synchronize,
    )
    directory = None if snapshot is None else str(snapshot)
    workloads = [
        MemoryWorkload(replace(workload, mode=phases), strategy, trace, directory)
        for workload in training
        for phases in modes
        # A forward pass without gradients saves nothing, so there is nothing to checkpoint.
        for strategy in (strategies if phases != "forward" else ["none"])
    ]
    workloads = list(dict.fromkeys(workloads))
    check_output(output, format)
    if dry_run and not trace:
        cells = [Cell("memprof", workload.configuration(), "ok") for workload in workloads]
        emit(plan_tables(cells, shown), format=format, output=output)
        return
    if not dry_run:
        check_directory(snapshot)
    measure = "prediction:predict_memory" if dry_run else "measurement:measure_memory"
    sweep = run_sweep(
        "memprof",
        f"cs336sys.experiments.memory.{measure}",
        [workload.configuration() for workload in workloads],
        save=None if dry_run else save,
        resume=resume and not dry_run,
        cell_timeout=cell_timeout,
    )
    if dry_run:
        emit(plan_tables(sweep.cells, shown), format=format, output=output)
    else:
        if snapshot is not None:
            write_files(sweep.cells, sweep.run, snapshot)
        emit(memory_tables(sweep.cells, sweep.run, shown), format=format, output=output)
    sweep.exit()
