"""``cs336sys kernels``: our fused kernels against other implementations, and against the rate of a copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.operations import OperationOptions
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import choice
from cs336sys.commands.options.training import DeviceOption, SeedOption
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.errors import UsageError
from cs336sys.workload.operations import KERNEL_IMPLEMENTATIONS, KERNELS, KernelWorkload

# What is measured unless it is said: a layer of an 8B model at 32k, and what Triton's interpreter computes in seconds.
DEFAULT_SHAPES = {"cuda": (32768, 4096, 151936), "cpu": (32, 128, 97)}


@dataclass(frozen=True)
class KernelOptions:
    """Ops, implementations, shapes, and how long each is timed."""

    op: Annotated[Sequence[str], choice(KERNELS, f"Any of {', '.join(KERNELS)}.", show_default="all")] = tuple(KERNELS)
    implementation: Annotated[
        Sequence[str],
        choice(KERNEL_IMPLEMENTATIONS, f"Any of {', '.join(KERNEL_IMPLEMENTATIONS)}.", show_default="all"),
    ] = KERNEL_IMPLEMENTATIONS
    tokens: Annotated[
        Sequence[int] | None, setting(help="Numbers of rows.", show_default="32768, on a CPU 32", min=1)
    ] = None
    width: Annotated[
        Sequence[int] | None, setting(help="Lengths of a row.", show_default="4096, on a CPU 128", min=1)
    ] = None
    head_dim: Annotated[int, setting(help="Of the heads that rope rotates.", min=2)] = 64
    vocab_size: Annotated[
        Sequence[int] | None,
        setting(help="Vocabularies of linear-cross-entropy.", show_default="151936, on a CPU 97", min=2),
    ] = None

    def configurations(self, timing: OperationOptions, device: str, seed: int) -> list[dict[str, Any]]:
        """A cell for each op, shape and implementation.

        Raises:
            UsageError: nothing is left, or an option has no effect on these ops.
        """
        from cs336sys.measure.device import choose_device

        default_tokens, default_width, default_vocab_size = DEFAULT_SHAPES[choose_device(device).type]
        vocabularies = ",".join(map(str, self.vocab_size or ()))
        for option, is_chosen, name in (
            (f"--head-dim {self.head_dim}", self.head_dim != 64, "rope"),
            (f"--vocab-size {vocabularies}", bool(self.vocab_size), "linear-cross-entropy"),
        ):
            if is_chosen and name not in self.op:
                raise UsageError(f"{option} only affects {name}: add {name} to --op, or leave it out")
        codes, times = timing.codes, (timing.warmup_ms, timing.repetition_ms)
        head_dims = {name: self.head_dim for name in self.op if KERNELS[name].has_heads}
        shapes = self.tokens or [default_tokens], self.width or [default_width]
        configurations = [
            KernelWorkload(
                name, competitor, count, length, precision, head_dims.get(name), vocabulary, device, seed, *times
            ).configuration()
            | codes.get(competitor, {})
            for name, count, length, precision in product(self.op, *shapes, timing.dtype)
            for vocabulary in (self.vocab_size or [default_vocab_size] if KERNELS[name].has_vocabulary else [None])
            for competitor in (*self.implementation, *codes)
            if competitor in (*KERNELS[name].implementations, *codes)
        ]
        if not configurations:
            listed = ",".join(self.implementation)
            raise UsageError(f"--implementation {listed}: --op {','.join(self.op)} has none of them")
        return configurations


def kernels(
    chosen: KernelOptions = KernelOptions(),
    timing: OperationOptions = OperationOptions(),
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
    from cs336sys.report.kernels import kernel_tables, plot_kernels

    kernel = timing.kernel
    if kernel and (len(chosen.op) > 1 or chosen.op == ["adamw"]):
        raise UsageError(f"--kernel {kernel[0]}: stands beside one op, a function; name it by --op, and not adamw")
    over = timing.checked_baseline(chosen.implementation)
    output.check(plot=plot)
    tables = partial(kernel_tables, baseline=over)
    output.check_selection("kernels", tables)
    configurations = chosen.configurations(timing, device, seed)
    measure = f"cs336sys.experiments.kernels.measurement:measure_{'own_kernel' if kernel else 'kernel'}"
    run_sweep("kernels", measure, configurations, sweeping).report(tables, output, (plot, plot_kernels))
