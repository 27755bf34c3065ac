"""``cs336sys report``: the write-up of one year of the course, from saved results or from a run."""

import glob
import hashlib
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.faults import say
from cs336sys.commands.options.effects import reads_file, setting, writes_file
from cs336sys.commands.options.reading import OUTPUT, among, check_choice, one_of, split_list
from cs336sys.commands.options.training import DeviceOption
from cs336sys.errors import CapabilityError, UsageError, require_known
from cs336sys.processes.parent import Guarded, python_module
from cs336sys.report.course.handouts import why_not
from cs336sys.report.course.problem import Command, Problem, Target
from cs336sys.results.foreign import MIB, printable, read_chunks
from cs336sys.results.model import Results, passed_over_words, read_results
from cs336sys.sizes import SIZES
from cs336sys.workload import DEVICES

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
    year: Annotated[int, setting(help="Of the handout: 2025 or 2026.", show_default=False)] = 0,
    source: Annotated[
        list[str], reads_file("--from", help="Results, folders of them, patterns; the course's tests as .xml.")
    ] = [],
    run: Annotated[bool, writes_file("--run", help="First run the problems' measurements on this machine.")] = False,
    folder: Annotated[Path | None, writes_file(help="Where --run saves. Default: report-YEAR.")] = None,
    size: Annotated[
        str | None, setting(help="In the place of all the handout's sizes: tiny.", autocompletion=among(SIZES))
    ] = None,
    device: DeviceOption = "auto",
    dry_run: Annotated[bool, setting("--dry-run", help="Print what --run would run, and run nothing.")] = False,
    only: Annotated[list[str], setting(help="Only these problems, by name.")] = [],
    skip: Annotated[list[str], setting(help="Not these problems.")] = [],
    format: Annotated[
        str | None,
        setting(
            "--format",
            help="html, markdown, latex, typst. Default: the file name's.",
            rich_help_panel=OUTPUT,
            autocompletion=among(tuple(dict.fromkeys(_FORMATS.values()))),
        ),
    ] = None,
    output: Annotated[
        Path | None, writes_file("--output", "-o", help="Write to this file, not to stdout.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Write up a year of the course: each problem with its command, machine, table, picture and answer in words.

    cs336sys report --year 2026 --from results/ --output report.html

    cs336sys report --year 2025 --run --output report.html

    cs336sys report --year 2026 --run --size tiny --device cpu --output tiny.html
    """
    from cs336sys.report.course.document import build_document
    from cs336sys.report.course.evidence import evidence_of
    from cs336sys.report.course.handouts import PROBLEMS, plan_table, planned, target_of
    from cs336sys.report.course.problem import HANDOUTS
    from cs336sys.report.course.writing import write_document
    from cs336sys.report.outputs import check_writable
    from cs336sys.report.render import STDOUT, emit, render

    if year not in HANDOUTS:
        raise UsageError(f"{f'--year {year}' if year else 'no --year'}: choose from {', '.join(map(str, HANDOUTS))}")
    check_choice(device, "--device", DEVICES)
    if size is not None:
        check_choice(size, "--size", tuple(SIZES))
    problems = _chosen_problems(PROBLEMS[year], only, skip)
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
    source_names = [*source, *(files or [])]
    if not run and not source_names:
        raise UsageError("give results with --from, or measure them with --run")
    failed: list[str] = []
    if run:
        # Files that cannot be read are found out before an hour of measuring.
        _, _, unread = read_sources(source_files(source_names))
        if unread:
            raise UsageError(next(iter(unread.values())))
        into = folder or Path(f"report-{year}")
        check_writable(into / "results", "--folder")
        say(render([plan_table(plan, target)], "table").rstrip())
        failed = run_commands([command for command, _ in plan], target, into)
        source_names = [str(into), *source_names] if any(into.glob("*.jsonl.gz")) else source_names
    sources = source_files(source_names)
    results, tests, unread = read_sources(sources)
    for path, reason in unread.items():
        say(f"{'error' if sources[path] else 'warning'}: {reason}; the report is written without it")
    evidences, faults = evidence_of(results, tests)
    document = build_document(problems, evidences, target, faults)
    for fault in document.faults:
        say(f"warning: {fault}")
    for note in write_document(document, written, output):
        say(f"warning: {note}")
    of = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    say(f"report: {of}, {document.count_words}")
    if failed or any(sources[path] for path in unread):
        raise typer.Exit(1)


def _chosen_problems(all_problems: Sequence[Problem], only: list[str], skip: list[str]) -> list[Problem]:
    names = [problem.name for problem in all_problems]
    chosen = split_list(only, "--only", one_of(names)) if only else names
    left_out = split_list(skip, "--skip", one_of(names)) if skip else []
    problems = [problem for problem in all_problems if problem.name in chosen and problem.name not in left_out]
    if not problems:
        raise UsageError("--only and --skip leave no problem")
    return problems


def _format_of(format: str | None, output: Path | None) -> str:
    """Choose the page's format: the one asked for, or what the file's name says."""
    from cs336sys.report.render import STDOUT

    if format is None and output not in (None, STDOUT) and output.suffix.lower() not in _FORMATS:
        raise UsageError(f"--output {output}: the name must end in {', '.join(_FORMATS)}, or give --format")
    named = _FORMATS.get(output.suffix.lower(), "markdown") if output is not None else "markdown"
    written = format or named
    require_known("format", written, list(dict.fromkeys(_FORMATS.values())))
    return written


# Commands that go on with what their --save file holds; the others take seconds.
_NOT_RESUMABLE = ("precision",)

_POLL_S = 1.0


def run_commands(plan: Sequence[Command], target: Target, folder: Path) -> list[str]:
    """Run them with ``--save`` into the folder; what files there hold already is not measured again.

    Returns:
        The command lines that failed. What lacks a capability is said and is no failure.
    """
    failed = []
    for number, command in enumerate(plan, 1):
        reason = why_not(command, target)
        if reason is not None:
            say(f"report: {number} of {len(plan)} is left out, it {reason}: {command.line}")
            continue
        say(f"report: {number} of {len(plan)}: {command.line}")
        try:
            code = _run_command(command, folder)
        except KeyboardInterrupt:
            say(f"report: interrupted in {number} of {len(plan)}; --run continues from {folder}")
            raise
        if code not in (0, CapabilityError.exit_code):
            say(f"report: that ended with exit code {code}")
            failed.append(command.line)
    return failed


def results_path(command: Command, folder: Path) -> Path:
    """A command's results file, the same in every run."""
    digest = hashlib.sha256(command.line.encode()).hexdigest()[:8]
    return folder / f"{command.arguments[0]}-{digest}.jsonl.gz"


def without_settings(environment: Mapping[str, str], command: str) -> dict[str, str]:
    """The environment in which a command does what its line says: no settings file, no variables of its options."""
    prefix = f"CS336SYS_{command.upper()}_"
    kept = {name: value for name, value in environment.items() if not name.startswith(prefix)}
    # An empty file, so that no pyproject.toml is looked for.
    return kept | {"CS336SYS_CONFIG": os.devnull}


def _run_command(command: Command, folder: Path) -> int:
    path = results_path(command, folder)
    arguments = [*command.arguments, "--save", str(path), "--output", str(path.with_name(f"{path.name[:-9]}.md"))]
    if command.arguments[0] not in _NOT_RESUMABLE:
        arguments.append("--resume")
    environment = without_settings(os.environ, command.arguments[0])
    program = Guarded(python_module("cs336sys", *arguments), stdout=2, env=environment)
    try:
        while not program.has_ended(_POLL_S):
            pass
    finally:
        # Ctrl-C has reached this process alone. Every cell that was measured is in the file.
        program.kill()
    return program.process.returncode


# What is looked for in folders, and taken of a pattern's matches.
_RESULTS = ("*.jsonl", "*.jsonl.gz", "*.xml")

# The course's tests, of which there are dozens, take 20 KB.
_TESTS_BYTES = 16 * MIB

# Files that an error names one by one.
_NAMED = 5


def source_files(names: Sequence[str]) -> dict[Path, bool]:
    """Find files as given, those that a pattern matches, and the results in a folder.

    Returns:
        each with whether it was given by its own name.

    Raises:
        UsageError: nothing is there.
    """
    files: dict[Path, bool] = {}
    for name in names:
        path, is_named = Path(name), False
        if path.is_dir():
            matching = sorted(result_path for pattern in _RESULTS for result_path in path.glob(pattern))
        elif path.exists() or not glob.has_magic(name):
            matching, is_named = [path], True
        else:
            matching = sorted(path for path in map(Path, glob.glob(name)) if any(map(path.match, _RESULTS)))
        if not matching:
            raise UsageError(f"--from {name}: found no results file; give a file written by --save")
        files |= {result_path: is_named or files.get(result_path, False) for result_path in matching}
    return files


def read_sources(files: Iterable[Path]) -> tuple[list[Results], dict[str, str], dict[Path, str]]:
    """The results, the outcomes of tests by their names, and why files could not be read.

    Raises:
        UsageError: none of the files can be read, or none holds either.
    """
    results: list[Results] = []
    tests: dict[str, str] = {}
    unread: dict[Path, str] = {}
    for path in files:
        try:
            if path.suffix != ".xml":
                results.append(read_results(path))
                for sentence in passed_over_words(results[-1]):
                    say(f"warning: {path}: {sentence}")
                continue
            outcomes = _outcomes(path)
        except UsageError as error:
            unread[path] = str(error)
            continue
        contradicted = [name for name in outcomes if tests.get(name, outcomes[name]) != outcomes[name]]
        if contradicted:
            listed = ", ".join(contradicted)
            say(f"warning: {path}: contradicts an earlier file about {listed}; the later one counts")
        tests |= outcomes
    if unread and not results and not tests:
        raise UsageError(
            "; ".join(list(unread.values())[:_NAMED])
            + (f"; and {more} more" if (more := len(unread) - _NAMED) > 0 else "")
        )
    return results, tests, unread


def _outcomes(path: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` by test, of a file that ``pytest --junitxml`` has written."""
    try:
        cases = list(ElementTree.fromstring(b"".join(read_chunks(path, _TESTS_BYTES))).iter("testcase"))
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot read the tests' outcomes from {path}: {error}") from error
    if not cases:
        raise UsageError(f"{path} holds no test's outcome: it should be a file written by pytest --junitxml")
    outcomes = {}
    for case in cases:
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        outcomes[printable(case.get("name", ""))] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
    return outcomes
