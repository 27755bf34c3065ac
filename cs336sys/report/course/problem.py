"""What a handout asks and what an answer is: the data that documents and plans are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.target import Command, Handout, Target
from cs336sys.report.saved import Pictures
from cs336sys.report.tables import Table
from cs336sys.results import Run


@dataclass(frozen=True)
class Answer:
    """What is written below a part of a problem.

    Attributes:
        sentences: computed from the numbers.
        tables: trimmed to what is asked.
        pictures: by name, each drawn to a file.
        runs: that measured what the sentences say; none for what follows from arithmetic.
        missing: what is asked and was not measured.
    """

    sentences: Sequence[str]
    tables: Sequence[Table] = ()
    pictures: Pictures = field(default_factory=dict)
    runs: Sequence[Run] = ()
    missing: Sequence[str] = ()


def runs_of(groups: Sequence[Found]) -> list[Run]:
    """The invocations that measured the cells, each once."""
    runs = {run.run_id: run for group in groups for run in group.invocation.runs[-1:]}
    return list(runs.values())


def pictures_of(groups: Sequence[Found], *names: str) -> Pictures:
    """The pictures of all of them (of these names, if any is given), numbered where several have one of a name."""
    found: dict[str, Callable[[Path], None]] = {}
    for group in groups:
        for name, draw in group.pictures(*names).items():
            number = 1 + sum(known.split(",")[0] == name for known in found)
            found[name if number == 1 else f"{name}, {number}"] = draw
    return found


def no_commands(target: Target) -> list[Command]:
    """Of what needs no measurement."""
    return []


@dataclass(frozen=True)
class Part:
    """One lettered question.

    Attributes:
        letter: ``a``; empty where the problem is one question.
        answer: from the saved cells of one machine; None where they hold nothing of it.
        commands: that give what the answer is computed from.
    """

    letter: str
    answer: Callable[[Evidence, Handout], Answer | None]
    commands: Callable[[Target], Sequence[Command]] = no_commands


@dataclass(frozen=True)
class Problem:
    """A problem by the handout's name.

    Attributes:
        name: ``nsys_profile``.
        title: in words.
    """

    name: str
    title: str
    parts: Sequence[Part]
