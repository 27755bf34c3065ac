"""``cs336sys attn``: time and memory of plain PyTorch attention."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import choice
from cs336sys.commands.options.training import DeviceOption, DryRunOption, SeedOption
from cs336sys.commands.sweep.run import run_sweep, show_plan
from cs336sys.sizes import PRECISIONS
from cs336sys.workload import PLAIN_ATTENTION, AttentionWorkload


def attn(
    implementation: Annotated[list[str], choice(PLAIN_ATTENTION)] = ["eager", "compiled"],
    batch_size: Annotated[int, setting(help="Batch size; there is one head.", min=1)] = 8,
    head_dim: Annotated[list[int], setting(help="Head dimensions.", min=1)] = [16, 32, 64, 128],
    context: Annotated[list[int], setting(help="Sequence lengths.", min=1)] = [256, 1024, 4096, 8192, 16384],
    dtype: Annotated[list[str], choice(PRECISIONS)] = ["fp32"],
    causal: Annotated[bool, setting("--causal/--full", help="Mask what follows a query, or nothing.")] = False,
    warmup: Annotated[int, setting(help="Warm-up passes.", min=0)] = 10,
    steps: Annotated[int, setting(help="Measured passes, forward and backward each.", min=1)] = 100,
    plot: Annotated[Path | None, writes_file(help="Draw time and memory over the context.")] = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    dry_run: DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Time plain PyTorch attention and the memory that it holds for the backward pass, eager and compiled.

    cs336sys attn --context 256,1024,4096,8192,16384 --head-dim 16,32,64,128
    """
    from cs336sys.report.attention import attention_plan, attn_tables, plot_attn

    output.check(plot=plot)
    configurations = [
        AttentionWorkload(name, batch_size, 1, tokens, dimension, chosen_dtype, causal, device, seed).configuration()
        | {"warmup": warmup, "steps": steps}
        for tokens, dimension, chosen_dtype, name in product(context, head_dim, dtype, implementation)
    ]
    if dry_run:
        plan = partial(attention_plan, "attn", configurations)
        show_plan("attn", plan, sweeping, output, device, plot=plot)
        return
    measure = "cs336sys.experiments.attention.measurement:measure_attn"
    output.check_selection("attn", attn_tables)
    run_sweep("attn", measure, configurations, sweeping).report(attn_tables, output, (plot, plot_attn))
