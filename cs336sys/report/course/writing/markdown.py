"""The write-up as Markdown."""

import re

from cs336sys.report.course.document import Document
from cs336sys.report.course.writing.parts import DrawnPicture, absent_words, heading, introduction, is_long
from cs336sys.report.rendering import render


def to_markdown(document: Document, draw: DrawnPicture) -> str:
    """Pictures stand in files beside the document's."""
    lines = [f"# {document.title}", *introduction(document)]
    for problem, sections in document.problems:
        lines.append(f"## {problem.name}: {problem.title}")
        for section in sections:
            lines += [f"### {heading(problem, section)}"] if section.letter else []
            for block in section.blocks:
                lines += [f"**{block.machine}**"] if block.machine else []
                lines += ["```sh\n" + "\n".join(block.commands) + "\n```"] if block.commands else []
                lines.append(
                    "\n".join(f"- {one}" for one in block.sentences) if is_long(block) else " ".join(block.sentences)
                )
                lines += block.missing
                for table in block.tables:
                    text = render([table], "markdown")
                    lines.append(re.sub(r"^### (.*)$", r"*\1*", text, count=1, flags=re.MULTILINE).strip())
                lines += [f"![{picture.name}]({path})" for picture in block.pictures if (path := draw(picture))]
            if not section.blocks:
                lines.append(absent_words(section))
    lines += [f"- {fault}" for fault in document.faults]
    return "\n\n".join(lines) + "\n"
