"""``cs336sys shard``: who holds which part of the training state, what memory that saves, and what it costs a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

import cs336sys.commands.sweep.ranks as across_ranks
from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.partition import mesh_ranks, read_mesh, strategy_of_mesh
from cs336sys.accounting.sharding.selective_checkpointing import choose_kept_blocks, kept_peak, kept_step
from cs336sys.commands.faults import say
from cs336sys.commands.options import training as options
from cs336sys.commands.options.bytes import read_memory_limit
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import choice, is_given
from cs336sys.commands.sweep.run import run_sweep, show_plan, tell_what_does_not_fit
from cs336sys.errors import UsageError, choose_from
from cs336sys.measure.system import gpu_capacity
from cs336sys.processes import is_first_rank
from cs336sys.strategies import STRATEGIES
from cs336sys.workload.parallel import (
    BLOCK_CHECKPOINTING,
    CONTEXT_STRATEGIES,
    SHARD_STRATEGIES,
    SHARDING_STRATEGIES,
    TENSOR_STRATEGIES,
    ParallelWorkload,
)
from cs336sys.workload.training import Workload

# What is fastest for a step that fills its GPUs, by strategy and option: of this project's parts, and of torch's alone.
_IMPLEMENTATION: dict[str, dict[str, Any]] = {
    "fsdp": {"attention": ["flash"], "kernels": ["fused"], "optimizer": ["adamw"], "state_dtype": ["bf16"]},
    "torch-fsdp": {"attention": ["sdpa"], "compile": ["block"], "optimizer": ["fused"]},
}
_CHECKPOINTING = {"fsdp": "auto", "torch-fsdp": "keep=0"}

# The handout's benchmark repeats steps for 10 s of warm-up and then for 30 s: at 4.2 s a step 2 and 7.
_BOARD_STEPS = {"warmup": [2], "steps": 7}

# How much of a GPU's memory tensors may be predicted to fill: an H200 of 140.4 GiB had 5.5 left when they took 129.9.
_FILLED = 0.925
# Where there is no GPU: of an H200.
_LIMIT_BYTES = 130 * GIB


def _read_checkpointing(text: str) -> str:
    if text != "auto" and kept_blocks(text) is None and text not in BLOCK_CHECKPOINTING:
        raise UsageError(choose_from(text, (*BLOCK_CHECKPOINTING, "keep=N", "auto")))
    return text


@dataclass(frozen=True)
class ShardingOptions:
    """Strategies, and what is chosen with them."""

    strategy: Annotated[
        Sequence[str],
        choice(
            SHARD_STRATEGIES,
            f"{', '.join(SHARD_STRATEGIES)}. Default: those that split no sequence and no layer.",
            show_default=False,
        ),
    ] = SHARDING_STRATEGIES
    prefetch: Annotated[Sequence[int], setting(help="For fsdp: blocks gathered ahead of use.", min=0)] = (1,)
    keep_gathered: Annotated[
        Sequence[int],
        setting(help="For fsdp: last blocks that stay gathered. --checkpoint auto: as many as fit.", min=0),
    ] = (0,)
    checkpoint: Annotated[
        Sequence[str],
        choice(
            (*BLOCK_CHECKPOINTING, "auto"),
            "none; block: inputs are kept; keep=N: of N blocks gate and up, too; auto: as many as fit.",
            parser=_read_checkpointing,
        ),
    ] = ("none",)
    memory_limit: Annotated[str | None, setting(help="130GiB, for --checkpoint auto. Default: by GPU.")] = None
    board: Annotated[bool, setting("--board", help="The leaderboard's step, by the fastest parts.")] = False
    mesh: Annotated[str | None, setting(help="Ranks in two dimensions: fsdp=2,tp=2; cp: sequences.")] = None

    def cells(
        self,
        trainings: Sequence[Workload],
        world_sizes: Sequence[int],
        device: str,
        *,
        keeps_gathered: bool,
        tells: bool,
        **settings: Any,
    ) -> list[ParallelWorkload]:
        """A cell for each number of ranks, workload, checkpointing and strategy.

        Args:
            device: whose memory ``--checkpoint auto`` fills without ``--memory-limit``.
            keeps_gathered, tells: as of :func:`chosen_by_memory`.
            settings: of every cell.

        Raises:
            UsageError: settings do not go together.
        """
        limit_bytes = None if self.memory_limit is None else read_memory_limit(self.memory_limit)
        if self.board:
            for training in trainings:
                _require_for_board(training)
        self._refuse_what_nothing_uses()
        # Beside strategies that have a mesh, others may be measured on as many ranks.
        grouped = {*self.strategy} & {*TENSOR_STRATEGIES, *CONTEXT_STRATEGIES}
        chosen = []
        for ranks, training, checkpointing, (name, ahead, staying) in product(
            world_sizes, trainings, self.checkpoint, self._strategies()
        ):
            workload = ParallelWorkload(
                training,
                name,
                ranks,
                prefetch=ahead,
                keep_gathered=staying,
                checkpointing="keep=0" if checkpointing == "auto" else checkpointing,
                mesh=self.mesh if name in grouped or not grouped else None,
                **settings,
            )
            if checkpointing == "auto":
                room_bytes = room_for_tensors(device) if limit_bytes is None else limit_bytes
                workload = chosen_by_memory(workload, room_bytes, keeps_gathered=keeps_gathered, tells=tells)
            chosen.append(workload)
        return chosen

    def _refuse_what_nothing_uses(self) -> None:
        """Raise a UsageError for an option that none of the strategies, or no checkpointing, looks at."""
        strategies = self._strategies()
        if [*self.prefetch] != [1] and all(ahead is None for _, ahead, _ in strategies):
            listed = ",".join(map(str, self.prefetch))
            raise UsageError(f"--prefetch {listed}: only strategies with fsdp gather ahead; add one to --strategy")
        if [*self.keep_gathered] != [0] and not any(STRATEGIES[name].keeps_gathered for name in self.strategy):
            listed = ",".join(map(str, self.keep_gathered))
            raise UsageError(f"--keep-gathered {listed}: only fsdp keeps weights; add it to --strategy")
        if self.memory_limit is not None and "auto" not in self.checkpoint:
            raise UsageError(f"--memory-limit {self.memory_limit}: is for --checkpoint auto; add that, or leave it out")

    def _strategies(self) -> list[tuple[str, int | None, int]]:
        """Strategies with how far they gather ahead and what stays gathered; only ``fsdp`` lets that be chosen."""
        return [
            (name, units, blocks)
            for name in self.strategy
            for units in (self.prefetch if STRATEGIES[name].gathers_ahead else [None])
            for blocks in (self.keep_gathered if STRATEGIES[name].keeps_gathered else [0])
        ]


def _chosen_for_board(
    context: typer.Context, sharding: ShardingOptions, training: options.TrainingOptions
) -> tuple[ShardingOptions, options.TrainingOptions]:
    """The options of a board's cell: what was not asked for is what is fastest."""
    strategy = sharding.strategy if is_given(context, "strategy") else ["fsdp"]
    if len(strategy) != 1 or strategy[0] not in _IMPLEMENTATION:
        raise UsageError(
            f"--board --strategy {','.join(strategy)}: a board has one strategy, {' or '.join(_IMPLEMENTATION)}"
        )
    fastest = _IMPLEMENTATION[strategy[0]] | _BOARD_STEPS
    checkpoint = sharding.checkpoint if is_given(context, "checkpoint") else [_CHECKPOINTING[strategy[0]]]
    return (
        replace(sharding, strategy=strategy, checkpoint=checkpoint),
        replace(training, **{name: value for name, value in fastest.items() if not is_given(context, name)}),
    )


def _refuse_beside_board(model: str | None, mesh: str | None, plot: Path | None) -> None:
    """Refuse options of ``shard`` that mean nothing with ``--board``."""
    reasons = {
        f"--model {model}": model is not None and "--board measures the leaderboard's model",
        f"--mesh {mesh}": mesh is not None and "--board's ranks have one dimension",
        f"--plot {plot}": plot is not None and "--board does not record a rank's memory at six moments",
    }
    for option, reason in reasons.items():
        if reason:
            raise UsageError(f"{option}: {reason}; leave one of them out")


def _require_for_board(workload: Workload) -> None:
    """Refuse a step that ``--board`` cannot measure or check."""
    if workload.cuda_graph == "on":
        raise UsageError(
            "--cuda-graph on: --board launches its step, whose kernels take longer than launches; choose off"
        )
    if workload.scales_loss:
        raise UsageError(
            "--precision fp16: --board checks gradients of fp32 and bf16, which are not scaled; choose one"
        )


def room_for_tensors(device: str) -> float:
    """Bytes of the GPU of ``--device`` that tensors may be predicted to fill."""
    gpu = gpu_capacity(device)
    return _LIMIT_BYTES if gpu is None else _FILLED * gpu.memory_gib * GIB


def chosen_by_memory(
    workload: ParallelWorkload, limit_bytes: float, *, keeps_gathered: bool, tells: bool
) -> ParallelWorkload:
    """The workload with gate and up kept in as many blocks as the predicted peak of a rank allows, and then weights.

    Args:
        workload: with ``keep=0``.
        keeps_gathered: choose how many blocks stay gathered, too.
        tells: say on standard error what was chosen.

    Raises:
        UsageError: it does not fit even so, or what it needs is not known.
    """
    if not workload.writes_out_blocks:
        raise UsageError(
            "--checkpoint auto only supports --strategy fsdp with --kernels fused and --compile off: choose these, "
            "or keep=N"
        )
    step = choose_kept_blocks(kept_step(workload), limit_bytes, keeps_gathered=keeps_gathered)
    if tells:
        peak = kept_peak(step)
        say(
            f"--checkpoint auto, {workload.world_size} ranks: gate and up are kept in {step.blocks} of "
            f"{step.size.num_layers} blocks, and weights of {step.keep_gathered} stay gathered; "
            f"predicted peak {peak.total_gib:.1f} GiB ({peak.moment}) of {limit_bytes / GIB:.4g} GiB"
        )
    return replace(workload, checkpointing=f"keep={step.blocks}", keep_gathered=step.keep_gathered)


def completed(
    context: typer.Context, sharding: ShardingOptions, training: options.TrainingOptions
) -> tuple[ShardingOptions, options.TrainingOptions]:
    """The options with what a board or a mesh chooses where nothing was asked for.

    Raises:
        UsageError: the mesh or the strategy of a board is none.
    """
    if sharding.board:
        sharding, training = _chosen_for_board(context, sharding, training)
    if sharding.mesh is not None and not is_given(context, "strategy"):
        sharding = replace(sharding, strategy=[strategy_of_mesh(sharding.mesh)])
    return sharding, training


@dataclass(frozen=True)
class ShardedRanksOptions(across_ranks.ParallelTraining):
    """The ranks, and what is checked, kept and drawn of them."""

    plot: Annotated[Path | None, writes_file(help="Draw a rank's memory at six moments.")] = None

    def check(self, output: OutputOptions, cells: Sequence[ParallelWorkload]) -> dict[str, Path | None]:
        """Return the pictures by their options; errors of the first rank if anything cannot be written."""
        pictures = {"plot": self.plot, "plot_scaling": self.plot_scaling}
        if is_first_rank():
            output.check(**pictures)
            self.check_rank_outputs(cells)
        return pictures


def shard(
    ctx: typer.Context,
    sharding: ShardingOptions = ShardingOptions(),
    ranks: ShardedRanksOptions = ShardedRanksOptions(),
    training: options.TrainingOptions = options.TrainingOptions(),
    dry_run: Annotated[bool, setting("--dry-run", help="Print cells and predicted memory alone.")] = False,
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
    from cs336sys.report.scaling import plot_scaling, with_scaling
    from cs336sys.report.shard import plot_memory, shard_plan

    if sharding.board:
        _refuse_beside_board(training.model, sharding.mesh, ranks.plot)
    sharding, training = completed(ctx, sharding, training)
    ranks_of_mesh = [] if sharding.mesh is None else [mesh_ranks(read_mesh(sharding.mesh))]
    chosen = sharding.cells(
        training.workloads(),
        across_ranks.choose_world_sizes(ranks.world_size or ranks_of_mesh),
        training.device,
        keeps_gathered=not is_given(ctx, "keep_gathered"),
        tells=is_first_rank(),
        **ranks.settings,
    )
    pictures = ranks.check(output, chosen)
    if dry_run:
        written = pictures | {"trace": ranks.trace}
        show_plan(
            "shard", lambda _: shard_plan(chosen), sweeping, output, training.device, across_ranks=True, **written
        )
        return
    if not sharding.board:
        tell_what_does_not_fit(chosen, training.device)
    # Cells of a board are others than those that shard measures of the same workload.
    measure, mark = ("measure_board", {"board": True}) if sharding.board else ("measure_parallel_training", {})
    configurations = [workload.configuration() | mark for workload in chosen]
    measure = f"cs336sys.experiments.parallel.measurement:{measure}"
    tables = with_scaling(sharding_tables)
    output.check_selection("shard", tables)
    run_sweep("shard", measure, configurations, sweeping, across_ranks=True).report(
        tables, output, *zip(pictures.values(), (plot_memory, plot_scaling), strict=True)
    )
