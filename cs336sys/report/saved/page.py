"""The page of ``show --html``: the tables and pictures of saved results, by the invocation that measured them."""

import html
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336sys.errors import UsageError
from cs336sys.report.page import html_page, html_picture, html_table
from cs336sys.report.saved.commands import Pictures
from cs336sys.report.saved.invocation import Invocation
from cs336sys.report.tables import Table

# A picture takes a second, and a page may have hundreds.
_SILENT_S = 5.0


@dataclass(frozen=True)
class Shown:
    """What is shown of an invocation."""

    invocation: Invocation
    tables: Sequence[Table]
    pictures: Pictures


def saved_page(title: str, shown: Sequence[Shown], say: Callable[[str], None]) -> str:
    """The page's text.

    Args:
        say: is told which pictures cannot be drawn, and how many are, for those who wait.

    Raises:
        OutputError: a picture cannot be drawn, because no file can be written.
    """
    total = sum(len(one.pictures) for one in shown)
    drawn, said = 0, time.monotonic()

    def picture(draw: Callable[[Path], None], caption: str) -> str:
        nonlocal drawn, said
        try:
            part = html_picture(draw, caption)
        except UsageError as error:
            say(f"warning: {error}")
            part = f'<p class="note">{html.escape(str(error))}</p>'
        drawn += 1
        if drawn < total and time.monotonic() - said >= _SILENT_S:
            said = time.monotonic()
            say(f"{drawn} of {total} pictures are done")
        return part

    return html_page(title, [part for one in shown for part in _parts(one, picture)])


def _parts(shown: Shown, picture: Callable[[Callable[[Path], None], str], str]) -> list[str]:
    invocation = shown.invocation
    heading = html.escape(f"{invocation.command}, {invocation.name}")
    # What was not run by the command line has arguments that begin with something else.
    lines = [shlex.join(["cs336sys", *run.arguments]) for run in invocation.runs if run.arguments]
    return [
        f"<h2>{heading}</h2>",
        *(f"<pre>{html.escape(line)}</pre>" for line in dict.fromkeys(lines)),
        *(picture(draw, f"{invocation.command}: {name}") for name, draw in shown.pictures.items()),
        *(html_table(table, "h3") for table in shown.tables),
    ]
