"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.sharding.mesh import mesh_ranks, outer_dimension, read_mesh, strategy_of_mesh
from cs336sys.commands.options import training as options
from cs336sys.commands.options.completion import among
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import at_least, one_of, split_list
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
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.errors import UsageError, choose_from
from cs336sys.results import Cell
from cs336sys.workload import (
    BLOCK_CHECKPOINTING,
    CONTEXT_STRATEGIES,
    SHARD_STRATEGIES,
    SHARDING_STRATEGIES,
    TENSOR_STRATEGIES,
    ParallelWorkload,
)


def shard(
    ctx: typer.Context,
    strategy: Annotated[
        list[str],
        typer.Option(
            "--strategy",
            help=f"{', '.join(SHARD_STRATEGIES)}. Default: those that split no sequence and no layer.",
            autocompletion=among(SHARD_STRATEGIES),
            show_default=False,
        ),
    ] = [",".join(SHARDING_STRATEGIES)],
    prefetch: Annotated[list[str], typer.Option("--prefetch", help="For fsdp: blocks gathered ahead of use.")] = ["1"],
    keep_gathered: Annotated[
        list[str],
        typer.Option(
            "--keep-gathered",
            help="For fsdp: last blocks that stay gathered. --checkpoint auto: as many as fit.",
        ),
    ] = ["0"],
    checkpoint: Annotated[
        list[str],
        typer.Option(
            "--checkpoint",
            help="none; block: inputs are kept; keep=N: of N blocks gate and up, too; auto: as many as fit.",
            autocompletion=among((*BLOCK_CHECKPOINTING, "auto")),
        ),
    ] = ["none"],
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="130GiB, for --checkpoint auto. Default: by GPU.")
    ] = None,
    board: Annotated[
        bool,
        typer.Option("--board", help="The leaderboard's step, by the fastest parts."),
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(help="Ranks in two dimensions: fsdp=2,tp=2; cp: sequences."),
    ] = None,
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
    from cs336sys.commands.options.board import (
        chosen_by_memory,
        chosen_for_board,
        is_given,
        read_memory_limit,
        refuse_beside_board,
        require_for_board,
        room_for_tensors,
    )
    from cs336sys.report.outputs import check_plot, check_writable
    from cs336sys.report.parallel.board import sharding_tables
    from cs336sys.report.parallel.scaling import scaling_tables
    from cs336sys.report.parallel.shard import shard_plan

    if board:
        refuse_beside_board(model.model, mesh, plot)
        strategy, checkpoint, implementation, steps = chosen_for_board(ctx, strategy, checkpoint, implementation, steps)
    limit_bytes = None if memory_limit is None else read_memory_limit(memory_limit)
    if mesh is not None:
        strategy = strategy if is_given(ctx, "strategy") else [strategy_of_mesh(mesh)]
        world_size = world_size or [str(mesh_ranks(read_mesh(mesh)))]
    workloads = options.expand_workloads(model, "train", precision, implementation, steps, run)
    if board:
        for training in workloads:
            require_for_board(training)
    chosen = []
    # Beside strategies that have a mesh, others may be measured on as many ranks.
    grouped = {*split_list(strategy, "--strategy", str)} & {*TENSOR_STRATEGIES, *CONTEXT_STRATEGIES}
    for ranks, training, checkpointing, (name, ahead, staying) in product(
        choose_world_sizes(world_size),
        workloads,
        split_list(checkpoint, "--checkpoint", _checkpointing),
        _strategies(strategy, prefetch, keep_gathered),
    ):
        workload = ParallelWorkload(
            training,
            name,
            ranks,
            backend,
            high_priority=high_priority,
            trace=str(trace) if trace else None,
            timeout_s=timeout,
            prefetch=ahead,
            keep_gathered=staying,
            check_layers=check_layers,
            checkpointing="keep=0" if checkpointing == "auto" else checkpointing,
            mesh=mesh if name in grouped or not grouped else None,
        )
        if checkpointing == "auto":
            workload = chosen_by_memory(
                workload,
                room_for_tensors(run.device) if limit_bytes is None else limit_bytes,
                keeps_gathered=not is_given(ctx, "keep_gathered"),
                tells=is_first_rank(),
            )
        chosen.append(workload)
    if is_first_rank():
        output.check()
        check_plot(plot)
        check_scaling_plot(plot_scaling, {workload.world_size for workload in chosen})
        if trace is not None:
            check_writable(trace / "trace.json.gz", "--trace")
    if dry_run:
        if is_first_rank():
            output.emit([shard_plan(chosen)])
        return
    # Cells of a board are others than those that shard measures of the same workload.
    measure, mark = ("board:measure_board", {"board": True}) if board else ("measurement:measure_parallel_training", {})
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


def _checkpointing(text: str) -> str:
    if text != "auto" and kept_blocks(text) is None and text not in BLOCK_CHECKPOINTING:
        raise UsageError(choose_from(text, (*BLOCK_CHECKPOINTING, "keep=N", "auto")))
    return text


def _strategies(
    strategy: list[str], prefetch: list[str], keep_gathered: list[str]
) -> list[tuple[str, int | None, int]]:
    """Strategies with how far they gather ahead and what stays gathered; only ``fsdp`` lets that be chosen."""
    ahead = split_list(prefetch, "--prefetch", at_least(0))
    staying = split_list(keep_gathered, "--keep-gathered", at_least(0))
    return [
        (name, units, blocks)
        for name in split_list(strategy, "--strategy", one_of(SHARD_STRATEGIES))
        for units in (ahead if name == "fsdp" or outer_dimension(name) == "fsdp" else [None])
        for blocks in (staying if name == "fsdp" else [0])
    ]


def _pictures(cells: Sequence[Cell], memory: Path | None, scaling: Path | None) -> Iterator[Callable[[], None]]:
    from cs336sys.report.parallel.scaling import plot_scaling
    from cs336sys.report.parallel.shard_plots import plot_memory

    if memory is not None:
        yield lambda: plot_memory(cells, memory)
    if scaling is not None:
        yield lambda: plot_scaling(cells, scaling)
