"""``cs336sys ddp``: data parallel training, its strategies, and how much of the communication each hides."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import cs336sys.commands.sweep.ranks as across_ranks
from cs336sys.accounting.sharding.partition import WHOLE_BLOCKS
from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import between, choice
from cs336sys.commands.sweep.run import in_rounds, run_sweep, show_plan, tell_what_does_not_fit
from cs336sys.errors import UsageError
from cs336sys.processes import is_first_rank
from cs336sys.settings import MEASURING
from cs336sys.sizes import PRECISIONS
from cs336sys.workload.parallel import BUCKETED, DATA_PARALLEL_STRATEGIES, TRANSPORTS, ParallelWorkload
from cs336sys.workload.training import Workload

_ONLY_BUCKETED = f"only mode {BUCKETED} has buckets of a size; add it to --mode"


@dataclass(frozen=True)
class StrategyOptions:
    """Strategies, and what they send gradients by."""

    mode: Annotated[
        Sequence[str],
        choice(DATA_PARALLEL_STRATEGIES, f"{', '.join(DATA_PARALLEL_STRATEGIES)} (torch's DistributedDataParallel)."),
    ] = DATA_PARALLEL_STRATEGIES
    bucket_mb: Annotated[
        Sequence[str],
        setting(
            parser=lambda text: text if text == WHOLE_BLOCKS else between(1e-6, 1e6)(text),
            help=f"For {BUCKETED}: the most gradients in one all-reduce, in 1e6 bytes; {WHOLE_BLOCKS}: whole blocks.",
        ),
    ] = (WHOLE_BLOCKS,)
    gradient_dtype: Annotated[Sequence[str], choice(PRECISIONS, f"Gradients are sent in {', '.join(PRECISIONS)}.")] = (
        "fp32",
    )
    transport: Annotated[
        Sequence[str], choice(TRANSPORTS, "What sends buckets: collectives, or the copy-engines of two GPUs.")
    ] = ("collectives",)

    def strategies(self) -> list[tuple[str, float | str | None, str]]:
        """Modes with their bucket sizes and what sends them, where they have any."""
        if BUCKETED not in self.mode and [*self.transport] != ["collectives"]:
            listed = ",".join(self.transport)
            raise UsageError(f"--transport {listed}: only mode bucketed has the choice; add it to --mode")
        if BUCKETED not in self.mode and [*self.bucket_mb] != [WHOLE_BLOCKS]:
            listed = ",".join(size if isinstance(size, str) else f"{size:g}" for size in self.bucket_mb)
            raise UsageError(f"--bucket-mb {listed}: {_ONLY_BUCKETED}")
        return [
            (strategy, bucket, sent_by)
            for strategy in self.mode
            for bucket in (self.bucket_mb if strategy == BUCKETED else [None])
            for sent_by in (self.transport if strategy == BUCKETED else ["collectives"])
        ]


@dataclass(frozen=True)
class DataParallelOptions(across_ranks.ParallelTraining, StrategyOptions):
    """Strategies on ranks, and what is drawn of them."""

    plot: Annotated[Path | None, writes_file(help="Draw timelines of computing and communication.")] = None
    plot_buckets: Annotated[Path | None, writes_file(help="Draw bucket sizes and their model.")] = None

    def cells(self, trainings: Sequence[Workload]) -> list[ParallelWorkload]:
        """A cell for each number of ranks, workload, dtype of gradients and strategy.

        Raises:
            UsageError: settings do not go together.
        """
        world_sizes = across_ranks.choose_world_sizes(self.world_size)
        return [
            ParallelWorkload(
                training, strategy, ranks, bucket_mb=bucket, gradient_dtype=sent_in, transport=sent_by, **self.settings
            )
            for ranks, training, sent_in in product(world_sizes, trainings, self.gradient_dtype)
            for strategy, bucket, sent_by in self.strategies()
        ]

    @property
    def pictures(self) -> dict[str, Path | None]:
        """Return the picture files by the names of their options."""
        return {"plot": self.plot, "plot_buckets": self.plot_buckets, "plot_scaling": self.plot_scaling}

    def check(self, output: OutputOptions, cells: Sequence[ParallelWorkload]) -> None:
        """Find out before anything is measured whether tables and pictures of the cells can be written.

        Raises:
            UsageError: one of them cannot.
        """
        output.check(**self.pictures)
        if self.plot_buckets is not None and all(workload.bucket_mb is None for workload in cells):
            raise UsageError(f"--plot-buckets {self.plot_buckets}: {_ONLY_BUCKETED}")
        self.check_rank_outputs(cells)


def ddp(
    data_parallel: DataParallelOptions = DataParallelOptions(),
    training: options.TrainingOptions = options.TrainingOptions(),
    rounds: Annotated[
        int, setting(help="Repeat all cells, every second time backwards.", min=1, rich_help_panel=MEASURING)
    ] = 1,
    dry_run: Annotated[bool, setting("--dry-run", help="Print cells and memory of state alone.")] = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on several ranks, check the weights against one process, and time what communication costs the step.

    cs336sys ddp --size xl --world-size 2 --bf16 --bucket-mb 1,10,100,1000 --plot timelines.png

    cs336sys ddp --mode bucketed --bucket-mb 100

    torchrun --nnodes 2 --nproc-per-node 8 ... -m cs336sys ddp --size xl --batch-size 16
    """
    from cs336sys.report.ddp import ddp_plan, ddp_tables, plot_buckets, plot_timelines, pool_ddp_rounds
    from cs336sys.report.scaling import plot_scaling, with_scaling

    chosen = data_parallel.cells(training.workloads())
    if is_first_rank():
        data_parallel.check(output, chosen)
    if dry_run:
        written = data_parallel.pictures | {"trace": data_parallel.trace}
        show_plan("ddp", lambda _: ddp_plan(chosen), sweeping, output, training.device, across_ranks=True, **written)
        return
    tell_what_does_not_fit(chosen, training.device)
    measure = "cs336sys.experiments.parallel.measurement:measure_parallel_training"
    configurations = [workload.configuration() for workload in chosen]
    if rounds > 1:
        configurations = in_rounds(configurations, rounds)
    tables = with_scaling(ddp_tables)
    output.check_selection("ddp", tables)
    sweep = run_sweep("ddp", measure, configurations, sweeping, across_ranks=True)
    drawn = zip(data_parallel.pictures.values(), (plot_timelines, plot_buckets, plot_scaling), strict=True)
    sweep.report(tables, output, *drawn, pooled=pool_ddp_rounds)
