"""``cs336sys kernels``: our fused kernels against other implementations, and against the rate of a copy."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

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
from cs336sys.workload import CLASSIFIER, DEVICES, KERNEL_IMPLEMENTATIONS, KERNELS, KernelWorkload

# What is measured unless it is said: a layer of an 8B model at 32k, and what Triton's interpreter computes in seconds.
DEFAULT_SHAPES = {"cuda": ("32768", "4096", "151936"), "cpu": ("32", "128", "97")}


def kernels(
    op: Annotated[
        list[str], typer.Option(help=f"Any of {', '.join(KERNELS)}.", show_default="all", autocompletion=among(KERNELS))
    ] = [",".join(KERNELS)],
    implementation: Annotated[
        list[str],
        typer.Option(
            help=f"Any of {', '.join(KERNEL_IMPLEMENTATIONS)}.",
            show_default="all",
            autocompletion=among(KERNEL_IMPLEMENTATIONS),
        ),
    ] = [",".join(KERNEL_IMPLEMENTATIONS)],
    tokens: Annotated[
        list[str] | None, typer.Option(help="Numbers of rows.", show_default="32768, on a CPU 32")
    ] = None,
    width: Annotated[
        list[str] | None, typer.Option(help="Lengths of a row.", show_default="4096, on a CPU 128")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Of the heads that rope rotates.", min=2)] = 64,
    vocab_size: Annotated[
        list[str] | None,
        typer.Option(help="Vocabularies of linear-cross-entropy.", show_default="151936, on a CPU 97"),
    ] = None,
    dtype: Annotated[list[str], typer.Option(help=f"{', '.join(PRECISIONS)}.", autocompletion=among(PRECISIONS))] = [
        "bf16"
    ],
    baseline: BaselineOption = None,
    warmup_ms: Annotated[float, typer.Option(help="Warm-up of each measurement.", min=0)] = 25.0,
    repetition_ms: Annotated[float, typer.Option(help="Duration of each measurement.", min=1)] = 100.0,
    plot: Annotated[Path | None, typer.Option(help="Draw shares of the copy rate.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check fused kernels against float64, then time forward and backward passes and set them against a copy.

    cs336sys kernels --op rms-norm,swiglu --tokens 32768 --width 4096 --plot kernels.png
    """
    from cs336sys.measure.device import choose_device
    from cs336sys.report.kernels import kernel_tables, plot_kernels
    from cs336sys.report.outputs import check_plot

    ops = split_list(op, "--op", one_of(KERNELS))
    chosen = split_list(implementation, "--implementation", one_of(KERNEL_IMPLEMENTATIONS))
    dtypes = split_list(dtype, "--dtype", one_of(PRECISIONS))
    over = check_baseline(baseline, chosen, "eager")
    check_choice(device, "--device", DEVICES)
    output.check()
    check_plot(plot)
    default_tokens, default_width, default_vocab_size = DEFAULT_SHAPES[choose_device(device).type]
    token_counts = split_list(tokens or [default_tokens], "--tokens", at_least(1))
    widths = split_list(width or [default_width], "--width", at_least(1))
    vocab_sizes = split_list(vocab_size or [default_vocab_size], "--vocab-size", at_least(2))
    for option, is_chosen, name in (
        (f"--head-dim {head_dim}", head_dim != 64, "rope"),
        (f"--vocab-size {','.join(vocab_size or ())}", bool(vocab_size), CLASSIFIER),
    ):
        if is_chosen and name not in ops:
            raise UsageError(f"{option}: is of {name}; add that to --op, or leave it out")
    configurations = [
        KernelWorkload(
            name,
            competitor,
            count,
            length,
            precision,
            head_dim if name == "rope" else None,
            vocabulary,
            device,
            seed,
            warmup_ms,
            repetition_ms,
        ).configuration()
        for name, count, length, precision in product(ops, token_counts, widths, dtypes)
        for vocabulary in (vocab_sizes if name == CLASSIFIER else [None])
        for competitor in chosen
        if competitor in KERNELS[name]
    ]
    if not configurations:
        raise UsageError(f"--implementation {','.join(chosen)}: --op {','.join(ops)} has none of them")
    sweep = run_sweep(
        "kernels",
        "cs336sys.experiments.kernels.measurement:measure_kernel",
        configurations,
        sweeping,
    )
    sweep.report(
        lambda: kernel_tables(sweep.cells, sweep.run, over),
        output,
        pictures=[] if plot is None else [lambda: plot_kernels(sweep.cells, plot)],
    )
