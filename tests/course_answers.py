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


def changed(files: list[Results], choose: Callable[[Cell], bool], change: Callable[[Cell], Cell]) -> list[Results]:
    """The files with some cells changed."""
    return [Results(file.runs, tuple(change(cell) if choose(cell) else cell for cell in file.cells)) for file in files]


def scaled(cell: Cell, factor: float) -> Cell:
    samples = {
        name: Samples(one.unit, one.method, tuple(factor * value for value in one.measured))
        for name, one in cell.samples.items()
    }
    return replace(cell, samples=samples)
