"""The write-up as Markdown, LaTeX, Typst and HTML."""

import html
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cs336sys.errors import CapabilityError
from cs336sys.report.course.document import Block, Document, Picture, Section
from cs336sys.report.course.problem import Problem
from cs336sys.report.outputs import write_file, writing_stdout
from cs336sys.report.page import html_page, html_picture, html_table
from cs336sys.report.registry import FAULTS
from cs336sys.report.render import STDOUT, escape_markdown, render, typst_string
from cs336sys.report.table import Table, one_line
from cs336sys.results.foreign import printable

# What all formats of a write-up say alike.


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


# The write-up as LaTeX.


# Rows that fit a printed page; a LaTeX table is not broken across pages.
_PAGE_ROWS = 40

_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_\allowbreak{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
}

_LATEX_HEAD = r"""\documentclass[10pt]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[margin=2cm]{geometry}
\usepackage{booktabs}
\usepackage{float}
\usepackage{graphicx}
\setlength{\parindent}{0pt}
\setlength{\parskip}{5pt}
\sloppy
\begin{document}
"""


def _latex(text: str) -> str:
    """Running text: its code, between backticks, in typewriter."""
    parts = []
    for number, piece in enumerate(one_line(text).split("`")):
        escaped = "".join(_LATEX_SPECIAL.get(character, character) for character in piece)
        # Two hyphens would become a dash.
        code = escaped.replace("--", "-{}-")
        parts.append(rf"\texttt{{{code}}}" if number % 2 else escaped)
    return "".join(parts)


def _latex_sentences(block: Block) -> str:
    if not is_long(block):
        return _latex(" ".join(block.sentences))
    items = "\n".join(rf"\item {_latex(sentence)}" for sentence in block.sentences)
    return "\\begin{itemize}\n" + items + "\n\\end{itemize}"


def to_latex(document: Document, draw: DrawnPicture) -> str:
    """A whole file for pdflatex or tectonic; pictures stand in files beside it."""
    lines = [
        _LATEX_HEAD + rf"\title{{{_latex(document.title)}}}\date{{}}\maketitle",
        *map(_latex, introduction(document)),
    ]
    for problem, sections in document.problems:
        lines.append(rf"\section*{{{_latex(f'{problem.name}: {problem.title}')}}}")
        for section in sections:
            lines += [rf"\subsection*{{{_latex(heading(problem, section))}}}"] if section.letter else []
            for block in section.blocks:
                lines += [rf"\textbf{{{_latex(block.machine)}}}"] if block.machine else []
                lines += [_latex(f"`{line}`") for line in block.commands]
                lines += [_latex_sentences(block), *map(_latex, block.missing)]
                lines += [_latex_table(part) for table in block.tables for part in _pages(table)]
                lines += [
                    rf"\includegraphics[width=\linewidth,height=0.85\textheight,keepaspectratio]{{{path}}}"
                    for picture in block.pictures
                    if (path := draw(picture))
                ]
            if not section.blocks:
                lines.append(_latex(absent_words(section)))
    lines += map(_latex, document.faults)
    return "\n\n".join([*lines, r"\end{document}"]) + "\n"


def _pages(table: Table) -> Iterable[Table]:
    for start in range(0, max(1, len(table.rows)), _PAGE_ROWS):
        last = start + _PAGE_ROWS >= len(table.rows)
        title = table.title if start == 0 else f"{table.title} (continued)"
        yield replace(
            table, title=title, rows=table.rows[start : start + _PAGE_ROWS], notes=table.notes if last else ()
        )


def _latex_table(table: Table) -> str:
    text = render([table], "latex").strip()
    text = text.replace(r"\begin{table}", r"\begin{table}[H]").replace("~", r"\textasciitilde{}")
    # Made smaller where it is wider than the page.
    start = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\begin{tabular}"
    return text.replace(r"\begin{tabular}", start).replace(r"\end{tabular}", r"\end{tabular}}")


# The write-up as Markdown.


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


# The write-up as one HTML page.


_STYLE = """
nav ol { columns: 26em; } h2 small { display: block; font-weight: normal; }
h4 { margin: 1.2em 0 0.3em; font-weight: 600; }
pre { white-space: pre-wrap; margin: 0.4em 0; } .machine { font-weight: 600; margin: 1em 0 0; break-after: avoid; }
code { overflow-wrap: anywhere; } .absent { border-left: 3px solid #c60; padding-left: 0.6em; }
@media print { nav { display: none; } }
"""


def _html(text: str) -> str:
    pieces = enumerate(html.escape(text).split("`"))
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in pieces)


def to_html(document: Document, draw: Callable[[Picture], str | None]) -> str:
    """One page with its pictures inside; nothing of it is loaded from anywhere.

    Args:
        draw: the HTML of a picture.
    """
    links = "".join(f'<li><a href="#{problem.name}">{problem.name}</a></li>' for problem, _ in document.problems)
    parts = [
        *(f"<p>{_html(sentence)}</p>" for sentence in introduction(document)),
        f"<nav><details open><summary>Problems</summary><ol>{links}</ol></details></nav>",
    ]
    for problem, sections in document.problems:
        title = f"{html.escape(problem.name)} <small>{html.escape(problem.title)}</small>"
        parts.append(f'<section id="{problem.name}"><h2>{title}</h2>')
        for section in sections:
            parts += [f"<h3>({section.letter})</h3>"] if section.letter else []
            for block in section.blocks:
                parts += _html_block(block, draw)
            if not section.blocks:
                parts.append(f'<p class="absent">{_html(absent_words(section))}</p>')
        parts.append("</section>")
    parts += [f'<p class="absent">{_html(fault)}</p>' for fault in document.faults]
    return html_page(document.title, parts, _STYLE)


def _html_block(block: Block, draw: Callable[[Picture], str | None]) -> list[str]:
    parts = [f'<p class="machine">{html.escape(block.machine)}</p>'] if block.machine else []
    parts += [f"<pre>{html.escape(line)}</pre>" for line in block.commands]
    if is_long(block):
        parts.append("<ul>" + "".join(f"<li>{_html(sentence)}</li>" for sentence in block.sentences) + "</ul>")
    else:
        parts.append(f"<p>{_html(' '.join(block.sentences))}</p>")
    parts += [f'<p class="absent">{_html(one)}</p>' for one in block.missing]
    parts += [html_table(table, "h4") for table in block.tables]
    return parts + [drawn for picture in block.pictures if (drawn := draw(picture))]


# The write-up as Typst.


_TYPST_HEAD = """#set page(margin: 2cm, numbering: "1")
#set text(size: 10pt)
#set par(justify: false)
#show figure: set block(breakable: true)
#show table: set text(size: 6.5pt)
"""


def _typst(text: str) -> str:
    pieces = enumerate(text.split("`"))
    return " ".join(
        f"#raw({typst_string(piece)})" if number % 2 else f"#text({typst_string(piece)})"
        for number, piece in pieces
        if piece
    )


def _typst_sentences(block: Block) -> str:
    if not is_long(block):
        return _typst(" ".join(block.sentences))
    return "\n".join(f"- {_typst(sentence)}" for sentence in block.sentences)


def to_typst(document: Document, draw: DrawnPicture) -> str:
    """A whole file for typst; pictures stand in files beside it."""
    lines = [_TYPST_HEAD + f"= #text({typst_string(document.title)})", *map(_typst, introduction(document))]
    for problem, sections in document.problems:
        lines.append(f"== #text({typst_string(f'{problem.name}: {problem.title}')})")
        for section in sections:
            lines += [f"=== #text({typst_string(heading(problem, section))})"] if section.letter else []
            for block in section.blocks:
                lines += [f"*#text({typst_string(block.machine)})*"] if block.machine else []
                lines += [f"#raw({typst_string(line)})" for line in block.commands]
                lines += [_typst_sentences(block), *map(_typst, block.missing)]
                lines += [render([table], "typst").strip() for table in block.tables]
                lines += [
                    f"#image({typst_string(path)}, width: 100%)"
                    for picture in block.pictures
                    if (path := draw(picture))
                ]
            if not section.blocks:
                lines.append(_typst(absent_words(section)))
    lines += map(_typst, document.faults)
    return "\n\n".join(lines) + "\n"


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
