"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import cs336sys.run.ranks as across_ranks
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.partition import read_mesh, strategy_of_mesh
from cs336sys.accounting.sharding.selective_checkpointing import choose_kept_blocks, kept_peak
from cs336sys.accounting.sharding.step import sharded_step
from cs336sys.command_line.faults import say
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, is_given, read_memory_limit, setting, writes_file
from cs336sys.errors import UsageError
from cs336sys.machine.system import gpu_capacity
from cs336sys.processes import is_first_rank
from cs336sys.run.sweep import refuse_what_does_not_fit, run_sweep, show_plan
from cs336sys.settings.parallel import (
    SHARD_STRATEGIES,
    STATE_SHARDING_STRATEGIES,
    ParallelWorkload,
    parse_block_checkpointing,
)
from cs336sys.settings.training import Workload
from cs336sys.tables.table import sentences

# The fastest options for a step that fills its GPUs, by strategy: of this project's parts, and of torch's alone.
_FASTEST: dict[str, dict[str, Any]] = {
    "fsdp": {"attention": ["flash"], "kernels": ["fused"], "optimizer": ["adamw"], "state_dtype": ["bf16"]},
    "torch-fsdp": {"attention": ["sdpa"], "compile": ["block"], "optimizer": ["fused"]},
}
_CHECKPOINTING = {"fsdp": "auto", "torch-fsdp": "keep=0"}

# The handout's benchmark repeats steps for 10 s of warm-up and then for 30 s: at 4.2 s a step 2 and 7.
_BOARD_STEPS = {"warmup": [2], "steps": 7}

# How much of a GPU's memory tensors may be predicted to fill: an H200 of 140.4 GiB had 5.5 left when they took 129.9.
_USABLE_SHARE = 0.925
# Where there is no GPU: of an H200.
_LIMIT_BYTES = 130 * GIB


@options.setting_options(
    ParallelWorkload, *("strategy", "prefetch", "keep_gathered", "checkpoint", "memory_limit", "board", "mesh")
)
class ShardStrategyOptions(options.OptionGroup):
    """Strategies, and what is chosen with them."""

    strategy: Annotated[
        Sequence[str],
        choice(
            SHARD_STRATEGIES,
            f"{', '.join(SHARD_STRATEGIES)}. Default: those that split no sequence and no layer.",
            show_default=False,
        ),
    ] = STATE_SHARDING_STRATEGIES
    checkpoint: Annotated[
        Sequence[str],
        choice(
            ("none", "block", "auto"),
            "none; block: inputs are kept; keep=N: of N blocks gate and up, too; auto: as many as fit.",
            parser=lambda text: parse_block_checkpointing(text, "auto"),
        ),
    ] = ("none",)
    memory_limit: Annotated[str | None, setting(help="Memory for --checkpoint auto: 130GiB. Default: by GPU.")] = None
    board: Annotated[bool, setting("--board", help="The leaderboard's step, by the fastest parts.")] = False


@options.setting_options(ParallelWorkload)
class ShardingOptions(across_ranks.ParallelTraining, ShardStrategyOptions):
    """Strategies on ranks, and what is drawn of them."""

    plot: Annotated[Path | None, writes_file(help="Draw a rank's memory at six moments.")] = None

    def workloads(
        self, trainings: Sequence[Workload], device: str, *, chooses_gathered: bool
    ) -> list[ParallelWorkload]:
        """Return a cell for each number of ranks, workload, checkpointing and strategy.

        Args:
            device: whose memory ``--checkpoint auto`` fills without ``--memory-limit``.
            chooses_gathered: as of :func:`choose_by_memory`.

        Raises:
            UsageError: settings do not go together.
        """
        limit_bytes = None if self.memory_limit is None else read_memory_limit(self.memory_limit)
        for training in trainings if self.board else ():  # Some steps --board cannot measure or check.
            if refusals := sentences(__name__, "board", workload=training):
                raise UsageError(refusals[0])
        if self.memory_limit is not None and "auto" not in self.checkpoint:
            raise UsageError(f"--memory-limit {self.memory_limit}: is for --checkpoint auto; add that, or leave it out")
        ranks_of_mesh = [] if self.mesh is None else [math.prod(read_mesh(self.mesh).values())]
        world_sizes = across_ranks.choose_world_sizes(self.world_size or ranks_of_mesh)
        chosen = []
        for cell in self.cells(trainings, world_sizes, "checkpointing", "strategy", "prefetch", "keep_gathered"):
            if cell["checkpointing"] == "auto":
                # A GPU is asked for its memory once, and only if something depends on it.
                limit_bytes = usable_bytes(device) if limit_bytes is None else limit_bytes
                workload = ParallelWorkload(**cell | {"checkpointing": "keep=0"})
                chosen.append(choose_by_memory(workload, limit_bytes, chooses_gathered=chooses_gathered))
            else:
                chosen.append(ParallelWorkload(**cell))
        return chosen


def _refuse_with_board(model: str | None, mesh: str | None, plot: Path | None) -> None:
    reasons = {  # False for an option that was not given.
        f"--model {model}": model is not None and "--board measures the leaderboard's model",
        f"--mesh {mesh}": mesh is not None and "--board's ranks have one dimension",
        f"--plot {plot}": plot is not None and "--board does not record a rank's memory at six moments",
    }
    for option, reason in reasons.items():
        if reason:
            raise UsageError(f"{option}: {reason}; leave one of them out")


def usable_bytes(device: str) -> float:
    """Return the bytes of the GPU of ``--device`` that tensors may be predicted to fill."""
    gpu = gpu_capacity(device)
    return _LIMIT_BYTES if gpu is None else _USABLE_SHARE * gpu.memory_gib * GIB


def choose_by_memory(workload: ParallelWorkload, limit_bytes: float, *, chooses_gathered: bool) -> ParallelWorkload:
    """Keep gate and up, SwiGLU's first two products, in as many blocks as a rank's predicted peak allows, and say so.

    Args:
        workload: with ``keep=0``.
        chooses_gathered: choose how many blocks stay gathered, too.

    Raises:
        UsageError: it does not fit even so, or what it needs is not known.
    """
    if not workload.has_own_block_backward:
        raise UsageError(*sentences(__name__, "not_automatic"))
    step = choose_kept_blocks(sharded_step(workload), limit_bytes, keeps_gathered=chooses_gathered)
    if is_first_rank():  # torchrun starts this command on every rank.
        facts = {"ranks": workload.world_size, "peak": kept_peak(step), "limit_gib": limit_bytes / GIB}
        say(*sentences(__name__, "chosen", step=step, **facts))
    return replace(workload, checkpointing=step.checkpointing, keep_gathered=step.keep_gathered)


def with_chosen_options(
    context: typer.Context, sharding: ShardingOptions, training: options.TrainingOptions
) -> tuple[ShardingOptions, options.TrainingOptions]:
    """Return the options, with those chosen that were not given on the command line.

    With ``--board`` (the leaderboard's step), the fastest of its strategy; with ``--mesh``, the mesh's strategy.

    Raises:
        UsageError: the text of ``--mesh`` is no mesh, or ``--board`` has other strategies than one of ``_FASTEST``.
    """
    gives_strategy = is_given(context, "strategy")
    if sharding.board:
        strategy = sharding.strategy if gives_strategy else ["fsdp"]
        if len(strategy) != 1 or strategy[0] not in _FASTEST:
            raise UsageError(
                f"--board --strategy {','.join(strategy)}: a board has one strategy, {' or '.join(_FASTEST)}"
            )
        checkpoint = sharding.checkpoint if is_given(context, "checkpoint") else [_CHECKPOINTING[strategy[0]]]
        sharding = replace(sharding, strategy=strategy, checkpoint=checkpoint)
        fastest = _FASTEST[strategy[0]] | _BOARD_STEPS  # With the handout's numbers of steps.
        training = replace(training, **{name: value for name, value in fastest.items() if not is_given(context, name)})
    if sharding.mesh is not None and not gives_strategy:
        sharding = replace(sharding, strategy=[strategy_of_mesh(sharding.mesh)])
    return sharding, training


def shard(
    ctx: typer.Context,
    sharding: ShardingOptions = ShardingOptions(),
    training: options.TrainingOptions = options.TrainingOptions(),
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
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
    from cs336sys.commands.rank_training.tables import plot_scaling, with_scaling
    from cs336sys.commands.shard.tables import plot_memory, shard_plan, sharding_tables

    if sharding.board:
        _refuse_with_board(training.model, sharding.mesh, sharding.plot)
    sharding, training = with_chosen_options(ctx, sharding, training)
    chooses_gathered = not is_given(ctx, "keep_gathered")
    chosen = sharding.workloads(training.workloads(), training.device, chooses_gathered=chooses_gathered)
    sharding.check(output, chosen)
    if dry_run:  # The plan compares nothing with the memory of the device, its argument.
        written = sharding.pictures | {"trace": sharding.trace}
        show_plan(
            "shard", lambda _: shard_plan(chosen), sweeping, output, training.device, across_ranks=True, **written
        )
        return
    if not sharding.board:
        refuse_what_does_not_fit(chosen, training.device, force=force, across_ranks=True)
    # The mark tells a board's cells in a file from those that shard measures of the same workload.
    function, mark = ("measure_board", {"board": True}) if sharding.board else ("measure_parallel_training", {})
    configurations = [workload.configuration() | mark for workload in chosen]
    measure = f"cs336sys.commands.rank_training.measure:{function}"
    tables = with_scaling(sharding_tables)
    output.check_selection("shard", tables)
    sweep = run_sweep("shard", measure, configurations, sweeping, across_ranks=True)
    # Pictures are in the order of --plot and --plot-scaling.
    drawn = zip(sharding.pictures.values(), (plot_memory, plot_scaling), strict=True)
    sweep.report(tables, output, *drawn)
