"""The write-up as Markdown."""

import re
from collections.abc import Sequence

from cs336sys.printable import printable
from cs336sys.report.course.document import Document
from cs336sys.report.course.writing.parts import DrawnPicture, absent_words, heading, introduction, is_long
from cs336sys.report.rendering import escape_markdown, render
from cs336sys.report.tables import one_line


def _markdown(text: str) -> str:
    """Running text: its code, between backticks, as code, and the rest without Markdown."""
    pieces = enumerate(one_line(text).split("`"))
    return "".join(f"`{piece}`" if number % 2 else escape_markdown(piece) for number, piece in pieces)


def _fenced(lines: Sequence[str]) -> str:
    """Lines of a shell as they are typed, between more backticks than they hold."""
    text = "\n".join(map(printable, lines))
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"


def to_markdown(document: Document, draw: DrawnPicture) -> str:
    """Pictures stand in files beside the document's."""
    lines = [f"# {document.title}", *map(_markdown, introduction(document))]
    for problem, sections in document.problems:
        lines.append(f"## {problem.name}: {problem.title}")
        for section in sections:
            lines += [f"### {heading(problem, section)}"] if section.letter else []
            for block in section.blocks:
                lines += [f"**{_markdown(block.machine)}**"] if block.machine else []
                lines += [_fenced(block.commands)] if block.commands else []
                sentences = [_markdown(one) for one in block.sentences]
                lines.append("\n".join(f"- {one}" for one in sentences) if is_long(block) else " ".join(sentences))
                lines += map(_markdown, block.missing)
                for table in block.tables:
                    text = render([table], "markdown")
                    lines.append(re.sub(r"^### (.*)$", r"*\1*", text, count=1, flags=re.MULTILINE).strip())
                lines += [
                    f"![{_markdown(picture.name)}]({path})" for picture in block.pictures if (path := draw(picture))
                ]
            if not section.blocks:
                lines.append(absent_words(section))
    lines += [f"- {_markdown(fault)}" for fault in document.faults]
    return "\n\n".join(lines) + "\n"
