"""``cs336sys attn``: time and memory of plain PyTorch attention."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, setting, writes_file
from cs336sys.command_line.options.training import DryRunOption, OptionGroup, option_of, setting_options
from cs336sys.run.sweep import run_sweep, show_plan
from cs336sys.settings.operations import PLAIN_ATTENTION, AttentionWorkload


@setting_options(
    AttentionWorkload,
    *("implementation", "batch_size", "head_dim", "context", "dtype", "causal", "warmup", "steps", "plot"),
    *("device", "seed"),
)
class PlainAttentionOptions(OptionGroup):
    """Implementations and shapes, and how often each is timed."""

    implementation: Annotated[Sequence[str], choice(PLAIN_ATTENTION)] = ("eager", "compiled")
    batch_size: Annotated[
        Sequence[int], option_of(AttentionWorkload, "batch_size", help="Batch sizes; there is one head.")
    ] = (8,)
    dtype, causal = ("fp32",), False
    head_dim, context = (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
    warmup: Annotated[int, setting(help="Warm-up passes.", min=0)] = 10
    steps: Annotated[int, setting(help="Measured passes, forward and backward each.", min=1)] = 100
    plot: Annotated[Path | None, writes_file(help="Draw time and memory over the context.")] = None


def attn(
    attention: PlainAttentionOptions = PlainAttentionOptions(),
    dry_run: DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Time plain PyTorch attention and the memory that it holds for the backward pass, eager and compiled.

    cs336sys attn --context 256,1024,4096,8192,16384 --head-dim 16,32,64,128
    """
    from cs336sys.commands.attention.tables import attention_plan, attn_tables, plot_attn

    output.check(plot=attention.plot)
    # The outermost first; the handout's attention has a single head.
    cells = attention.combinations(AttentionWorkload, "batch_size", "context", "head_dim", "dtype", heads=[1])
    counts = {"warmup": attention.warmup, "steps": attention.steps}
    configurations = [AttentionWorkload(**cell).configuration() | counts for cell in cells]
    if dry_run:
        plan = partial(attention_plan, "attn", configurations)
        show_plan("attn", plan, sweeping, output, attention.device, plot=attention.plot)
        return
    measure = "cs336sys.commands.attention.measure:measure_attn"
    output.check_selection("attn", attn_tables)
    run_sweep("attn", measure, configurations, sweeping).report(attn_tables, output, (attention.plot, plot_attn))
