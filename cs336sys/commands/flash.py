"""``cs336sys flash``: our FlashAttention kernels against every implementation that the machine has."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.options.board import goes_before
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import (
    BaselineOption,
    among,
    at_least,
    check_baseline,
    check_choice,
    one_of,
    split_list,
)
from cs336sys.commands.options.training import DeviceOption, SeedOption
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import DEVICES, IMPLEMENTATIONS, AttentionWorkload

# The shapes that the handouts ask for: every cell of flash_benchmarking, and the 2025 leaderboard's one.
GRIDS = {
    "course": {
        "batch_size": ["1"],
        "num_heads": ["1"],
        "context": ["128,256,512,1024,2048,4096,8192,16384,32768,65536"],
        "head_dim": ["16,32,64,128"],
        "dtype": ["bf16,fp32"],
    },
    "board": {"batch_size": ["1"], "num_heads": ["16"], "context": ["16384"], "head_dim": ["64"], "dtype": ["bf16"]},
}


def flash(
    ctx: typer.Context,
    implementation: Annotated[
        list[str],
        typer.Option(
            help=f"Any of {', '.join(IMPLEMENTATIONS)}.", show_default="all", autocompletion=among(IMPLEMENTATIONS)
        ),
    ] = [",".join(IMPLEMENTATIONS)],
    batch_size: Annotated[list[str], typer.Option(help="Batch sizes.")] = ["1"],
    num_heads: Annotated[list[str], typer.Option(help="Numbers of heads.")] = ["16"],
    kv_heads: Annotated[
        list[str] | None, typer.Option(help="Heads of keys and values, divisors of --num-heads.", show_default="all")
    ] = None,
    head_dim: Annotated[list[str], typer.Option(help="Head dimensions, 1 to 256.")] = ["64"],
    context: Annotated[list[str], typer.Option(help="Sequence lengths.")] = ["1024,4096"],
    dtype: Annotated[list[str], typer.Option(help=f"{', '.join(PRECISIONS)}.", autocompletion=among(PRECISIONS))] = [
        "bf16"
    ],
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask what follows a query, or nothing.")] = True,
    window: Annotated[
        list[str] | None, typer.Option(help="Keys that a query sees, its own the last of them.", show_default="all")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Shapes of the handouts instead: course or board.", show_default=False, autocompletion=among(GRIDS)
        ),
    ] = None,
    baseline: BaselineOption = None,
    warmup_ms: Annotated[float, typer.Option(help="Warm-up of each measurement.", min=0)] = 25.0,
    repetition_ms: Annotated[float, typer.Option(help="Duration of each measurement.", min=1)] = 100.0,
    rounds: Annotated[
        int, typer.Option(help="Times to go through a shape's implementations, samples pooled.", min=1)
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw TFLOP/s over the context.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check attention implementations against float64, then time their forward and backward passes.

    cs336sys flash --grid board --baseline sdpa-flash

    cs336sys flash --context 1024,4096,16384 --head-dim 64,128 --implementation triton,sdpa-cudnn,flex --plot flash.png

    cs336sys flash --context 512 --implementation triton,sdpa-cudnn --baseline sdpa-cudnn --rounds 5

    cs336sys flash --num-heads 32 --kv-heads 8 --window 512,1024 --implementation auto,flex,fa4 --baseline flex
    """
    from cs336sys.report.attention import flash_tables, plot_flash, pool_flash_rounds
    from cs336sys.report.outputs import check_plot

    shapes = {
        "batch_size": batch_size,
        "num_heads": num_heads,
        "context": context,
        "head_dim": head_dim,
        "dtype": dtype,
    }
    if grid is not None:
        chosen_grid = GRIDS[check_choice(grid, "--grid", tuple(GRIDS))]
        for option in (*chosen_grid, "causal"):
            if goes_before(ctx, option, "grid"):
                name = "--causal and --full" if option == "causal" else f"--{option.replace('_', '-')}"
                raise UsageError(f"--grid {grid}: has shapes of its own; leave it out, or {name}")
        shapes = chosen_grid
        causal = True
    chosen = split_list(implementation, "--implementation", one_of(IMPLEMENTATIONS))
    over = check_baseline(baseline, chosen, "eager")
    batch_sizes, head_counts, contexts, head_dims = (
        split_list(shapes[name], f"--{name.replace('_', '-')}", at_least(1))
        for name in ("batch_size", "num_heads", "context", "head_dim")
    )
    dtypes = split_list(shapes["dtype"], "--dtype", one_of(PRECISIONS))
    key_head_counts = split_list(kv_heads, "--kv-heads", at_least(1)) if kv_heads else [None]
    windows = split_list(window, "--window", at_least(1)) if window else [None]
    if max(head_dims) > 256:
        raise UsageError(f"--head-dim {max(head_dims)}: must be at most 256")
    check_choice(device, "--device", DEVICES)
    output.check()
    check_plot(plot)
    # A round goes through all implementations of a shape, so that what is compared is measured side by side.
    numbers: list[dict[str, int]] = [{"round": number} for number in range(1, rounds + 1)] if rounds > 1 else [{}]
    configurations = [
        AttentionWorkload(name, *shape, causal, device, seed, warmup_ms, repetition_ms, *mask).configuration() | number
        for shape in product(batch_sizes, head_counts, contexts, head_dims, dtypes)
        for mask in product(key_head_counts, windows)
        for number in numbers
        for name in chosen
    ]
    sweep = run_sweep(
        "flash",
        "cs336sys.experiments.attention.measurement:measure_flash",
        configurations,
        sweeping,
    )
    cells = pool_flash_rounds(sweep.cells)
    sweep.report(
        lambda: flash_tables(cells, sweep.run, over),
        output,
        pictures=[] if plot is None else [lambda: plot_flash(cells, plot)],
    )
