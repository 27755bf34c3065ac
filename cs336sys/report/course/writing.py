"""The write-up as Markdown, LaTeX, Typst and HTML."""

import html
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from cs336sys.errors import CapabilityError
from cs336sys.report.course.document import Document, Picture
from cs336sys.report.course.problem import Problem
from cs336sys.report.outputs import write_file, writing_stdout
from cs336sys.report.page import find_browser, html_page, html_picture, html_table, print_page
from cs336sys.report.registry import FAULTS
from cs336sys.report.render import STDOUT, escape_markdown, render, typst_string
from cs336sys.report.table import Table, one_line
from cs336sys.results.foreign import printable


@dataclass(frozen=True)
class Markup:
    """A format's markup for the pieces of a document; ``%s`` is text that is marked up already.

    Attributes:
        plain, code: running text, and its code between backticks.
        table: a table, in pieces that fit a page.
        absent, fault: what is missing, and what could not be shown.
    """

    plain: Callable[[str], str]
    code: Callable[[str], str]
    problem: Callable[[Problem], str]
    part: Callable[[Problem, str], str]
    machine: str
    commands: Callable[[Sequence[str]], list[str]]
    table: Callable[[Table], Iterable[str]]
    picture: Callable[[str, str], str]
    head: str = ""
    end: str = ""
    between: str = ""
    paragraph: str = "%s"
    absent: str = "%s"
    fault: str = "%s"

    def inline(self, text: str) -> str:
        """Running text with its code between backticks."""
        pieces = enumerate(one_line(text).split("`"))
        marked = (self.code(piece) if number % 2 else self.plain(piece) for number, piece in pieces if piece)
        return self.between.join(marked)


def _document_head(ending: str) -> str:
    return (files("cs336sys.report.course") / "heads" / f"document.{ending}").read_text().rstrip()


def _fenced(lines: Sequence[str]) -> list[str]:
    """Lines of a shell between more backticks than they hold."""
    text = "\n".join(map(printable, lines))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}sh\n{text}\n{fence}"] if lines else []


_MARKDOWN = Markup(
    plain=escape_markdown,
    code="`{}`".format,
    problem=lambda problem: f"## {problem.name}: {problem.title}",
    part=lambda problem, letter: f"### {problem.name} ({letter})",
    machine="**%s**",
    commands=_fenced,
    table=lambda table: [re.sub("^### (.*)$", r"*\1*", render([table], "markdown"), count=1, flags=re.M).strip()],
    picture=lambda path, name: f"![{escape_markdown(name)}]({path})",
    head="# %s",
    fault="- %s",
)

# Rows that fit a printed page; a LaTeX table is not broken across pages.
_PAGE_ROWS = 40

_LATEX_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"_": r"\_\allowbreak{}", "<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$"},
}


def _latex_markup(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


def _latex_code(text: str) -> str:
    # Two hyphens would become a dash.
    return rf"\texttt{{{_latex_markup(text).replace('--', '-{}-')}}}"


def _latex_pages(table: Table) -> Iterator[str]:
    for start in range(0, max(1, len(table.rows)), _PAGE_ROWS):
        end = start + _PAGE_ROWS
        title = table.title if start == 0 else f"{table.title} (continued)"
        notes = table.notes if end >= len(table.rows) else ()
        text = render([replace(table, title=title, rows=table.rows[start:end], notes=notes)], "latex").strip()
        text = text.replace(r"\begin{table}", r"\begin{table}[H]").replace("~", r"\textasciitilde{}")
        # Made smaller where it is wider than the page.
        tabular = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\begin{tabular}"
        yield text.replace(r"\begin{tabular}", tabular).replace(r"\end{tabular}", r"\end{tabular}}")


_LATEX = Markup(
    plain=_latex_markup,
    code=_latex_code,
    problem=lambda problem: rf"\section*{{{_latex_markup(f'{problem.name}: {problem.title}')}}}",
    part=lambda problem, letter: rf"\subsection*{{{_latex_markup(f'{problem.name} ({letter})')}}}",
    machine=r"\textbf{%s}",
    commands=lambda lines: list(map(_latex_code, lines)),
    table=_latex_pages,
    picture=lambda path, name: rf"\includegraphics[width=\linewidth,height=0.85\textheight,keepaspectratio]{{{path}}}",
    head=_document_head("tex"),
    end=r"\end{document}",
)


def _typst_markup(text: str) -> str:
    return f"#text({typst_string(text)})"


_TYPST = Markup(
    plain=_typst_markup,
    code=lambda text: f"#raw({typst_string(text)})",
    problem=lambda problem: f"== {_typst_markup(f'{problem.name}: {problem.title}')}",
    part=lambda problem, letter: f"=== {_typst_markup(f'{problem.name} ({letter})')}",
    machine="*%s*",
    commands=lambda lines: [f"#raw({typst_string(line)})" for line in lines],
    table=lambda table: [render([table], "typst").strip()],
    picture=lambda path, name: f"#image({typst_string(path)}, width: 100%)",
    head=_document_head("typ"),
    between=" ",
)

_HTML = Markup(
    plain=html.escape,
    code=lambda text: f"<code>{html.escape(text)}</code>",
    problem=lambda problem: f'<h2 id="{problem.name}">{problem.name} <small>{html.escape(problem.title)}</small></h2>',
    part=lambda problem, letter: f"<h3>({letter})</h3>",
    machine='<p class="machine">%s</p>',
    commands=lambda lines: [f"<pre>{html.escape(line)}</pre>" for line in lines],
    table=lambda table: [html_table(table, "h4")],
    picture=lambda drawn, name: drawn,
    paragraph="<p>%s</p>",
    absent='<p class="absent">%s</p>',
    fault='<p class="absent">%s</p>',
)

# Formats that are one page with its pictures.
_PAGES = ("html", "pdf")

_MARKUPS = {"markdown": _MARKDOWN, "latex": _LATEX, "typst": _TYPST, "html": _HTML}


def introduction(document: Document) -> list[str]:
    """Introduce the document: what it holds and where it was measured."""
    count = len(document.problems)
    problems = f"{count} problem{'s' * (count != 1)}"
    machines = f"{len(document.machines)} machines, kept apart: " * (len(document.machines) > 1)
    measured = [f"Measured on {machines}{'; '.join(document.machines)}."] if document.machines else []
    first = f"{problems} in the handout's order, {document.count_words}."
    return [first, *measured, "Every sentence is computed from the saved numbers by `cs336sys report`."]


def document_text(document: Document, format: str, draw: Callable[[Picture], str | None]) -> str:
    """The document in a format; ``draw`` gives a picture's file, or its HTML, and None for one that is left out."""
    markup = _MARKUPS[format]
    parts = [markup.paragraph % markup.inline(sentence) for sentence in introduction(document)]
    body = _body(document, markup, draw)
    if format == "html":
        links = "".join(f'<li><a href="#{problem.name}">{problem.name}</a></li>' for problem, _ in document.problems)
        parts.append(f"<nav><details open><summary>Problems</summary><ol>{links}</ol></details></nav>")
        return html_page(document.title, [*parts, *body], _document_head("css"))
    head, end = markup.head % markup.inline(document.title), [markup.end] * bool(markup.end)
    return "\n\n".join([head, *parts, *body, *end]) + "\n"


def _body(document: Document, markup: Markup, draw: Callable[[Picture], str | None]) -> Iterator[str]:
    for problem, sections in document.problems:
        yield markup.problem(problem)
        for section in sections:
            if section.letter:
                yield markup.part(problem, section.letter)
            for block in section.blocks:
                if block.machine:
                    yield markup.machine % markup.inline(block.machine)
                yield from markup.commands(block.commands)
                for table in block.tables:
                    yield from markup.table(table)
                yield from (markup.paragraph % markup.inline(sentence) for sentence in block.sentences)
                yield from (markup.absent % markup.inline(lacking) for lacking in block.missing)
                drawn = ((draw(picture), picture.name) for picture in block.pictures)
                yield from (markup.picture(path, name) for path, name in drawn if path)
            if not section.blocks:
                source = ". Measure it with " + ", ".join(f"`{line}`" for line in section.absent)
                why = source if section.absent else ", and no command for this machine gives it"
                yield markup.absent % markup.inline(f"No data{why}.")
    yield from (markup.fault % markup.inline(fault) for fault in document.faults)


def write_document(document: Document, format: str, output: Path | None) -> list[str]:
    """Write the document to the file, or to stdout; pictures stand in files next to it, or inside of a page and a PDF.

    Returns:
        What was left out, in sentences.

    Raises:
        OutputError: it cannot be written; stdout then gets it.
    """
    file = None if output == STDOUT else output
    notes: list[str] = []
    names: list[str] = []

    def drawn(picture: Picture) -> str | None:
        try:
            if format in _PAGES:
                return html_picture(picture.draw, picture.name)
            if file is not None:
                path = file.with_name(f"{file.stem}-{len(names) + 1:02}.png")
                picture.draw(path)
                names.append(path.name)
                return path.name
        except (ImportError, CapabilityError) as error:
            notes.append(f"pictures are left out: {error}")
        except FAULTS as error:
            notes.append(f"left out a picture, because its saved data cannot be drawn: {error}")
        return None

    text = document_text(document, "html" if format in _PAGES else format, drawn)
    if file is None:
        with writing_stdout():
            sys.stdout.write(text)
    else:
        content = print_page(text, find_browser("--output")) if format == "pdf" else text.encode()
        write_file(file, content, "--output")
    return list(dict.fromkeys(notes))
