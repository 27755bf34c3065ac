"""``cs336sys flash``: our FlashAttention kernels against every implementation that the machine has."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336sys.command_line.options.operations import OPERATION_OPTIONS, OperationOptions
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, setting, writes_file
from cs336sys.command_line.options.training import DryRunOption, option_of, setting_options
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.machine.late_imports import why_no_triton
from cs336sys.run.sweep import run_sweep, show_plan
from cs336sys.settings.operations import IMPLEMENTATIONS, AttentionWorkload

# The shapes that the handouts ask for: every cell of flash_benchmarking, and the 2025 leaderboard's one.
GRIDS: dict[str, dict[str, list[Any]]] = {
    "course": {
        "batch_size": [1],
        "num_heads": [1],
        "context": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536],
        "head_dim": [16, 32, 64, 128],
        "dtype": ["bf16", "fp32"],
    },
    "board": {"batch_size": [1], "num_heads": [16], "context": [16384], "head_dim": [64], "dtype": ["bf16"]},
}


@setting_options(
    AttentionWorkload,
    *("implementation", "batch_size", "heads", "kv_heads", "head_dim", "context", "queries", "causal", "window"),
    *("grid", "rounds", "keep_settings", *OPERATION_OPTIONS),
)
class FlashOptions(OperationOptions):
    """Implementations, shapes, and how long each is timed."""

    implementation: Annotated[
        Sequence[str], choice(IMPLEMENTATIONS, f"Any of {', '.join(IMPLEMENTATIONS)}.", show_default="all")
    ] = IMPLEMENTATIONS
    head_dim: Annotated[
        Sequence[int], option_of(AttentionWorkload, "head_dim", help="Head dimensions, 1 to 256.", max=256)
    ] = (64,)
    context = (1024, 4096)
    grid: Annotated[str | None, choice(GRIDS, "Shapes of the handouts instead: course or board.")] = None
    rounds: Annotated[int, setting(help="Times to go through a shape's implementations, samples pooled.", min=1)] = 1
    keep_settings: Annotated[
        bool, writes_file("--keep-settings", help="First choose settings of triton's kernels by time, and keep them.")
    ] = False
    plot: Annotated[Path | None, writes_file(help="Draw TFLOP/s over the context.")] = None

    def configurations(self, ctx: typer.Context) -> list[dict[str, Any]]:
        """Return a cell for each shape, round and implementation.

        A round goes through all implementations of a shape, so that cells to compare are measured close to each other.
        A UsageError refuses ``--grid`` with a shape of the user's, shapes that no attention has, and
        ``--keep-settings`` of kernels that are not measured.
        """
        shapes: dict[str, Any] = {}
        if self.grid is not None:
            for option in (*GRIDS[self.grid], "causal", "queries"):  # --grid itself may override the settings file's.
                if _overrides_grid(ctx, option):
                    name = "--causal and --full" if option == "causal" else f"--{option.replace('_', '-')}"
                    raise UsageError(f"--grid {self.grid}: has shapes of its own; leave it out, or {name}")
            # Grids have the names of options, workloads those of fields.
            shapes = {name.replace("num_heads", "heads"): values for name, values in GRIDS[self.grid].items()}
            shapes |= {"causal": True, "queries": [None]}
        names = [*self.implementation, *self.kernel]
        additions: dict[str, dict[str, Any]] = dict(self.codes)  # To the cells of an implementation, by its name.
        if self.keep_settings:
            if "triton" not in names:
                raise UsageError("--keep-settings is about implementation triton: add it to --implementation")
            # First, so that a shape's other implementations are measured with the settings that it keeps.
            names.sort(key=lambda name: name != "triton")  # False sorts before True.
            additions["triton"] = {"keep_settings": True}
        # The outermost first. Shapes are made without an implementation: each round goes through all of these.
        order = "batch_size", "heads", "context", "queries", "head_dim", "dtype", "kv_heads", "window"
        rounds = [{"round": number} for number in range(1, self.rounds + 1)] if self.rounds > 1 else [{}]
        return [
            AttentionWorkload(**shape | {"implementation": name}).configuration() | this_round | additions.get(name, {})
            for shape in self.combinations(AttentionWorkload, *order, implementation=[None], **shapes)
            for this_round in rounds
            for name in names
        ]


# Where options are given, the later overrides: the settings file, variables, the command line.
_SOURCES = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")


def _overrides_grid(context: typer.Context, option: str) -> bool:
    """Return whether an option is given in the same place as ``--grid``, or in one that overrides that."""
    sources = [context.get_parameter_source(name) for name in (option, "grid")]
    rank, grid_rank = (0 if source is None else _SOURCES.index(source.name) for source in sources)
    return rank > 0 and rank >= grid_rank


def flash(
    ctx: typer.Context,
    attention: FlashOptions = FlashOptions(),
    dry_run: DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check attention implementations against float64, then time their forward and backward passes.

    cs336sys flash --grid board --baseline sdpa-flash

    cs336sys flash --context 1024,4096,16384 --head-dim 64,128 --implementation triton,sdpa-cudnn,flex --plot flash.png

    cs336sys flash --full --queries 1 --context 8192 --implementation auto,sdpa-cudnn --baseline sdpa-cudnn --rounds 5

    cs336sys flash --kernel mine.py:attention --implementation auto,sdpa-flash --baseline sdpa-flash

    cs336sys flash --num-heads 32 --kv-heads 8 --window 512,1024 --implementation auto,flex,fa4 --baseline flex

    cs336sys flash --batch-size 4 --context 512 --implementation triton,sdpa-flash --keep-settings
    """
    from cs336sys.commands.attention.tables import attention_plan, flash_tables, plot_flash, pool_flash_rounds

    baseline, plot = attention.checked_baseline, attention.plot
    output.check(plot=plot)
    configurations = attention.configurations(ctx)
    if dry_run:
        plan = partial(attention_plan, "flash", configurations)
        show_plan("flash", plan, sweeping, output, attention.device, plot=plot)
        return
    tables = partial(flash_tables, baseline=baseline)
    output.check_selection("flash", tables)
    measure = "measure:measure_flash"
    if attention.keep_settings:
        if why_no_triton() is not None:
            raise CapabilityError(f"--keep-settings needs {why_no_triton()}")
        measure = "keeping:measure_and_keep"
    run_sweep("flash", f"cs336sys.commands.attention.{measure}", configurations, sweeping).report(
        tables, output, (plot, plot_flash), pooled=pool_flash_rounds
    )
