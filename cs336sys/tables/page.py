"""Tables and pictures as one HTML file that loads nothing, to be read on a screen, on a phone and on paper."""

import base64
import hashlib
import html
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from cs336sys.errors import CapabilityError, OutputError, UsageError
from cs336sys.processes.files import OwnedFolder
from cs336sys.tables.outputs import check_writable
from cs336sys.tables.table import Table, grid_of, one_line, package_templates

# So many columns fit a printed page in smaller letters alone. Texts of more characters wrap; longer words are broken.
_WIDE_COLUMNS, _LONG_CHARACTERS = 12, 24


def escaped(text: str) -> str:
    """Return the text without newlines, terminal commands and HTML."""
    return html.escape(one_line(text))


def html_page(title: str, parts: Sequence[str], style: str = "", script: str = "") -> str:
    """Return a page of ``parts`` of HTML with their CSS and JavaScript; browsers run no other script on it."""
    # Content-Security-Policy names the script that may run by its digest.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = "\n".join([*parts, *([f"<script>{script}</script>"] if script else [])])
    facts = {"title": escaped(title), "body": body, "style": style, "digest": digest}
    return package_templates().get_template("tables/page.jinja").render(facts) + "\n"


def html_table(table: Table, heading: str = "h2") -> str:
    """Return a table under its title, an element ``heading``, with its notes: as other formats for people show it."""
    grid = grid_of(table).map(html.escape)
    classes = [' class="number"' if is_number else "" for is_number in grid.is_number]
    for index, column in enumerate(zip(*grid.rows, strict=True)):
        if not classes[index] and max(map(len, column)) > _LONG_CHARACTERS:  # Wraps: if long, within words, too.
            longest_word = max(len(word) for text in column for word in text.split() or [""])
            classes[index] = ' class="long"' if longest_word > _LONG_CHARACTERS else ' class="text"'
    is_wide = len(grid.headers) >= _WIDE_COLUMNS
    facts = {"heading": heading, "title": escaped(table.title), "grid": grid, "classes": classes, "is_wide": is_wide}
    notes = [escaped(note) for note in table.all_notes]
    return package_templates().get_template("tables/html_table.jinja").render(facts, notes=notes)


def html_picture(draw: Callable[[Path], None], caption: str) -> str:
    """Return a picture that the page contains, as ``draw`` draws it to a file, with its caption."""
    with OwnedFolder() as folder:
        path = folder / "picture.png"
        draw(path)
        content = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img src="data:image/png;base64,{content}" alt="{text}"><figcaption>{text}</figcaption></figure>'


# Programs that print a page, by their names.
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


def find_browser(option: str) -> str:
    """Return the Chromium that prints pages, or raise a CapabilityError that says how to print them without."""
    for path in filter(None, map(shutil.which, _BROWSERS)):
        return path
    raise CapabilityError(
        f"{option}: none of {', '.join(_BROWSERS)} is installed, which would print it; write a page with a name in "
        ".html, open it in any browser and print it to a PDF"
    )


def print_page(text: str, browser: str) -> bytes:
    """Return a page as a PDF, printed by a browser without a window, or raise an OutputError."""
    with OwnedFolder() as folder:
        page, printed = folder / "page.html", folder / "page.pdf"
        page.write_text(text)
        # A browser of root has no sandbox, and refuses to start with one.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        options = ["--headless", "--disable-gpu", *sandbox, f"--user-data-dir={folder / 'profile'}"]
        command = [browser, *options, "--no-pdf-header-footer", f"--print-to-pdf={printed}", page.as_uri()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            return printed.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise OutputError(f"{browser} has printed no PDF: {error}") from error


def check_page_writable(path: Path | None) -> None:
    """Raise a UsageError, before anything is measured, if a page cannot be written."""
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--html {path}: the file must end in .html")
    check_writable(path, "--html")
