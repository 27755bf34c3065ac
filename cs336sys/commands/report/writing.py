"""The write-up as Markdown, LaTeX, Typst and HTML."""

import html
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from cs336sys.commands.registry import FAULTS
from cs336sys.commands.report.document import Document
from cs336sys.errors import CapabilityError
from cs336sys.results.foreign import printable
from cs336sys.tables.outputs import write_file, writing_stdout
from cs336sys.tables.page import find_browser, html_page, html_picture, html_table, print_page
from cs336sys.tables.render import STDOUT, escape_latex, escape_markdown, render, typst_string
from cs336sys.tables.table import Table, one_line


def _document_head(ending: str) -> str:
    return (files("cs336sys.commands.report") / "heads" / f"document.{ending}").read_text().rstrip()


def _fenced(lines: Sequence[str]) -> str:
    """Put lines of a shell between more backticks than they hold."""
    text = "\n".join(map(printable, lines))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


# Rows that fit on a printed page: LaTeX breaks no table across pages.
_PAGE_ROWS = 40


def _latex_markup(text: str) -> str:
    return escape_latex(text).replace(r"\_", r"\_\allowbreak{}")


def _latex_code(text: str) -> str:
    # Two hyphens would become a dash.
    return rf"\texttt{{{_latex_markup(text).replace('--', '-{}-')}}}"


def _latex_pages(table: Table) -> str:
    """Write a table as LaTeX tables of at most a page each, the title above all, the notes below the last."""
    pages = []
    for start in range(0, max(1, len(table.rows)), _PAGE_ROWS):
        end = start + _PAGE_ROWS
        title = table.title if start == 0 else f"{table.title} (continued)"
        notes = table.notes if end >= len(table.rows) else ()
        text = render([replace(table, title=title, rows=table.rows[start:end], notes=notes)], "latex").strip()
        text = text.replace(r"\begin{table}", r"\begin{table}[H]")
        # Made smaller where it is wider than the page.
        tabular = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\begin{tabular}"
        pages.append(text.replace(r"\begin{tabular}", tabular).replace(r"\end{tabular}", r"\end{tabular}}"))
    return "\n\n".join(pages)


def _typst_markup(text: str) -> str:
    return f"#text({typst_string(text)})"


def _typst_code(text: str) -> str:
    return f"#raw({typst_string(text)})"


_LATEX_PICTURE = r"\includegraphics[width=\linewidth,height=0.85\textheight,keepaspectratio]{%s}"

# By format, the markup of each kind of piece: text and code get plain text, a problem its name, a part its
# problem's name and letter, a picture its file (or HTML) and caption, and the others text that is marked up already.
_MARKUPS: dict[str, dict[str, Callable[..., str]]] = {
    "markdown": {
        "text": escape_markdown,
        "code": "`{}`".format,
        "problem": "## {}".format,
        "part": "### {} ({})".format,
        "machine": "**{}**".format,
        "commands": _fenced,
        "table": lambda table: re.sub("^### (.*)$", r"*\1*", render([table], "markdown"), count=1, flags=re.M).strip(),
        "picture": lambda path, name: f"![{escape_markdown(name)}]({path})",
        "fault": "- {}".format,
        "document": lambda title, body: f"# {title}\n\n{body}\n",
    },
    "latex": {
        "text": _latex_markup,
        "code": _latex_code,
        "problem": lambda name: rf"\section*{{{_latex_markup(name)}}}",
        "part": lambda name, letter: rf"\subsection*{{{_latex_markup(f'{name} ({letter})')}}}",
        "machine": r"\textbf{{{}}}".format,
        "commands": lambda lines: "\n\n".join(map(_latex_code, lines)),
        "table": _latex_pages,
        "picture": lambda path, name: _LATEX_PICTURE % path,
        "document": lambda title, body: f"{_document_head('tex') % title}\n\n{body}\n\n\\end{{document}}\n",
    },
    "typst": {
        "text": _typst_markup,
        "code": _typst_code,
        "problem": lambda name: f"== {_typst_markup(name)}",
        "part": lambda name, letter: f"=== {_typst_markup(f'{name} ({letter})')}",
        "machine": "*{}*".format,
        "commands": lambda lines: "\n\n".join(map(_typst_code, lines)),
        "table": lambda table: render([table], "typst").strip(),
        "picture": lambda path, name: f"#image({typst_string(path)}, width: 100%)",
        "document": lambda title, body: f"{_document_head('typ') % title}\n\n{body}\n",
    },
    "html": {
        "text": html.escape,
        "code": lambda text: f"<code>{html.escape(text)}</code>",
        "problem": '<h2 id="{0}">{0}</h2>'.format,
        "part": lambda name, letter: f"<h3>({letter})</h3>",
        "machine": '<p class="machine">{}</p>'.format,
        "commands": lambda lines: "\n\n".join(f"<pre>{html.escape(line)}</pre>" for line in lines),
        "table": lambda table: html_table(table, "h4"),
        "picture": lambda drawn, name: drawn,
        "paragraph": "<p>{}</p>".format,
        "absent": '<p class="absent">{}</p>'.format,
        "fault": '<p class="absent">{}</p>'.format,
        "contents": lambda names: _html_contents(names),
        "document": lambda title, body: html_page(title, [body], _document_head("css")),
    },
}

# Formats that are one page with its pictures.
_PAGES = ("html", "pdf")

# Takes a picture's name and the function that draws it to a file, and returns the file's name or the picture's HTML;
# None for a picture that is left out.
PlacePicture = Callable[[str, Callable[[Path], None]], str | None]


def document_text(document: Document, format: str, place_picture: PlacePicture) -> str:
    """Return the document in one of the formats of :data:`_MARKUPS`."""
    markup = _MARKUPS[format]

    def inline(text: str) -> str:
        """Mark up running text, whose code stands between backticks."""
        # Text and code alternate, so that code has the odd numbers.
        pieces = enumerate(one_line(text).split("`"))
        marked = (markup["code" if number % 2 else "text"](piece) for number, piece in pieces if piece)
        return (" " if format == "typst" else "").join(marked)

    def mark_up(kind: str, *content: Any) -> str:
        if kind in ("machine", *_TEXTS):
            content = (inline(*content),)
        return markup.get(kind, "{}".format)(*content)

    pieces = [mark_up(*piece) for piece in _pieces(document, place_picture) if piece[0] in {*_TEXTS, *markup}]
    title = document.title if format == "html" else inline(document.title)
    return markup["document"](title, "\n\n".join(pieces))


# Kinds of pieces that are text without markup of their own where a format has none for them.
_TEXTS = ("paragraph", "absent", "fault")


def _html_contents(names: Sequence[str]) -> str:
    links = "".join(f'<li><a href="#{name}">{name}</a></li>' for name in names)
    return f"<nav><details open><summary>Problems</summary><ol>{links}</ol></details></nav>"


def _pieces(document: Document, place_picture: PlacePicture) -> Iterator[tuple]:
    """Yield the document's pieces from top to bottom: a kind of :data:`_MARKUPS` and what its markup takes."""
    count = len(document.problems)
    yield "paragraph", f"{count} problem{'s' * (count != 1)} in the handout's order, {document.count_words}."
    if document.machines:
        machines = f"{len(document.machines)} machines, kept apart: " * (len(document.machines) > 1)
        yield "paragraph", f"Measured on {machines}{'; '.join(document.machines)}."
    yield "paragraph", "Every sentence is computed from the saved numbers by `cs336sys report`."
    yield "contents", [problem.name for problem, _ in document.problems]
    for problem, sections in document.problems:
        yield "problem", problem.name
        for section in sections:
            if section.letter:
                yield "part", problem.name, section.letter
            for answer in section.answers:
                yield from [("machine", answer.machine)] if answer.machine else []
                yield from [("commands", answer.commands)] if answer.commands else []
                yield from (("table", table) for table in answer.tables)
                yield from (("paragraph", sentence) for sentence in answer.sentences)
                yield from (("absent", item) for item in answer.missing)
                placed = ((place_picture(name, draw), name) for name, draw in answer.pictures.items())
                yield from (("picture", picture, name) for picture, name in placed if picture)
            if not section.answers:
                lines = ", ".join(f"`{line}`" for line in section.measuring_lines)
                remedy = f". Measure it with {lines}" if lines else ", and no command for this machine gives it"
                yield "absent", f"No data{remedy}."
    yield from (("fault", fault) for fault in document.faults)


def write_document(document: Document, format: str, output: Path | None) -> list[str]:
    """Write the document to the file, or to stdout; pictures go to files next to it, or into the page or PDF itself.

    Returns:
        A sentence for each reason for which pictures were left out.

    Raises:
        OutputError: it cannot be written; stdout then gets it.
    """
    file = None if output == STDOUT else output
    notes: list[str] = []
    file_names: list[str] = []

    def place_picture(name: str, draw: Callable[[Path], None]) -> str | None:
        """Draw a picture into the page or to the next file; of the other formats, stdout gets no pictures."""
        try:
            if format in _PAGES:
                return html_picture(draw, name)
            if file is not None:
                path = file.with_name(f"{file.stem}-{len(file_names) + 1:02}.png")
                draw(path)
                file_names.append(path.name)
                return path.name
        except (ImportError, CapabilityError) as error:
            notes.append(f"pictures are left out: {error}")
        except FAULTS as error:
            notes.append(f"left out a picture, because its saved data cannot be drawn: {error}")
        return None

    text = document_text(document, "html" if format in _PAGES else format, place_picture)
    if file is None:
        with writing_stdout():
            sys.stdout.write(text)
    else:
        content = print_page(text, find_browser("--output")) if format == "pdf" else text.encode()
        write_file(file, content, "--output")
    return list(dict.fromkeys(notes))
