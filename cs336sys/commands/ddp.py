"""``cs336sys ddp``: data parallel training, its strategies, and how much of the communication each hides."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cs336sys.accounting.sharding.partition import WHOLE_BLOCKS
from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import MEASURING, between, choice
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
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import BUCKETED, DATA_PARALLEL_STRATEGIES, TRANSPORTS, ParallelWorkload


def _bucket_size(text: str) -> float | str:
    return text if text == WHOLE_BLOCKS else between(1e-6, 1e6)(text)


def ddp(
    mode: Annotated[
        list[str],
        choice(DATA_PARALLEL_STRATEGIES, f"{', '.join(DATA_PARALLEL_STRATEGIES)} (torch's DistributedDataParallel)."),
    ] = list(DATA_PARALLEL_STRATEGIES),
    bucket_mb: Annotated[
        list[str],
        setting(
            parser=_bucket_size,
            help=f"For {BUCKETED}: the most gradients in one all-reduce, in 1e6 bytes; {WHOLE_BLOCKS}: whole blocks.",
        ),
    ] = [WHOLE_BLOCKS],
    world_size: WorldSizeOption = [],
    backend: BackendOption = "auto",
    gradient_dtype: Annotated[list[str], choice(PRECISIONS, f"Gradients are sent in {', '.join(PRECISIONS)}.")] = [
        "fp32"
    ],
    high_priority: HighPriorityOption = False,
    transport: Annotated[
        list[str], choice(TRANSPORTS, "What sends buckets: collectives, or the copy-engines of two GPUs.")
    ] = ["collectives"],
    model: options.SharedModelOptions = options.SharedModelOptions(),
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: options.StepsOptions = options.StepsOptions(warmup=[5], steps=10),
    rounds: Annotated[
        int, setting(help="Repeat all cells, every second time backwards.", min=1, rich_help_panel=MEASURING)
    ] = 1,
    run: options.RunOptions = options.RunOptions(),
    timeout: TimeoutOption = 120.0,
    check_layers: CheckLayersOption = None,
    plot: Annotated[Path | None, writes_file(help="Draw timelines of computing and communication.")] = None,
    plot_buckets: Annotated[Path | None, writes_file(help="Draw bucket sizes and their model.")] = None,
    plot_scaling: PlotScalingOption = None,
    trace: TraceOption = None,
    dry_run: Annotated[bool, setting("--dry-run", help="Print cells and memory of state alone.")] = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on several ranks, check the weights against one process, and time what communication costs the step.

    cs336sys ddp --size xl --world-size 2 --bf16 --bucket-mb 1,10,100,1000 --plot timelines.png

    cs336sys ddp --mode bucketed --bucket-mb 100

    torchrun --nnodes 2 --nproc-per-node 8 ... -m cs336sys ddp --size xl --batch-size 16
    """
    from cs336sys.report.ddp import ddp_plan, ddp_tables, plot_timelines, pool_ddp_rounds
    from cs336sys.report.ddp import plot_buckets as draw_buckets
    from cs336sys.report.scaling import plot_scaling as draw_scaling
    from cs336sys.report.scaling import scaling_tables

    workloads = options.expand_workloads(model, ["train"], precision, implementation, steps, run)
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
        for ranks, training, sent_in in product(choose_world_sizes(world_size), workloads, gradient_dtype)
        for strategy, bucket, sent_by in _strategies(mode, bucket_mb, transport)
    ]
    if is_first_rank():
        output.check(plot=plot, plot_buckets=plot_buckets, plot_scaling=plot_scaling)
        if plot_buckets is not None and all(workload.bucket_mb is None for workload in chosen):
            raise UsageError(f"--plot-buckets {plot_buckets}: {_ONLY_BUCKETED}")
        check_rank_outputs(plot_scaling, trace, chosen)
    if dry_run:
        show_plan(
            lambda _: ddp_plan(chosen),
            sweeping,
            output,
            run.device,
            across_ranks=True,
            plot=plot,
            plot_buckets=plot_buckets,
            plot_scaling=plot_scaling,
            trace=trace,
        )
        return
    tell_what_does_not_fit(chosen, run.device)
    measure = "cs336sys.experiments.parallel.measurement:measure_parallel_training"
    configurations = _in_rounds([workload.configuration() for workload in chosen], rounds)
    run_sweep("ddp", measure, configurations, sweeping, across_ranks=True).report(
        lambda cells, run: [*ddp_tables(cells, run), *scaling_tables(cells)],
        output,
        (plot, plot_timelines),
        (plot_buckets, draw_buckets),
        (plot_scaling, draw_scaling),
        pooled=pool_ddp_rounds,
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
    modes: Sequence[str], buckets: Sequence[float | str], transports: Sequence[str]
) -> list[tuple[str, float | str | None, str]]:
    """Modes with their bucket sizes and what sends them, where they have any."""
    if BUCKETED not in modes and transports != ["collectives"]:
        raise UsageError(f"--transport {','.join(transports)}: only mode bucketed has the choice; add it to --mode")
    if BUCKETED not in modes and buckets != [WHOLE_BLOCKS]:
        listed = ",".join(size if isinstance(size, str) else f"{size:g}" for size in buckets)
        raise UsageError(f"--bucket-mb {listed}: {_ONLY_BUCKETED}")
    return [
        (strategy, bucket, sent_by)
        for strategy in modes
        for bucket in (buckets if strategy == BUCKETED else [None])
        for sent_by in (transports if strategy == BUCKETED else ["collectives"])
    ]


_ONLY_BUCKETED = f"only mode {BUCKETED} has buckets of a size; add it to --mode"
