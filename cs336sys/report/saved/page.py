"""The page of ``show --html``: the tables and pictures of saved results, by the invocation that measured them."""

import html
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.report.page import html_page, html_picture, html_table
from cs336sys.report.saved.commands import Pictures
from cs336sys.report.saved.invocation import Invocation
from cs336sys.report.tables import Table


@dataclass(frozen=True)
class Shown:
    """What is shown of an invocation."""

    invocation: Invocation
    tables: Sequence[Table]
    pictures: Pictures


def saved_page(title: str, shown: Sequence[Shown]) -> str:
    """The page's text.

    Raises:
        OutputError: a picture cannot be drawn, because no file can be written.
    """
    return html_page(title, [part for one in shown for part in _parts(one)])


def _parts(shown: Shown) -> list[str]:
    invocation = shown.invocation
    heading = html.escape(f"{invocation.command}, {invocation.name}")
    # What was not run by the command line has arguments that begin with something else.
    lines = [shlex.join(["cs336sys", *run.arguments]) for run in invocation.runs if run.arguments]
    return [
        f"<h2>{heading}</h2>",
        *(f"<pre>{html.escape(line)}</pre>" for line in dict.fromkeys(lines)),
        *(html_picture(draw, f"{invocation.command}: {name}") for name, draw in shown.pictures.items()),
        *(html_table(table, "h3") for table in shown.tables),
    ]
