"""``cs336sys trace``: what a capture says, of any number of ranks."""

from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.faults import say
from cs336sys.commands.options.output import OutputOptions


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Captures of torch.profiler or nsys, one a rank, or their folder."),
    ],
    step: Annotated[str | None, typer.Option(help="Name of the ranges that are the steps.", show_default=False)] = None,
    top: Annotated[int, typer.Option(help="Kernels, operators and modules shown.", min=1)] = 10,
    full_names: Annotated[bool, typer.Option("--full-names", help="Show the whole names of kernels.")] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Compare operators with the GPU's peak FLOPs and bandwidth.")
    ] = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Say where the time of a recorded training step goes, which rank holds the others up, and what to try next.

    cs336sys trace step.json.gz

    cs336sys trace run/ --roofline
    """
    from cs336sys.measure.profile.reading import read_captures
    from cs336sys.report.profile.trace import Shown, trace_tables

    output.check()
    read = read_captures(files, step)
    for note in read.notes:
        say(f"note: {note}")
    output.emit(trace_tables(read.analyses, read.ranks, Shown(top, full_names, roofline)))
