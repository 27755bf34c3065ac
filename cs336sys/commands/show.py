"""``cs336sys show``: the tables and pictures of saved results again, on any machine."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cs336sys.command_line.faults import say
from cs336sys.command_line.invocation import LazyGroup
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import choice, one_of, setting, split_list, writes_file
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Status, passed_over_words, read_results

if TYPE_CHECKING:
    from cs336sys.commands.registry import Invocation
    from cs336sys.tables.saved import Pictures, Presentation
    from cs336sys.tables.table import Table


def _print_schema(is_requested: bool) -> None:
    if is_requested:
        from cs336sys.results.schema import results_schema

        typer.echo(json.dumps(results_schema(), indent=2, allow_nan=False))
        raise typer.Exit


def show(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE.jsonl", help="What --save has written.")],
    command: Annotated[list[str], setting("--command", help="Only the cells of these commands.")] = [],
    status: Annotated[list[str], choice(get_args(Status), f"Only cells of these: {', '.join(get_args(Status))}.")] = [],
    plot: Annotated[
        Path | None, writes_file(help="Draw to this picture file; of several, each adds its name to the file's.")
    ] = None,
    html: Annotated[
        Path | None, writes_file("--html", help="Write all tables and pictures to this page, and print nothing.")
    ] = None,
    schema: Annotated[
        bool,
        setting(
            "--schema", callback=_print_schema, is_eager=True, help="Print the JSON Schema of a line of these files."
        ),
    ] = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Print the tables of saved results again, as the commands printed that measured them, without torch or a GPU.

    cs336sys show results.jsonl --plot results.png

    cs336sys show results/*.jsonl --command bench,flash --status ok --sort -peak_gib

    cs336sys show bench.jsonl --table bench --columns size,context,step_ms --format csv

    cs336sys show results/*.jsonl.gz --html results.html
    """
    from cs336sys.commands.registry import marked, saved_page, saved_pictures
    from cs336sys.tables.outputs import write_file
    from cs336sys.tables.page import check_page_writable

    output.check(plot=plot)
    check_page_writable(html)
    presentation = saved_presentations(ctx.parent)
    sound, faults = _sound_cells(presentation, _chosen_invocations(files, command), status)
    counts = Counter(invocation.command for invocation, _, _ in sound)
    tables = output.select(
        [marked(invocation, built) if counts[invocation.command] > 1 else built for invocation, _, built in sound]
    )
    pictured = [] if plot is None and html is None else sound
    pictures = [saved_pictures(invocation, cells, presentation(invocation)) for invocation, cells, _ in pictured]
    files_to_draw = list(drawings(pictures, plot, counts)) if plot is not None else []  # Checks all before writing any.
    if html is None or output.output is not None:
        output.write([table for group in tables for table in group])
    for path, draw in files_to_draw:
        draw(path)
        say(f"drew {path}")
    if html is not None:
        shown = list(zip([invocation for invocation, _, _ in sound], tables, pictures, strict=True))
        page = saved_page(", ".join(path.name for path in dict.fromkeys(files)), shown)
        write_file(html, page.encode(), "--html")
        say(f"wrote {html}")
    for fault in faults:
        say(f"error: {fault}")
    if faults:
        raise typer.Exit(1)


def _chosen_invocations(files: Sequence[Path], commands: Sequence[str]) -> list["Invocation"]:
    """Read the files, and return the invocations of these commands; of any, without one."""
    from cs336sys.commands.registry import invocations

    results_of_files = {path: read_results(path) for path in files}
    for path, results in results_of_files.items():
        for sentence in passed_over_words(results):
            say(f"warning: {path}: {sentence}")
    saved = invocations(list(results_of_files.values()))
    measured = list(dict.fromkeys(invocation.command for invocation in saved))
    if not measured:
        raise UsageError(f"{', '.join(map(str, files))}: no cell was measured")
    if commands:
        chosen = split_list(commands, "--command", one_of(measured))
        saved = [invocation for invocation in saved if invocation.command in chosen]
    return saved


def _sound_cells(
    presentation: Callable[["Invocation"], "Presentation"], saved: Sequence["Invocation"], status: Sequence[str]
) -> tuple[list[tuple["Invocation", list[Cell], list["Table"]]], list[UsageError]]:
    """Return invocations with their cells of this status and tables, and the faults of those that cannot be shown."""
    from cs336sys.commands.registry import sound_cells_and_tables

    sound = []
    faults: list[UsageError] = []
    for invocation in saved:
        try:
            cells, tables = sound_cells_and_tables(invocation, status, presentation(invocation))
            if cells:
                sound.append((invocation, cells, tables))
        except UsageError as fault:
            faults.append(fault)
    if not sound:
        raise faults[0] if faults else UsageError(f"--status {','.join(status)}: no cell has this status")
    return sound, faults


def saved_presentations(ctx: Any) -> Callable[["Invocation"], "Presentation"]:
    """Return a function that reads in an invocation's saved arguments how its command was asked to show its cells.

    Options that the command, one of the context ``ctx``, no longer has are ignored.
    """
    from cs336sys.commands.registry import can_be_shown
    from cs336sys.tables.saved import Presentation

    @functools.cache
    def parse(name: str, *arguments: str) -> Presentation:
        """Return how a saved command line wants cells shown; other options, also unknown ones, are ignored."""
        assert isinstance(ctx.command, LazyGroup)  # Which makes a new command at each call: this one may be changed.
        command = ctx.command.get_command(ctx, name)
        names = {field.name for field in fields(Presentation)}
        command.params = [parameter for parameter in command.params if parameter.name in names]
        # A context without a parent, so that no variable of today's environment is read.
        context = command.make_context(
            name, list(arguments), resilient_parsing=True, ignore_unknown_options=True, allow_extra_args=True
        )
        # What the line does not set is None or empty here, and keeps the default of Presentation.
        return Presentation(**{name: value for name, value in context.params.items() if value})

    def presentation(invocation: "Invocation") -> Presentation:
        # The last run printed all cells, as its line asked. What began with another name was a script, not our line.
        line = invocation.runs[-1].arguments if invocation.runs else ()
        line = line if line[:1] == (invocation.command,) else (invocation.command,)
        return parse(*line) if can_be_shown(invocation.command) else Presentation()

    return presentation


def drawings(
    pictures: Sequence["Pictures"], plot: Path, commands: Iterable[str]
) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Yield each picture's file and drawing function; of several, each adds its name to ``plot``, numbered if equal."""
    from cs336sys.tables.outputs import check_writable

    named = [(name, draw) for drawn in pictures for name, draw in drawn.items()]
    if not named:
        raise UsageError(f"--plot {plot}: the cells of {', '.join(commands)} hold no picture's data")
    total = Counter(name for name, _ in named)
    seen: Counter[str] = Counter()
    for name, draw in named:
        seen[name] += 1
        number = f"-{seen[name]}" if total[name] > 1 else ""
        path = plot if len(named) == 1 else plot.with_name(f"{plot.stem}-{name}{number}{plot.suffix}")
        check_writable(path, "--plot")
        yield path, draw
