"""The write-up as one HTML page."""

import html
from collections.abc import Callable

from cs336sys.report.course.document import Block, Document, Picture
from cs336sys.report.course.writing.parts import absent_words, introduction, is_long
from cs336sys.report.page import html_page, html_table

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
