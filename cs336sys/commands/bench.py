"""``cs336sys bench``: how long forward pass, backward pass and optimizer step take."""

from typing import Annotated

import typer

from cs336sys.commands import workloads as options
from cs336sys.commands.options import FormatOption, OutputOption, SaveOption, at_least, between, split_list
from cs336sys.commands.sweep import CellTimeoutOption, ResumeOption, run_sweep


def bench(
    size: options.SizeOption = ["small"],
    context: options.ContextOption = [],
    batch_size: options.BatchSizeOption = [],
    vocab_size: options.VocabSizeOption = None,
    d_model: options.DModelOption = None,
    d_ff: options.DFfOption = None,
    num_layers: options.NumLayersOption = None,
    num_heads: options.NumHeadsOption = None,
    mode: options.ModeOption = "train",
    precision: options.PrecisionOption = [],
    bf16: options.Bf16Option = False,
    fp16: options.Fp16Option = False,
    compile: options.CompileOption = ["off"],
    attention: options.AttentionOption = ["reference"],
    optimizer: options.OptimizerOption = ["course"],
    warmup: options.WarmupOption = ["5"],
    steps: options.StepsOption = 10,
    rounds: Annotated[int, typer.Option(help="Times to go through all combinations, samples pooled.")] = 1,
    percentiles: Annotated[
        list[str], typer.Option(help="Also show these percentiles of the step: 50,90.", show_default=False)
    ] = [],
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
    """Time forward pass, backward pass and optimizer step of a Transformer, for every combination of the lists.

    cs336sys bench --size small,medium --precision fp32,bf16 --compile off,block

    cs336sys bench --size small --warmup 0,1,2,5

    cs336sys bench --size small --attention sdpa,flash --rounds 5
    """
    from cs336sys.report.bench import bench_tables, plan_table, pool_rounds
    from cs336sys.report.tables import check_output, emit

    workloads = options.expand_workloads(
        size=size,
        context=context,
        batch_size=batch_size,
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        mode=mode,
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
    shown_percentiles = split_list(percentiles, "--percentiles", between(0, 100)) if percentiles else []
    split_list([str(rounds)], "--rounds", at_least(1))
    check_output(output, format)
    if dry_run:
        emit([plan_table(workloads)], format=format, output=output)
        return
    configurations = [workload.configuration() for workload in workloads]
    if rounds > 1:
        # A round goes through all of them, so that what is compared is measured side by side.
        configurations = [
            configuration | {"round": number} for number in range(1, rounds + 1) for configuration in configurations
        ]
    sweep = run_sweep(
        "bench",
        "cs336sys.training:measure_training",
        configurations,
        save=save,
        resume=resume,
        cell_timeout=cell_timeout,
        fresh_worker=len({workload.warmup for workload in workloads}) > 1,
    )
    emit(bench_tables(pool_rounds(sweep.cells), sweep.run, shown_percentiles), format=format, output=output)
    sweep.exit()
