"""``account keep``: in how many blocks of a fully sharded step gate and up are kept."""

from itertools import product
from typing import Annotated

import typer

from cs336sys.commands.options import training as options
from cs336sys.commands.options.board import read_memory_limit
from cs336sys.commands.options.completion import among
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import at_least, one_of, split_list
from cs336sys.sizes import MOST_RANKS
from cs336sys.workload import STATE_DTYPES


def keep(
    model: options.SharedSizeOptions = options.SharedSizeOptions(["8b"]),
    world_size: Annotated[list[str], typer.Option("--world-size", help="Numbers of ranks.")] = ["2"],
    state_dtype: Annotated[
        list[str],
        typer.Option(
            "--state-dtype",
            help=f"Of slices and AdamW's state: {', '.join(STATE_DTYPES)}.",
            autocompletion=among(STATE_DTYPES),
        ),
    ] = [",".join(STATE_DTYPES)],
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="What a rank may hold: 130GiB or 140GB.")
    ] = "130GiB",
    output: OutputOptions = OutputOptions(),
) -> None:
    """What --checkpoint auto of shard chooses, and why: the peak of a rank and FLOPs again for each number of blocks.

    cs336sys account keep --size 8b --world-size 2,4 --state-dtype bf16 --memory-limit 130GiB
    """
    from cs336sys.accounting.sharding.kept_parts import KeptStep
    from cs336sys.report.account.keep import keep_tables

    output.check()
    steps = [
        KeptStep(size, ranks, size.precision, dtype)
        for size, ranks, dtype in product(
            model.sizes(),
            split_list(world_size, "--world-size", at_least(1, MOST_RANKS)),
            split_list(state_dtype, "--state-dtype", one_of(STATE_DTYPES)),
        )
    ]
    output.emit(keep_tables(steps, read_memory_limit(memory_limit)))
