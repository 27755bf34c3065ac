"""Saved results, the answers that write-ups compute from them, and results with a changed figure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from cs336sys.commands.report.answer import Answer
from cs336sys.commands.report.document import Document, build_document
from cs336sys.commands.report.evidence import evidence_of
from cs336sys.commands.report.handouts import PROBLEMS
from cs336sys.commands.report.options import read_sources, source_files
from cs336sys.commands.report.problem import HANDOUTS, Target
from cs336sys.results.model import Cell, Results, Samples, read_results

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def saved(*names: str) -> list[Results]:
    return [read_results(RESULTS / f"{name}.jsonl.gz") for name in names]


def document(year: int, files: list[Results], *names: str, tests: Mapping[str, str] | None = None) -> Document:
    evidences, faults = evidence_of(files, tests or {})
    problems = [problem for problem in PROBLEMS[year] if not names or problem.name in names]
    return build_document(problems, evidences, Target(HANDOUTS[year]), faults)


@cache
def written(year: int) -> Document:
    """The write-up of all saved results and outcomes."""
    results, tests, _ = read_sources(source_files([str(RESULTS)]))
    return document(year, results, tests=tests)


def answers(
    year: int, files: list[Results], name: str, letter: str = "", tests: Mapping[str, str] | None = None
) -> Sequence[Answer]:
    """The blocks of one part; ``tests``: outcomes of the course's tests."""
    (of_problem,) = document(year, files, name, tests=tests).problems
    return next(section.answers for section in of_problem[1] if section.letter == letter)


def words(blocks: Iterable[Answer]) -> str:
    return " ".join(sentence for block in blocks for sentence in block.sentences)


def told(year: int, files: list[Results], name: str, letter: str = "") -> str:
    return words(answers(year, files, name, letter))


def having(**settings: object) -> Callable[[Cell], bool]:
    """Choose cells by settings, each one value or a tuple of them."""
    wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
    return lambda cell: all(cell.configuration.get(name) in values for name, values in wanted.items())


def kept(files: list[Results], choose: Callable[[Cell], bool]) -> list[Results]:
    return [replace(file, cells=tuple(filter(choose, file.cells))) for file in files]


def with_derived(cell: Cell, **values: object) -> Cell:
    return replace(cell, derived=cell.derived | values)


def with_measured(cell: Cell, series: str, *values: float) -> Cell:
    return replace(cell, samples=cell.samples | {series: replace(cell.samples[series], measured=values)})


def of_run(run_id: str, file: Results, *cells: Cell, **more: object) -> Results:
    """The cells as those of another run like the file's first."""
    run = replace(next(iter(file.runs.values())), run_id=run_id, **more)
    return Results({run_id: run}, tuple(replace(cell, run_id=run_id) for cell in cells))


def changed(files: list[Results], choose: Callable[[Cell], bool], change: Callable[[Cell], Cell]) -> list[Results]:
    """The files with some cells changed."""
    return [Results(file.runs, tuple(change(cell) if choose(cell) else cell for cell in file.cells)) for file in files]


def scaled(cell: Cell, factor: float) -> Cell:
    samples = {
        name: Samples(one.unit, one.method, tuple(factor * value for value in one.measured))
        for name, one in cell.samples.items()
    }
    return replace(cell, samples=samples)
