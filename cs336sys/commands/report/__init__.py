"""``cs336sys report``: the write-up of one year of the course, from saved results or from a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys.commands.invocation.faults import say
from cs336sys.commands.options.completion import among
from cs336sys.commands.options.reading import OUTPUT, check_choice, one_of, split_list
from cs336sys.commands.options.training import DeviceOption
from cs336sys.errors import UsageError, choose_from
from cs336sys.sizes import SIZES
from cs336sys.workload import DEVICES

if TYPE_CHECKING:
    from cs336sys.report.course.problem import Problem

# Formats by what a file's name ends in.
_FORMATS = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".tex": "latex",
    ".typ": "typst",
}


def report(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More files for --from, as a shell expands *.")
    ] = None,
    year: Annotated[int, typer.Option(help="Of the handout: 2025 or 2026.", show_default=False)] = 0,
    source: Annotated[
        list[str],
        typer.Option(
            "--from", help="Results, folders of them, patterns; the course's tests as .xml.", show_default=False
        ),
    ] = [],
    run: Annotated[bool, typer.Option("--run", help="First measure what the problems ask, on this machine.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where --run saves. Default: report-YEAR.", show_default=False)
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="In the place of all the handout's sizes: tiny.", show_default=False, autocompletion=among(SIZES)
        ),
    ] = None,
    device: DeviceOption = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what --run would run, and run nothing.")] = False,
    only: Annotated[list[str], typer.Option(help="Only these problems, by name.", show_default=False)] = [],
    skip: Annotated[list[str], typer.Option(help="Not these problems.", show_default=False)] = [],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="html, markdown, latex, typst. Default: the file name's.",
            show_default=False,
            rich_help_panel=OUTPUT,
            autocompletion=among(tuple(dict.fromkeys(_FORMATS.values()))),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file, not to stdout.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Write up a year of the course: each problem with its command, machine, table, picture and answer in words.

    cs336sys report --year 2026 --from results/ --output report.html

    cs336sys report --year 2025 --run --output report.html

    cs336sys report --year 2026 --run --size tiny --device cpu --output tiny.html
    """
    from cs336sys.commands.report.running import run_commands
    from cs336sys.commands.report.sources import read_sources, source_files
    from cs336sys.report.course.document import build_document
    from cs336sys.report.course.evidence import evidence_of
    from cs336sys.report.course.handouts import PROBLEMS
    from cs336sys.report.course.plan import plan_table, planned, target_of
    from cs336sys.report.course.target import HANDOUTS
    from cs336sys.report.course.writing import write_document
    from cs336sys.report.outputs import check_writable
    from cs336sys.report.rendering import STDOUT, emit, render

    if year not in HANDOUTS:
        raise UsageError(f"{f'--year {year}' if year else 'no --year'}: choose from {', '.join(map(str, HANDOUTS))}")
    check_choice(device, "--device", DEVICES)
    if size is not None:
        check_choice(size, "--size", tuple(SIZES))
    problems = _chosen(PROBLEMS[year], only, skip)
    written = _format_of(format, output)
    if output is not None and output != STDOUT:
        check_writable(output, "--output")

    target = target_of(HANDOUTS[year], size, device)
    plan = planned(problems, target)
    if folder is not None and not run and not dry_run:
        raise UsageError(f"--folder {folder}: is where --run saves; give --run, or results with --from")
    if dry_run:
        if output is not None:
            raise UsageError(f"--output {output}: --dry-run prints its plan; leave one of them out")
        if format is not None:
            raise UsageError(f"--format {format}: --dry-run prints its plan; leave one of them out")
        emit([plan_table(plan, target)])
        return
    given = [*source, *(files or [])]
    if not run and not given:
        raise UsageError("give results with --from, or measure them with --run")
    failed: list[str] = []
    if run:
        # Files that cannot be read are found out before an hour of measuring.
        _, _, unread = read_sources(source_files(given))
        if unread:
            raise UsageError(unread[0])
        into = folder or Path(f"report-{year}")
        check_writable(into / "results", "--folder")
        say(render([plan_table(plan, target)], "table").rstrip())
        failed = run_commands([command for command, _ in plan], target, into)
        given = [str(into), *given] if any(into.glob("*.jsonl.gz")) else given
    results, tests, unread = read_sources(source_files(given))
    for reason in unread:
        say(f"error: {reason}; the report is written without it")
    evidences, faults = evidence_of(results, tests)
    document = build_document(problems, evidences, target, faults)
    for fault in document.faults:
        say(f"warning: {fault}")
    for note in write_document(document, written, output):
        say(f"warning: {note}")
    parts, answered = document.counts
    of = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    say(f"report: {answered} of {parts} parts of {of} are answered")
    if failed or unread:
        raise typer.Exit(1)


def _chosen(all_problems: Sequence["Problem"], only: list[str], skip: list[str]) -> list["Problem"]:
    names = [problem.name for problem in all_problems]
    chosen = split_list(only, "--only", one_of(names)) if only else names
    left_out = split_list(skip, "--skip", one_of(names)) if skip else []
    problems = [problem for problem in all_problems if problem.name in chosen and problem.name not in left_out]
    if not problems:
        raise UsageError("--only and --skip leave no problem")
    return problems


def _format_of(format: str | None, output: Path | None) -> str:
    """What the page is written as: what is asked for, or what the file's name says."""
    from cs336sys.report.rendering import STDOUT

    if format is None and output not in (None, STDOUT) and output.suffix.lower() not in _FORMATS:
        raise UsageError(f"--output {output}: the name must end in {', '.join(_FORMATS)}, or give --format")
    named = _FORMATS.get(output.suffix.lower(), "markdown") if output is not None else "markdown"
    written = format or named
    if written not in _FORMATS.values():
        raise UsageError(f"unknown format '{written}': {choose_from(written, list(dict.fromkeys(_FORMATS.values())))}")
    return written
