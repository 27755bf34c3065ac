"""The write-up as Markdown, LaTeX, Typst and HTML."""

import sys
from collections.abc import Callable
from pathlib import Path

from cs336sys.errors import CapabilityError
from cs336sys.report.course.document import Document, Picture
from cs336sys.report.course.writing.latex import to_latex
from cs336sys.report.course.writing.markdown import to_markdown
from cs336sys.report.course.writing.page import to_html
from cs336sys.report.course.writing.typst import to_typst
from cs336sys.report.foreign_cells import FAULTS
from cs336sys.report.outputs import write_file, writing_stdout
from cs336sys.report.page import html_picture
from cs336sys.report.rendering import STDOUT


def write_document(document: Document, format: str, output: Path | None) -> list[str]:
    """Write the document to the file, or to stdout; pictures of other formats than html stand in files beside it.

    Returns:
        What was left out, in sentences.

    Raises:
        OutputError: it cannot be written; stdout then gets it.
    """
    notes: dict[str, None] = {}
    count = 0

    def drawn(make: Callable[[], str | None]) -> str | None:
        try:
            return make()
        except (ImportError, CapabilityError) as error:
            notes[f"pictures are left out: {error}"] = None
        except FAULTS as error:
            notes[f"a picture is left out, what is saved of it cannot be drawn: {error}"] = None
        return None

    def beside(picture: Picture) -> str | None:
        nonlocal count
        if output is None or output == STDOUT:
            return None
        path = output.with_name(f"{output.stem}-{count + 1:02}.png")
        picture.draw(path)
        count += 1
        return path.name

    if format == "html":
        text = to_html(document, lambda picture: drawn(lambda: html_picture(picture.draw, picture.name)))
    else:
        write = {"markdown": to_markdown, "latex": to_latex, "typst": to_typst}[format]
        text = write(document, lambda picture: drawn(lambda: beside(picture)))
    if output is None or output == STDOUT:
        with writing_stdout():
            sys.stdout.write(text)
    else:
        write_file(output, text.encode(), "--output")
    return list(notes)
