"""``cs336sys report``: the write-up of one year of the course, from saved results or from a run."""

import glob
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.accounting.step_time.rates import GPUS
from cs336sys.command_line.faults import say
from cs336sys.command_line.options.reading import (
    among,
    choice,
    one_of,
    read_memory_limit,
    reads_file,
    setting,
    split_list,
    writes_file,
)
from cs336sys.command_line.options.training import DeviceOption
from cs336sys.commands.report.evidence import evidence_of, read_test_outcomes
from cs336sys.commands.report.handouts import PROBLEMS, plan_table, planned, target_of, why_not
from cs336sys.commands.report.problem import HANDOUTS, Command, Problem, Target
from cs336sys.errors import CapabilityError, UsageError, require_known
from cs336sys.processes.parent import Guarded, python_module
from cs336sys.results.model import Results, passed_over_words, read_results
from cs336sys.settings.fields import OUTPUT
from cs336sys.settings.sizes import SIZES
from cs336sys.tables.outputs import check_writable
from cs336sys.tables.page import find_browser
from cs336sys.tables.render import STDOUT, emit, render

# Formats by what a file's name ends in.
_FORMATS = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown"}
_FORMATS |= {".tex": "latex", ".typ": "typst", ".pdf": "pdf"}


@dataclass(frozen=True)
class WriteUpOptions:
    """The year and problems of a write-up, and the results it is made from."""

    year: Annotated[int, setting(help="Year of the handout: 2025 or 2026.", show_default=False)] = 0
    source: Annotated[
        Sequence[str], reads_file("--from", help="Results, folders of them, patterns; the course's tests as .xml.")
    ] = ()
    run: Annotated[bool, writes_file("--run", help="First run the problems' measurements on this machine.")] = False
    folder: Annotated[Path | None, writes_file(help="Folder that --run saves in. Default: report-YEAR.")] = None
    size: Annotated[str | None, choice(SIZES, "Measure this size instead of the handout's: tiny.")] = None
    device: DeviceOption = "auto"
    gpu: Annotated[
        str | None, choice(GPUS, f"With --dry-run: plan for {', '.join(GPUS)}, or as torch names it.", parser=str)
    ] = None
    memory: Annotated[str | None, setting(help="With --dry-run: what that GPU, or this machine, holds: 32GiB.")] = None
    dry_run: Annotated[bool, setting("--dry-run", help="Print what --run would run, and run nothing.")] = False
    only: Annotated[Sequence[str], setting(help="Write up only these problems.", parser=str)] = ()
    skip: Annotated[Sequence[str], setting(help="Leave out these problems.", parser=str)] = ()

    def problems(self) -> list[Problem]:
        """Return the year's problems to write up; a UsageError for an unknown year or problem, or if none is left."""
        if self.year not in PROBLEMS:
            option = f"--year {self.year}" if self.year else "no --year"
            raise UsageError(f"{option}: choose from {', '.join(map(str, PROBLEMS))}")
        names = [problem.name for problem in PROBLEMS[self.year]]
        chosen = split_list(self.only, "--only", one_of(names)) if self.only else names
        left_out = split_list(self.skip, "--skip", one_of(names)) if self.skip else []
        names_kept = set(chosen) - set(left_out)
        problems = [problem for problem in PROBLEMS[self.year] if problem.name in names_kept]
        if not problems:
            raise UsageError("--only and --skip leave no problem")
        return problems

    def other_machine(self) -> tuple[str | None, float | None]:
        """Return the GPU and the bytes of memory to plan for instead of this machine's; None where not given.

        A UsageError refuses them without ``--dry-run``, a GPU with ``--device cpu``, and a memory that is no size.
        """
        for option, value in (("--gpu", self.gpu), ("--memory", self.memory)):
            if value is not None and not self.dry_run:
                raise UsageError(f"{option} {value}: plans for another machine than this one; add --dry-run")
        if self.gpu is not None and self.device == "cpu":
            raise UsageError(f"--gpu {self.gpu}: --device cpu has none; leave one of them out")
        return self.gpu, None if self.memory is None else read_memory_limit(self.memory, "--memory")


def report(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More files for --from, as a shell expands *.")
    ] = None,
    write_up: WriteUpOptions = WriteUpOptions(),
    format: Annotated[
        str | None,
        setting(
            "--format",
            help="html, pdf, markdown, latex, typst. Default: the file name's.",
            rich_help_panel=OUTPUT,
            autocompletion=among(tuple(dict.fromkeys(_FORMATS.values()))),
        ),
    ] = None,
    output: Annotated[
        Path | None, writes_file("--output", "-o", help="Write to this file, not to stdout.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Write up a year of the course: each problem with its command, machine, table, picture and answer in words.

    cs336sys report --year 2026 --from results/ --output writeup.pdf

    cs336sys report --year 2025 --run --output report.html

    cs336sys report --year 2026 --run --size tiny --device cpu --output tiny.html
    """
    year, size, run, folder = write_up.year, write_up.size, write_up.run, write_up.folder
    problems = write_up.problems()
    document_format = _document_format(format, output)
    if output is not None and output != STDOUT:
        check_writable(output, "--output")
    target = target_of(HANDOUTS[year], size, write_up.device, *write_up.other_machine())
    plan = planned(problems, target)
    if folder is not None and not run and not write_up.dry_run:
        raise UsageError(f"--folder {folder}: is where --run saves; give --run, or results with --from")
    source_names, failed_lines = [*write_up.source, *(files or [])], []
    # Before an hour of measuring, find out which files cannot be read.
    if (run or write_up.dry_run) and (unread := read_sources(source_files(source_names))[2]):
        raise UsageError(next(iter(unread.values())))
    if write_up.dry_run:
        for option, value in {"output": output, "format": format}.items():
            if value is not None:
                raise UsageError(f"--{option} {value}: --dry-run prints its plan; leave one of them out")
        emit([plan_table(plan, target)])
        return
    if not run and not source_names:
        raise UsageError("give results with --from, or measure them with --run")
    if run:
        run_folder = folder or Path(f"report-{year}")
        failed_lines = run_commands(plan, target, run_folder)  # Where none saves, the folder is no source.
        source_names = [*([str(run_folder)] if any(run_folder.glob("*.jsonl.gz")) else []), *source_names]
    is_complete = _write_up(source_files(source_names), problems, target, document_format, output)
    if failed_lines or not is_complete:
        raise typer.Exit(1)


def _write_up(
    sources: Mapping[Path, bool], problems: Sequence[Problem], target: Target, format: str, output: Path | None
) -> bool:
    """Write the document from these files (as of :func:`source_files`); return whether all named ones were readable."""
    from cs336sys.commands.report.document import build_document, write_document

    results, tests, unread = read_sources(sources)
    for path, reason in unread.items():
        say(f"{'error' if sources[path] else 'warning'}: {reason}; the report is written without it")
    evidences, faults = evidence_of(results, tests)
    document = build_document(problems, evidences, target, faults)
    for fault in document.faults:
        say(f"warning: {fault}")
    for note in write_document(document, format, output):
        say(f"warning: {note}")
    say(f"report: {len(problems)} problem{'s' * (len(problems) > 1)}, {document.count_words}")
    return not any(sources[path] for path in unread)


def _document_format(format: str | None, output: Path | None) -> str:
    """Return the document's format: that of ``--format``, or that of the file's ending; Markdown for stdout."""
    if format is None and output not in (None, STDOUT) and output.suffix.lower() not in _FORMATS:
        raise UsageError(f"--output {output}: the name must end in {', '.join(_FORMATS)}, or give --format")
    chosen = format or ("markdown" if output is None else _FORMATS.get(output.suffix.lower(), "markdown"))
    require_known("format", chosen, list(dict.fromkeys(_FORMATS.values())))
    if chosen == "pdf":
        if output in (None, STDOUT):
            raise UsageError("--format pdf: a PDF is written to a file, not to stdout; give --output writeup.pdf")
        find_browser(f"--output {output}")  # Without one this refuses now, and not after an hour of measuring.
    return chosen


def run_commands(plan: Sequence[tuple[Command, Sequence[str]]], target: Target, folder: Path) -> list[str]:
    """Run the plan's commands, saving into the folder; cells that its files hold already are not measured again.

    Return the command lines that failed. A lack of a GPU or of a program is no failure.
    """
    check_writable(folder / "results", "--folder")  # No such file is kept: this finds out whether files can be made.
    say(render([plan_table(plan, target)], "table").rstrip())
    failed = []
    for number, (command, _) in enumerate(plan, 1):
        reason = why_not(command, target)
        if reason is not None:
            say(f"report: {number} of {len(plan)} is left out, it {reason}: {command.line}")
            continue
        say(f"report: {number} of {len(plan)}: {command.line}")
        try:
            code = _run_and_save(command, folder)
        except KeyboardInterrupt:
            say(f"report: interrupted in {number} of {len(plan)}; --run continues from {folder}")
            raise
        if code not in (0, CapabilityError.exit_code):
            say(f"report: that ended with exit code {code}")
            failed.append(command.line)
    return failed


def _run_and_save(command: Command, folder: Path) -> int:
    """Run a command with its results and tables in files of the folder, and return its exit code."""
    name = command.arguments[0]
    # The same files in every run, so that a command finds the cells of an earlier one.
    stem = folder / f"{name}-{hashlib.sha256(command.line.encode()).hexdigest()[:8]}"
    arguments = [*command.arguments, "--save", f"{stem}.jsonl.gz", "--output", f"{stem}.md"]
    if name != "precision":  # Which takes seconds, without --resume; others go on with what their --save file holds.
        arguments.append("--resume")
    # The command does what its line says: no variables of its options, and an empty file instead of pyproject.toml.
    prefix = f"CS336SYS_{name.upper()}_"
    environment = {variable: value for variable, value in os.environ.items() if not variable.startswith(prefix)}
    environment["CS336SYS_CONFIG"] = os.devnull
    # Its tables go to standard error: standard output is the write-up's.
    program = Guarded(python_module("cs336sys", *arguments), stdout=2, env=environment)
    try:
        while not program.has_ended(1.0):  # It returns as soon as the program ends.
            pass
    finally:
        # Ctrl-C has reached this process alone. Every cell that was measured is in the file.
        program.kill()
    return program.process.returncode


_RESULTS = ("*.jsonl", "*.jsonl.gz", "*.xml")  # Files that are read of a folder, or that a pattern matches.

_MOST_NAMED = 5  # Files that cannot be read, named by the error; others are counted.


def source_files(names: Sequence[str]) -> dict[Path, bool]:
    """Find the files of ``--from``, by name, by pattern or in a folder, or raise a UsageError if a name finds none.

    Return each file with whether it was given by its own name, so that it is an error if it cannot be read.
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
    """Read results and outcomes of tests, or raise a UsageError if no file can be read.

    Return the results, the outcomes by the names of tests, and by file the reason why it cannot be read.
    """
    results: list[Results] = []
    tests: dict[str, str] = {}
    unread: dict[Path, str] = {}
    for path in files:
        try:
            if path.suffix == ".xml":
                outcomes = read_test_outcomes(path)
                contradicted = [name for name in outcomes if tests.get(name, outcomes[name]) != outcomes[name]]
                if listed := ", ".join(contradicted):
                    say(f"warning: {path}: contradicts an earlier file about {listed}; the later one counts")
                tests |= outcomes
            else:
                results.append(read_results(path))
                for sentence in passed_over_words(results[-1]):
                    say(f"warning: {path}: {sentence}")
        except UsageError as error:
            unread[path] = str(error)
    if unread and not results and not tests:
        reasons = list(unread.values())
        more = f"; and {len(reasons) - _MOST_NAMED} more" if len(reasons) > _MOST_NAMED else ""
        raise UsageError("; ".join(reasons[:_MOST_NAMED]) + more)
    return results, tests, unread
