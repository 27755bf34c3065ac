"""``account memory``: what a rank holds, by how training state is shared."""

from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.accounting.sharding.ideal import OWN_SHARDING_STRATEGIES
from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import choice
from cs336sys.sizes import ELEMENT_BYTES, MOST_RANKS, PRECISIONS
from cs336sys.workload import ATTENTION, MODES


def memory(
    model: options.SharedSizeOptions = options.SharedSizeOptions(["xl"]),
    world_size: Annotated[list[int], setting(help="Numbers of ranks.", min=1, max=MOST_RANKS)] = [2],
    strategy: Annotated[list[str], choice(OWN_SHARDING_STRATEGIES)] = list(OWN_SHARDING_STRATEGIES),
    mode: Annotated[list[str], choice(MODES)] = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    parameter_dtype: Annotated[
        str, choice(PRECISIONS, "Of parameters and gradients; bf16 and fp16 have fp32 masters.")
    ] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    plot: Annotated[Path | None, writes_file(help="Also draw the peaks to this picture file.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Memory of a rank by component, at the handout's three times and at its peak, for each way of sharing out state.

    cs336sys account memory --size xl,2.7b --world-size 2 --strategy none,optimizer,optimizer-flat,fsdp

    cs336sys account memory --size 2.7b --context 128,2048 --world-size 1 --strategy none --mode forward,train
    """
    from cs336sys.accounting.sharding.step import ShardedStep
    from cs336sys.report.account.model import plot_rank_memory, rank_memory_tables

    parameter_bytes = ELEMENT_BYTES[parameter_dtype]
    output.check(plot=plot)
    steps = [
        ShardedStep(
            name, size, ranks, dtype or size.precision, attention, mode=one_mode, parameter_bytes=parameter_bytes
        )
        for size, dtype, one_mode, ranks, name in product(
            model.sizes(), precision.precisions(), mode, world_size, strategy
        )
    ]
    output.emit(rank_memory_tables(steps))
    if plot is not None:
        plot_rank_memory(steps, plot)
