"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.options import training as options
from cs336sys.commands.options.board import is_given, refuse_beside_board
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.sharding import ShardingOptions, completed
from cs336sys.commands.sweep.ranks import (
    BackendOption,
    CheckLayersOption,
    HighPriorityOption,
    PlotScalingOption,
    TimeoutOption,
    TraceOption,
    WorldSizeOption,
    check_rank_outputs,
    choose_world_sizes,
    is_first_rank,
)
from cs336sys.commands.sweep.run import run_sweep, show_plan, tell_what_does_not_fit


def shard(
    ctx: typer.Context,
    sharding: ShardingOptions = ShardingOptions(),
    world_size: WorldSizeOption = [],
    backend: BackendOption = "auto",
    high_priority: HighPriorityOption = False,
    model: options.SharedModelOptions = options.SharedModelOptions(),
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: options.StepsOptions = options.StepsOptions(warmup=[5], steps=10),
    run: options.RunOptions = options.RunOptions(),
    timeout: TimeoutOption = 120.0,
    check_layers: CheckLayersOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a rank's memory at six moments.")] = None,
    plot_scaling: PlotScalingOption = None,
    trace: TraceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print cells and predicted memory alone.")] = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Shard training state over ranks: check the weights against one process, then measure memory, time and traffic.

    cs336sys shard --size xl --world-size 2 --bf16 --optimizer fused --plot memory.png

    cs336sys shard --strategy fsdp,torch-fsdp --size 2.7b --bf16 --optimizer fused --prefetch 0,1,2

    cs336sys shard --strategy fsdp --size 10b --bf16 --optimizer fused --checkpoint block

    cs336sys shard --strategy tensor,tensor-sequence,torch-tensor --size 2.7b --bf16 --optimizer fused --compile block

    cs336sys shard --mesh fsdp=2,tp=2 --size 2.7b --bf16 --optimizer fused

    cs336sys shard --size 8b --board --memory-limit 130GiB
    """
    from cs336sys.report.board import sharding_tables
    from cs336sys.report.scaling import plot_scaling as draw_scaling
    from cs336sys.report.scaling import scaling_tables
    from cs336sys.report.shard import plot_memory, shard_plan

    if sharding.board:
        refuse_beside_board(model.model, sharding.mesh, plot)
    sharding, implementation, steps = completed(ctx, sharding, implementation, steps)
    chosen = sharding.cells(
        options.expand_workloads(model, ["train"], precision, implementation, steps, run),
        choose_world_sizes(world_size or sharding.ranks_of_mesh),
        run.device,
        keeps_gathered=not is_given(ctx, "keep_gathered"),
        tells=is_first_rank(),
        backend=backend,
        high_priority=high_priority,
        trace=str(trace) if trace else None,
        timeout_s=timeout,
        check_layers=check_layers,
    )
    if is_first_rank():
        output.check(plot=plot, plot_scaling=plot_scaling)
        check_rank_outputs(plot_scaling, trace, chosen)
    if dry_run:
        show_plan(
            lambda _: shard_plan(chosen),
            sweeping,
            output,
            run.device,
            across_ranks=True,
            plot=plot,
            plot_scaling=plot_scaling,
            trace=trace,
        )
        return
    if not sharding.board:
        tell_what_does_not_fit(chosen, run.device)
    # Cells of a board are others than those that shard measures of the same workload.
    measure, mark = "measurement:measure_parallel_training", {}
    if sharding.board:
        measure, mark = "board:measure_board", {"board": True}
    configurations = [workload.configuration() | mark for workload in chosen]
    run_sweep("shard", f"cs336sys.experiments.parallel.{measure}", configurations, sweeping, across_ranks=True).report(
        lambda cells, run: [*sharding_tables(cells, run), *scaling_tables(cells)],
        output,
        (plot, plot_memory),
        (plot_scaling, draw_scaling),
    )
