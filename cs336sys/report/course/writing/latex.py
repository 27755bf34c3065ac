"""The write-up as LaTeX."""

from collections.abc import Iterable
from dataclasses import replace

from cs336sys.report.course.document import Block, Document
from cs336sys.report.course.writing.parts import DrawnPicture, absent_words, heading, introduction, is_long
from cs336sys.report.rendering import render
from cs336sys.report.tables import Table, one_line

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
