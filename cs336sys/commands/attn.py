"""``cs336sys attn``: time and memory of plain PyTorch attention."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import among, at_least, check_choice, one_of, split_list
from cs336sys.commands.options.training import DeviceOption, SeedOption
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import DEVICES, AttentionWorkload

PLAIN_ATTENTION = ("eager", "compiled", "model")


def attn(
    implementation: Annotated[
        list[str], typer.Option(help=f"{', '.join(PLAIN_ATTENTION)}.", autocompletion=among(PLAIN_ATTENTION))
    ] = ["eager,compiled"],
    batch_size: Annotated[int, typer.Option(help="Batch size; there is one head.", min=1)] = 8,
    head_dim: Annotated[list[str], typer.Option("--head-dim", help="Head dimensions.")] = ["16,32,64,128"],
    context: Annotated[list[str], typer.Option(help="Sequence lengths.")] = ["256,1024,4096,8192,16384"],
    dtype: Annotated[list[str], typer.Option(help=f"{', '.join(PRECISIONS)}.", autocompletion=among(PRECISIONS))] = [
        "fp32"
    ],
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask what follows a query, or nothing.")] = False,
    warmup: Annotated[int, typer.Option(help="Warm-up passes.", min=0)] = 10,
    steps: Annotated[int, typer.Option(help="Measured passes, forward and backward each.", min=1)] = 100,
    plot: Annotated[Path | None, typer.Option(help="Draw time and memory over the context.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Time plain PyTorch attention and the memory that it holds for the backward pass, eager and compiled.

    cs336sys attn --context 256,1024,4096,8192,16384 --head-dim 16,32,64,128
    """
    from cs336sys.report.attention import attn_tables, plot_attn
    from cs336sys.report.outputs import check_plot

    axes = (
        split_list(context, "--context", at_least(1)),
        split_list(head_dim, "--head-dim", at_least(1)),
        split_list(dtype, "--dtype", one_of(PRECISIONS)),
        split_list(implementation, "--implementation", one_of(PLAIN_ATTENTION)),
    )
    check_choice(device, "--device", DEVICES)
    output.check()
    check_plot(plot)
    configurations = [
        AttentionWorkload(name, batch_size, 1, tokens, dimension, chosen_dtype, causal, device, seed).configuration()
        | {"warmup": warmup, "steps": steps}
        for tokens, dimension, chosen_dtype, name in product(*axes)
    ]
    sweep = run_sweep(
        "attn",
        "cs336sys.experiments.attention.measurement:measure_attn",
        configurations,
        sweeping,
    )
    sweep.report(
        lambda: attn_tables(sweep.cells, sweep.run),
        output,
        pictures=[] if plot is None else [lambda: plot_attn(sweep.cells, plot)],
    )
