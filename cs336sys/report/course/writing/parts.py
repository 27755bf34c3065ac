"""What all formats of a write-up say alike."""

from collections.abc import Callable

from cs336sys.report.course.document import Block, Document, Picture, Section
from cs336sys.report.course.problem import Problem

_PARAGRAPH_SENTENCES = 3

DrawnPicture = Callable[[Picture], str | None]


def heading(problem: Problem, section: Section) -> str:
    """``nsys_profile (a)``."""
    return f"{problem.name} ({section.letter})" if section.letter else problem.name


def introduction(document: Document) -> list[str]:
    """What the document holds and where it was measured."""
    parts, answered = document.counts
    count = len(document.problems)
    problems = "1 problem" if count == 1 else f"{count} problems"
    sentences = [f"{problems} in the handout's order, {answered} of {parts} parts answered."]
    if len(document.machines) > 1:
        sentences.append(f"Measured on {len(document.machines)} machines, kept apart: {'; '.join(document.machines)}.")
    elif document.machines:
        sentences.append(f"Measured on {document.machines[0]}.")
    sentences.append("Every sentence is computed from the saved numbers by `cs336sys report`.")
    return sentences


def absent_words(section: Section) -> str:
    """Of a part without data: which command gives it."""
    if not section.absent:
        return "No data, and no command for this machine gives it."
    return "No data. It comes from " + ", ".join(f"`{line}`" for line in section.absent) + "."


def is_long(block: Block) -> bool:
    """More sentences than a paragraph holds are listed."""
    return len(block.sentences) > _PARAGRAPH_SENTENCES
