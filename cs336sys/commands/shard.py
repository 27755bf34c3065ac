"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

import math
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands import training_options as options
from cs336sys.commands.options import FormatOption, OutputOption, SaveOption, at_least, between, one_of, split_list
from cs336sys.commands.ranks import TimeoutOption, WorldSizeOption, choose_world_sizes
from cs336sys.commands.sweep import CellTimeoutOption, ResumeOption, run_sweep
from cs336sys.workload import BACKENDS, BLOCK_CHECKPOINTING, SHARDING_STRATEGIES, ParallelWorkload


def shard(
    strategy: Annotated[
        list[str], typer.Option("--strategy", help=f"{', '.join(SHARDING_STRATEGIES)}; the last two are torch's own.")
    ] = [",".join(SHARDING_STRATEGIES)],
    prefetch: Annotated[
        list[str], typer.Option("--prefetch", help="For fsdp: how many blocks to gather ahead of use.")
    ] = ["1"],
    checkpoint: Annotated[
        list[str],
        typer.Option("--checkpoint", help="block: keep the input of each block alone and compute the rest again."),
    ] = ["none"],
    world_size: WorldSizeOption = [],
    backend: Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}; auto: NCCL on GPUs, Gloo on CPUs.")] = "auto",
    high_priority: Annotated[
        bool, typer.Option("--high-priority", help="Let NCCL's kernels go before others that wait for the GPU.")
    ] = False,
    size: options.SizeOption = [],
    context: options.ContextOption = [],
    batch_size: Annotated[
        list[str],
        typer.Option("--batch-size", help="Sequences of all ranks together. Default: the size's.", show_default=False),
    ] = [],
    vocab_size: options.VocabSizeOption = None,
    d_model: options.DModelOption = None,
    d_ff: options.DFfOption = None,
    num_layers: options.NumLayersOption = None,
    num_heads: options.NumHeadsOption = None,
    precision: options.PrecisionOption = [],
    bf16: options.Bf16Option = False,
    fp16: options.Fp16Option = False,
    compile: options.CompileOption = ["off"],
    attention: options.AttentionOption = ["reference"],
    optimizer: options.OptimizerOption = ["course"],
    warmup: options.WarmupOption = ["2"],
    steps: options.StepsOption = 5,
    device: options.DeviceOption = "auto",
    seed: options.SeedOption = 0,
    tf32: options.Tf32Option = False,
    synchronize: options.SynchronizeOption = "step",
    timeout: TimeoutOption = 120.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what a rank's memory holds at four moments to this picture file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Keep a Chrome trace of one step of rank 0, for each cell, in this folder.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells with the predicted memory of a rank and run nothing.")
    ] = False,
    save: SaveOption = None,
    resume: ResumeOption = False,
    cell_timeout: CellTimeoutOption = None,
    format: FormatOption = None,
    output: OutputOption = None,
) -> None:
    """Shard training state over ranks: check the weights against one process, then measure memory, time and traffic.

    cs336sys shard --size xl --world-size 2 --bf16 --optimizer fused --plot memory.png

    cs336sys shard --strategy fsdp,torch-fsdp --size 2.7b --bf16 --optimizer fused --prefetch 0,1,2

    cs336sys shard --strategy fsdp --size 10b --bf16 --optimizer fused --checkpoint block
    """
    from cs336sys.report.outputs import check_plot, check_writable
    from cs336sys.report.parallel.shard import plan_table, shard_tables
    from cs336sys.report.tables import check_output, emit

    workloads = options.expand_workloads(
        size=size or [options.default_size(device)],
        context=context,
        batch_size=batch_size,
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        mode="train",
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
    chosen = [
        ParallelWorkload(
            training,
            name,
            ranks,
            backend,
            high_priority=high_priority,
            trace=str(trace) if trace else None,
            timeout_s=timeout,
            prefetch=ahead,
            checkpointing=checkpointing,
        )
        for ranks, training, checkpointing in product(
            choose_world_sizes(world_size),
            workloads,
            split_list(checkpoint, "--checkpoint", one_of(BLOCK_CHECKPOINTING)),
        )
        for name, ahead in _strategies(strategy, prefetch)
    ]
    split_list([str(timeout)], "--timeout", between(1, math.inf))
    check_output(output, format)
    check_plot(plot)
    if trace is not None:
        check_writable(trace / "trace.json.gz", "--trace")
    if dry_run:
        emit([plan_table(chosen)], format=format, output=output)
        return
    sweep = run_sweep(
        "shard",
        "cs336sys.experiments.parallel.measurement:measure_parallel_training",
        [workload.configuration() for workload in chosen],
        save=save,
        resume=resume,
        cell_timeout=cell_timeout,
        across_ranks=True,
    )
    if sweep.is_reported_here:
        if plot is not None:
            from cs336sys.report.parallel.shard_plots import plot_memory

            plot_memory(sweep.cells, plot)
        emit(shard_tables(sweep.cells, sweep.run), format=format, output=output)
    sweep.exit()


def _strategies(strategy: list[str], prefetch: list[str]) -> list[tuple[str, int | None]]:
    """Strategies with how far they gather ahead; only ``fsdp`` lets that be chosen."""
    ahead = split_list(prefetch, "--prefetch", at_least(0))
    return [
        (name, units)
        for name in split_list(strategy, "--strategy", one_of(SHARDING_STRATEGIES))
        for units in (ahead if name == "fsdp" else [None])
    ]
