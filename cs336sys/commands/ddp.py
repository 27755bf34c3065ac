"""``cs336sys ddp``: data parallel training, its strategies, and how much of the communication each hides."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336sys.accounting.sharding.partition import WHOLE_BLOCKS
from cs336sys.commands.options import training as options
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import MEASURING, among, between, one_of, split_list
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
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import BUCKETED, DATA_PARALLEL_STRATEGIES, TRANSPORTS, ParallelWorkload


def ddp(
    mode: Annotated[
        list[str],
        typer.Option(
            "--mode",
            help=f"{', '.join(DATA_PARALLEL_STRATEGIES)} (torch's DistributedDataParallel).",
            autocompletion=among(DATA_PARALLEL_STRATEGIES),
        ),
    ] = [",".join(DATA_PARALLEL_STRATEGIES)],
    bucket_mb: Annotated[
        list[str],
        typer.Option(
            "--bucket-mb",
            help=f"For {BUCKETED}: the most gradients in one all-reduce, in 1e6 bytes; {WHOLE_BLOCKS}: whole blocks.",
        ),
    ] = [WHOLE_BLOCKS],
    world_size: WorldSizeOption = [],
    backend: BackendOption = "auto",
    gradient_dtype: Annotated[
        list[str],
        typer.Option(
            "--gradient-dtype",
            help=f"Gradients are sent in {', '.join(PRECISIONS)}.",
            autocompletion=among(PRECISIONS),
        ),
    ] = ["fp32"],
    high_priority: HighPriorityOption = False,
    transport: Annotated[
        list[str],
        typer.Option(
            "--transport",
            help="What sends buckets: collectives, or the copy-engines of two GPUs.",
            autocompletion=among(TRANSPORTS),
        ),
    ] = ["collectives"],
    model: options.SharedModelOptions = options.SharedModelOptions(),
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: options.StepsOptions = options.StepsOptions(warmup=["2"], steps=5),
    rounds: Annotated[
        int, typer.Option(help="Times through all of it, to and fro.", min=1, rich_help_panel=MEASURING)
    ] = 1,
    run: options.RunOptions = options.RunOptions(),
    timeout: TimeoutOption = 120.0,
    check_layers: CheckLayersOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw timelines of computing and communication.")] = None,
    plot_buckets: Annotated[
        Path | None, typer.Option("--plot-buckets", help="Draw bucket sizes and their model.")
    ] = None,
    plot_scaling: PlotScalingOption = None,
    trace: TraceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print cells and memory of state alone.")] = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on several ranks, check the weights against one process, and time what communication costs the step.

    cs336sys ddp --size xl --world-size 2 --bf16 --bucket-mb 1,10,100,1000 --plot timelines.png

    cs336sys ddp --mode bucketed --bucket-mb 100

    torchrun --nnodes 2 --nproc-per-node 8 ... -m cs336sys ddp --size xl --batch-size 16
    """
    from cs336sys.report.ddp import ddp_plan, ddp_tables, pool_ddp_rounds
    from cs336sys.report.outputs import check_plot, check_writable
    from cs336sys.report.scaling import scaling_tables

    workloads = options.expand_workloads(model, "train", precision, implementation, steps, run)
    chosen = [
        ParallelWorkload(
            training,
            strategy,
            ranks,
            backend,
            bucket,
            sent_in,
            high_priority,
            str(trace) if trace else None,
            timeout,
            check_layers=check_layers,
            transport=sent_by,
        )
        for ranks, training, sent_in in product(
            choose_world_sizes(world_size),
            workloads,
            split_list(gradient_dtype, "--gradient-dtype", one_of(PRECISIONS)),
        )
        for strategy, bucket, sent_by in _strategies(mode, bucket_mb, transport)
    ]
    if is_first_rank():
        output.check()
        check_plot(plot)
        check_plot(plot_buckets, "--plot-buckets")
        if plot_buckets is not None and all(workload.bucket_mb is None for workload in chosen):
            raise UsageError(f"--plot-buckets {plot_buckets}: {_ONLY_BUCKETED}")
        check_scaling_plot(plot_scaling, {workload.world_size for workload in chosen})
        if trace is not None:
            check_writable(trace / "trace.json.gz", "--trace")
    if dry_run:
        written = {"--plot": plot, "--plot-buckets": plot_buckets, "--plot-scaling": plot_scaling, "--trace": trace}
        check_planned(sweeping, written, across_ranks=True)
        planned_capacity(run.device)
        if is_first_rank():
            output.emit([ddp_plan(chosen)])
        return
    tell_what_does_not_fit(chosen, run.device)
    sweep = run_sweep(
        "ddp",
        "cs336sys.experiments.parallel.measurement:measure_parallel_training",
        _in_rounds([workload.configuration() for workload in chosen], rounds),
        sweeping,
        across_ranks=True,
    )
    cells = pool_ddp_rounds(sweep.cells)
    sweep.report(
        lambda: [*ddp_tables(cells, sweep.run), *scaling_tables(cells)],
        output,
        pictures=_pictures(cells, plot, plot_buckets, plot_scaling),
    )


def _in_rounds(configurations: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Every second round goes backwards, so that none is always the first, or always measured after the same one."""
    if rounds == 1:
        return configurations
    return [
        configuration | {"round": number}
        for number in range(1, rounds + 1)
        for configuration in (configurations if number % 2 else reversed(configurations))
    ]


def _strategies(
    mode: list[str], bucket_mb: list[str], transport: list[str]
) -> list[tuple[str, float | str | None, str]]:
    """Modes with their bucket sizes and what sends them, where they have any."""
    transports = split_list(transport, "--transport", one_of(TRANSPORTS))
    modes = split_list(mode, "--mode", one_of(DATA_PARALLEL_STRATEGIES))
    if BUCKETED not in modes and transports != ["collectives"]:
        raise UsageError(f"--transport {','.join(transports)}: only mode bucketed has the choice; add it to --mode")
    buckets = split_list(bucket_mb, "--bucket-mb", _bucket_size)
    if BUCKETED not in modes and buckets != [WHOLE_BLOCKS]:
        raise UsageError(f"--bucket-mb {','.join(bucket_mb)}: {_ONLY_BUCKETED}")
    return [
        (strategy, bucket, sent_by)
        for strategy in modes
        for bucket in (buckets if strategy == BUCKETED else [None])
        for sent_by in (transports if strategy == BUCKETED else ["collectives"])
    ]


_ONLY_BUCKETED = f"only mode {BUCKETED} has buckets of a size; add it to --mode"


def _bucket_size(text: str) -> float | str:
    return text if text == WHOLE_BLOCKS else between(1e-6, 1e6)(text)


def _pictures(
    cells: Sequence[Cell], timelines: Path | None, buckets: Path | None, scaling: Path | None
) -> Iterator[Callable[[], None]]:
    from cs336sys.report.ddp import plot_buckets, plot_timelines
    from cs336sys.report.scaling import plot_scaling

    if timelines is not None:
        yield lambda: plot_timelines(cells, timelines)
    if buckets is not None:
        yield lambda: plot_buckets(cells, buckets)
    if scaling is not None:
        yield lambda: plot_scaling(cells, scaling)
