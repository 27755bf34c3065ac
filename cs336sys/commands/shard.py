"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

from collections.abc import Callable, Iterator, Sequence
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
    check_scaling_plot,
    choose_world_sizes,
    is_first_rank,
)
from cs336sys.commands.sweep.run import check_planned, planned_capacity, run_sweep, tell_what_does_not_fit
from cs336sys.results.model import Cell


def shard(
    ctx: typer.Context,
    sharding: ShardingOptions = ShardingOptions(),
    world_size: WorldSizeOption = [],
    backend: BackendOption = "auto",
    high_priority: HighPriorityOption = False,
    model: options.SharedModelOptions = options.SharedModelOptions(),
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: options.StepsOptions = options.StepsOptions(warmup=["2"], steps=5),
    run: options.RunOptions = options.RunOptions(),
    timeout: TimeoutOption = 120.0,
    check_layers: CheckLayersOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a rank's memory at four moments.")] = None,
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
    from cs336sys.report.outputs import check_plot, check_writable
    from cs336sys.report.scaling import scaling_tables
    from cs336sys.report.shard import shard_plan

    if sharding.board:
        refuse_beside_board(model.model, sharding.mesh, plot)
    sharding, implementation, steps = completed(ctx, sharding, implementation, steps)
    chosen = sharding.cells(
        options.expand_workloads(model, "train", precision, implementation, steps, run),
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
        output.check()
        check_plot(plot)
        check_scaling_plot(plot_scaling, {workload.world_size for workload in chosen})
        if trace is not None:
            check_writable(trace / "trace.json.gz", "--trace")
    if dry_run:
        check_planned(sweeping, {"--plot": plot, "--plot-scaling": plot_scaling, "--trace": trace}, across_ranks=True)
        planned_capacity(run.device)
        if is_first_rank():
            output.emit([shard_plan(chosen)])
        return
    if not sharding.board:
        tell_what_does_not_fit(chosen, run.device)
    # Cells of a board are others than those that shard measures of the same workload.
    measure, mark = "measurement:measure_parallel_training", {}
    if sharding.board:
        measure, mark = "board:measure_board", {"board": True}
    sweep = run_sweep(
        "shard",
        f"cs336sys.experiments.parallel.{measure}",
        [workload.configuration() | mark for workload in chosen],
        sweeping,
        across_ranks=True,
    )
    sweep.report(
        lambda: [*sharding_tables(sweep.cells, sweep.run), *scaling_tables(sweep.cells)],
        output,
        pictures=_pictures(sweep.cells, plot, plot_scaling),
    )


def _pictures(cells: Sequence[Cell], memory: Path | None, scaling: Path | None) -> Iterator[Callable[[], None]]:
    from cs336sys.report.scaling import plot_scaling
    from cs336sys.report.shard import plot_memory

    if memory is not None:
        yield lambda: plot_memory(cells, memory)
    if scaling is not None:
        yield lambda: plot_scaling(cells, scaling)
