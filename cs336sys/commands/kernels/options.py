"""``cs336sys kernels``: our fused kernels against other implementations, and against the rate of a copy."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cs336sys.command_line.options.operations import OPERATION_OPTIONS, OperationOptions
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, writes_file
from cs336sys.command_line.options.training import setting_options
from cs336sys.errors import UsageError
from cs336sys.run.sweep import run_sweep
from cs336sys.settings.operations import KERNEL_IMPLEMENTATIONS, KERNELS, KernelWorkload

# Default tokens, width and vocabulary: those of an 8B model at 32k, and what Triton's interpreter computes in seconds.
DEFAULT_SHAPES = {"cuda": (32768, 4096, 151936), "cpu": (32, 128, 97)}


@setting_options(
    KernelWorkload, *("op", "implementation", "tokens", "width", "head_dim", "vocab_size", *OPERATION_OPTIONS)
)
class KernelOptions(OperationOptions):
    """Ops, implementations, shapes, and how long each is timed."""

    op = tuple(KERNELS)
    implementation: Annotated[
        Sequence[str],
        choice(KERNEL_IMPLEMENTATIONS, f"Any of {', '.join(KERNEL_IMPLEMENTATIONS)}.", show_default="all"),
    ] = KERNEL_IMPLEMENTATIONS
    plot: Annotated[Path | None, writes_file(help="Draw shares of the copy rate.")] = None

    def configurations(self) -> list[dict[str, Any]]:
        """Return a cell for each op, shape and implementation.

        Raises:
            UsageError: nothing is left, or an option has no effect on these ops.
        """
        from cs336sys.machine.device import choose_device

        tokens, width, vocab_size = DEFAULT_SHAPES[choose_device(self.device).type]
        shapes = {"tokens": self.tokens or [tokens], "width": self.width or [width]}
        has_vocabulary = any(KERNELS[name].has_vocabulary for name in self.op)
        shapes["vocab_size"] = self.vocab_size or [vocab_size if has_vocabulary else None]  # None: no op has any.
        # Of each of the user's functions, by its FILE.py:NAME, an addition to its cells: the digest of its code.
        codes, order = self.codes, ("op", "tokens", "width", "dtype", "vocab_size", "implementation")
        implementations = *self.implementation, *codes
        configurations = [
            KernelWorkload(**cell).configuration() | codes.get(cell["implementation"], {})
            for cell in self.combinations(KernelWorkload, *order, implementation=implementations, **shapes)
            if cell["implementation"] in (*KERNELS[cell["op"]].implementations, *codes)
        ]
        if not configurations:
            listed = ",".join(self.implementation)
            raise UsageError(f"--implementation {listed}: --op {','.join(self.op)} has none of them")
        return configurations


def kernels(
    chosen: KernelOptions = KernelOptions(),
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check fused kernels against float64, then time forward and backward passes and set them against a copy.

    cs336sys kernels --op rms-norm,swiglu --tokens 32768 --width 4096 --plot kernels.png

    cs336sys kernels --op rms-norm --kernel mine.py:rms_norm --baseline mine.py:rms_norm
    """
    from cs336sys.commands.kernels.tables import kernel_tables, plot_kernels

    kernel, plot = chosen.kernel, chosen.plot
    if kernel and (len(chosen.op) > 1 or chosen.op == ["adamw"]):  # adamw is a step that updates in place.
        raise UsageError(f"--kernel {kernel[0]}: stands beside one op, a function; name it by --op, and not adamw")
    tables = partial(kernel_tables, baseline=chosen.checked_baseline)
    output.check(plot=plot)
    output.check_selection("kernels", tables)
    configurations = chosen.configurations()
    measure = "cs336sys.commands.kernels.measure:measure_kernel"
    run_sweep("kernels", measure, configurations, sweeping).report(tables, output, (plot, plot_kernels))
