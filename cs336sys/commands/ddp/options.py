"""``cs336sys ddp``: data parallel training, its strategies, and how much of the communication each hides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import cs336sys.run.ranks as across_ranks
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, setting, writes_file
from cs336sys.run.sweep import in_rounds, refuse_what_does_not_fit, run_sweep, show_plan
from cs336sys.settings.fields import MEASURING
from cs336sys.settings.parallel import DATA_PARALLEL_STRATEGIES, ParallelWorkload
from cs336sys.settings.training import Workload


@options.setting_options(ParallelWorkload, "mode", "bucket_mb", "gradient_dtype", "transport")
class StrategyOptions(options.OptionGroup):
    """Strategies, and what they send gradients by."""

    mode: Annotated[
        Sequence[str],
        choice(DATA_PARALLEL_STRATEGIES, f"{', '.join(DATA_PARALLEL_STRATEGIES)} (torch's DistributedDataParallel)."),
    ] = DATA_PARALLEL_STRATEGIES


@options.setting_options(ParallelWorkload)
class DataParallelOptions(across_ranks.ParallelTraining, StrategyOptions):
    """Strategies on ranks, and what is drawn of them."""

    plot: Annotated[Path | None, writes_file(help="Draw timelines of computing and communication.")] = None
    plot_buckets: Annotated[Path | None, writes_file(help="Draw bucket sizes and their model.")] = None

    def workloads(self, trainings: Sequence[Workload]) -> list[ParallelWorkload]:
        """Return a cell for each number of ranks, workload, dtype of gradients and strategy.

        Raises:
            UsageError: settings do not go together.
        """
        world_sizes = across_ranks.choose_world_sizes(self.world_size)
        order = "gradient_dtype", "strategy", "bucket_mb", "transport"
        return [ParallelWorkload(**cell) for cell in self.cells(trainings, world_sizes, *order, strategy=self.mode)]


def ddp(
    data_parallel: DataParallelOptions = DataParallelOptions(),
    training: options.TrainingOptions = options.TrainingOptions(),
    rounds: Annotated[
        int, setting(help="Repeat all cells this many times, in turns backwards.", min=1, rich_help_panel=MEASURING)
    ] = 1,
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on several ranks, check the weights against one process, and time what communication costs the step.

    cs336sys ddp --size xl --world-size 2 --bf16 --bucket-mb 1,10,100,1000 --plot timelines.png

    cs336sys ddp --mode bucketed --bucket-mb 100

    torchrun --nnodes 2 --nproc-per-node 8 ... -m cs336sys ddp --size xl --batch-size 16
    """
    from cs336sys.commands.ddp.tables import ddp_plan, ddp_tables, plot_buckets, pool_ddp_rounds
    from cs336sys.commands.rank_training.tables import plot_scaling, plot_timelines, with_scaling

    chosen = data_parallel.workloads(training.workloads())
    data_parallel.check(output, chosen)
    if dry_run:  # The plan compares nothing with the memory of the device, its argument.
        written = data_parallel.pictures | {"trace": data_parallel.trace}
        show_plan("ddp", lambda _: ddp_plan(chosen), sweeping, output, training.device, across_ranks=True, **written)
        return
    refuse_what_does_not_fit(chosen, training.device, force=force, across_ranks=True)
    measure = "cs336sys.commands.rank_training.measure:measure_parallel_training"
    configurations = [workload.configuration() for workload in chosen]
    if rounds > 1:
        configurations = in_rounds(configurations, rounds)
    tables = with_scaling(ddp_tables)
    output.check_selection("ddp", tables)
    sweep = run_sweep("ddp", measure, configurations, sweeping, across_ranks=True)
    # Pictures are in the order of --plot, --plot-buckets and --plot-scaling.
    drawn = zip(data_parallel.pictures.values(), (plot_timelines, plot_buckets, plot_scaling), strict=True)
    sweep.report(tables, output, *drawn, pooled=pool_ddp_rounds)
