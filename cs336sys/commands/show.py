"""``cs336sys show``: the tables and pictures of saved results again, on any machine."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cs336sys.commands.faults import say
from cs336sys.commands.invocation import LazyGroup
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import choice, one_of, split_list
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, Status, passed_over_words, read_results

if TYPE_CHECKING:
    from cs336sys.report.registry import Invocation, Pictures, Presentation
    from cs336sys.report.table import Table


def _print_schema(asked: bool) -> None:
    if asked:
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

    cs336sys show docs/results/ddp-h200.jsonl.gz --plot ddp.png

    cs336sys show results/*.jsonl --command bench,flash --status ok --sort -peak_gib

    cs336sys show bench.jsonl --table bench --columns size,context,step_ms --format csv

    cs336sys show results/*.jsonl.gz --html results.html
    """
    from cs336sys.report.outputs import check_plot, write_file
    from cs336sys.report.page import check_page
    from cs336sys.report.registry import Shown, invocations, marked, saved_page, saved_pictures, sound_cells_and_tables

    output.check()
    check_plot(plot)
    check_page(html)
    found = invocations([_read(path) for path in files])
    measured = list(dict.fromkeys(invocation.command for invocation in found))
    if not measured:
        raise UsageError(f"{', '.join(map(str, files))}: no cell was measured")
    if command:
        chosen = split_list(command, "--command", one_of(measured))
        found = [invocation for invocation in found if invocation.command in chosen]
    cells: list[tuple[Invocation, list[Cell]]] = []
    tables: list[list[Table]] = []
    faults: list[UsageError] = []
    for invocation in found:
        try:
            of_invocation = sound_cells_and_tables(
                invocation, status, _presentation(ctx, invocation), lambda sentence: say(f"warning: {sentence}")
            )
        except UsageError as fault:
            faults.append(fault)
            continue
        if of_invocation[0]:
            cells.append((invocation, of_invocation[0]))
            tables.append(of_invocation[1])
    if faults and not cells:
        raise faults[0]
    if not cells:
        raise UsageError(f"--status {','.join(status)}: no cell has this status")
    names = [invocation.command for invocation, _ in cells]
    tables = [
        marked(invocation, some) if names.count(invocation.command) > 1 else some
        for (invocation, _), some in zip(cells, tables, strict=True)
    ]
    tables = output.chosen(tables)
    pictures = [saved_pictures(*one) if plot is not None or html is not None else {} for one in cells]
    drawings = list(_drawings(pictures, plot, names)) if plot is not None else []
    if html is None or output.output is not None:
        output.write([one for some in tables for one in some])
    for path, draw in drawings:
        draw(path)
        say(f"drew {path}")
    if html is not None:
        shown = [
            Shown(invocation, some, drawn) for (invocation, _), some, drawn in zip(cells, tables, pictures, strict=True)
        ]
        page = saved_page(", ".join(path.name for path in dict.fromkeys(files)), shown, say)
        write_file(html, page.encode(), "--html")
        say(f"wrote {html}")
    for unshown in faults:
        say(f"error: {unshown}")
    if faults:
        raise typer.Exit(1)


def _read(path: Path) -> Results:
    results = read_results(path)
    for sentence in passed_over_words(results):
        say(f"warning: {path}: {sentence}")
    return results


def _presentation(ctx: typer.Context, invocation: "Invocation") -> "Presentation":
    """Read from saved arguments how the command was asked to show the cells, as far as it still knows them."""
    from cs336sys.report.registry import SAVED_COMMANDS, Presentation

    default = Presentation()
    if invocation.command not in SAVED_COMMANDS:
        return default
    name, *arguments = (invocation.runs[-1].arguments if invocation.runs else ()) or ("",)
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, LazyGroup)
    command = ctx.parent.command.get_command(ctx.parent, invocation.command)
    # A context without a parent, so that no variable of today's environment is read.
    asked = command.make_context(
        invocation.command,
        arguments if name == invocation.command else [],
        resilient_parsing=True,
        ignore_unknown_options=True,
        allow_extra_args=True,
    ).params
    return Presentation(
        asked.get("baseline") or default.baseline,
        asked.get("percentiles") or (),
        asked.get("top") or default.top,
        bool(asked.get("full_names")),
        bool(asked.get("compare_precision")),
    )


def _drawings(
    pictures: Sequence["Pictures"], plot: Path, commands: Sequence[str]
) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Each picture with its file: the one asked for, or where there are several, one named after picture and place."""
    from cs336sys.report.outputs import check_writable

    named = [(name, draw) for drawn in pictures for name, draw in drawn.items()]
    if not named:
        raise UsageError(f"--plot {plot}: the cells of {', '.join(dict.fromkeys(commands))} hold no picture's data")
    total = {name: sum(name == other for other, _ in named) for name, _ in named}
    seen: dict[str, int] = {}
    for name, draw in named:
        seen[name] = seen.get(name, 0) + 1
        number = f"-{seen[name]}" if total[name] > 1 else ""
        path = plot if len(named) == 1 else plot.with_name(f"{plot.stem}-{name}{number}{plot.suffix}")
        check_writable(path, "--plot")
        yield path, draw
