"""``cs336sys kernels``: our fused kernels against other implementations, and against the rate of a copy."""

from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import BaselineOption, KernelOption, check_baseline, choice
from cs336sys.commands.options.training import DeviceOption, SeedOption
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS
from cs336sys.user_code import digest
from cs336sys.workload import CLASSIFIER, KERNEL_IMPLEMENTATIONS, KERNELS, KernelWorkload

# What is measured unless it is said: a layer of an 8B model at 32k, and what Triton's interpreter computes in seconds.
DEFAULT_SHAPES = {"cuda": (32768, 4096, 151936), "cpu": (32, 128, 97)}


def kernels(
    op: Annotated[list[str], choice(KERNELS, f"Any of {', '.join(KERNELS)}.", show_default="all")] = list(KERNELS),
    implementation: Annotated[
        list[str], choice(KERNEL_IMPLEMENTATIONS, f"Any of {', '.join(KERNEL_IMPLEMENTATIONS)}.", show_default="all")
    ] = list(KERNEL_IMPLEMENTATIONS),
    kernel: KernelOption = None,
    tokens: Annotated[
        list[int] | None, setting(help="Numbers of rows.", show_default="32768, on a CPU 32", min=1)
    ] = None,
    width: Annotated[
        list[int] | None, setting(help="Lengths of a row.", show_default="4096, on a CPU 128", min=1)
    ] = None,
    head_dim: Annotated[int, setting(help="Of the heads that rope rotates.", min=2)] = 64,
    vocab_size: Annotated[
        list[int] | None,
        setting(help="Vocabularies of linear-cross-entropy.", show_default="151936, on a CPU 97", min=2),
    ] = None,
    dtype: Annotated[list[str], choice(PRECISIONS)] = ["bf16"],
    baseline: BaselineOption = None,
    warmup_ms: Annotated[float, setting(help="Warm-up of each measurement.", min=0)] = 25.0,
    repetition_ms: Annotated[float, setting(help="Duration of each measurement.", min=1)] = 100.0,
    plot: Annotated[Path | None, writes_file(help="Draw shares of the copy rate.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check fused kernels against float64, then time forward and backward passes and set them against a copy.

    cs336sys kernels --op rms-norm,swiglu --tokens 32768 --width 4096 --plot kernels.png

    cs336sys kernels --op rms-norm --kernel mine.py:rms_norm --baseline mine.py:rms_norm
    """
    from cs336sys.measure.device import choose_device
    from cs336sys.report.kernels import kernel_tables, plot_kernels

    if kernel and (len(op) > 1 or op == ["adamw"]):
        raise UsageError(f"--kernel {kernel[0]}: stands beside one op, a function; name it by --op, and not adamw")
    codes = {reference: {"code": digest([reference])} for reference in kernel or ()}
    names = [*implementation, *codes]
    over = check_baseline(baseline, names)
    output.check(plot=plot)
    default_tokens, default_width, default_vocab_size = DEFAULT_SHAPES[choose_device(device).type]
    for option, is_chosen, name in (
        (f"--head-dim {head_dim}", head_dim != 64, "rope"),
        (f"--vocab-size {','.join(map(str, vocab_size or ()))}", bool(vocab_size), CLASSIFIER),
    ):
        if is_chosen and name not in op:
            raise UsageError(f"{option} only affects {name}: add {name} to --op, or leave it out")
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
        | codes.get(competitor, {})
        for name, count, length, precision in product(op, tokens or [default_tokens], width or [default_width], dtype)
        for vocabulary in (vocab_size or [default_vocab_size] if name == CLASSIFIER else [None])
        for competitor in names
        if competitor in (*KERNELS[name], *codes)
    ]
    if not configurations:
        raise UsageError(f"--implementation {','.join(implementation)}: --op {','.join(op)} has none of them")
    measure = f"cs336sys.experiments.kernels.measurement:measure_{'own_kernel' if kernel else 'kernel'}"
    run_sweep("kernels", measure, configurations, sweeping).report(
        lambda cells, run: kernel_tables(cells, run, over), output, (plot, plot_kernels)
    )
