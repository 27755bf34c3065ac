"""Tables and pictures as one HTML file that loads nothing, to be read on a screen, on a phone and on paper.

A page is :func:`html_page` around parts: :func:`html_table`, :func:`html_picture`, and whatever HTML else.
"""

import base64
import hashlib
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from cs336sys.errors import UsageError
from cs336sys.processes.folders import OwnedFolder
from cs336sys.report.outputs import check_drawing, check_writable
from cs336sys.report.table import Table, grid_of, one_line

_STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff; overflow-wrap: break-word; }
h1 { font-size: 1.5em; line-height: 1.25; } h2 { font-size: 1.2em; margin-top: 2.5em; } h3 { font-size: 1em; }
h1, h2, h3 { break-after: avoid; }
pre, .table { overflow: auto; } pre, code { font-size: 13px; background: #f5f5f5; } pre { padding: 0.6em 0.8em; }
.table { max-height: 75vh; border: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; border-bottom: 1px solid #eee; text-align: left; white-space: nowrap; }
th { position: sticky; top: 0; background: #f5f5f5; }
.number { text-align: right; }
.note { font-size: 13px; color: #555; margin: 0.4em 0; }
figure { margin: 1.5em 0; break-inside: avoid; } img { max-width: 100%; height: auto; }
figcaption { font-size: 13px; color: #555; }
@media screen and (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1a1a1a; } pre, code, th { background: #2a2a2a; } a { color: #8ab4f8; }
  .table { border-color: #444; } th, td { border-color: #333; } .note, figcaption { color: #aaa; }
}
@media (max-width: 600px) { body { margin: 1em auto; } th, td { padding: 3px 6px; } }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt; }
  .table { max-height: none; overflow: visible; border: 0; }
  table { font-size: 6.5pt; } th, td { padding: 1px 4px; white-space: normal; } th { position: static; }
  tr { break-inside: avoid; }
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def escaped(text: str) -> str:
    """The text without newlines, terminal commands and HTML."""
    return html.escape(one_line(text))


def html_page(title: str, parts: Sequence[str], style: str = "", script: str = "") -> str:
    """The text of a page.

    Args:
        parts: HTML, one part below the other.
        style: CSS that these need next to the page's own.
        script: JavaScript that they need. Browsers run no other, whatever the parts hold.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return _PAGE.format(
        title=escaped(title),
        body="\n".join([*parts, *([f"<script>{script}</script>"] if script else [])]),
        style=_STYLE + style,
        policy=policy,
    )


def html_table(table: Table, heading: str = "h2") -> str:
    """A table under its title, an element ``heading``, with its notes: as the other formats for people show it."""
    grid = grid_of(table).map(html.escape)
    kinds = [' class="number"' if is_number else "" for is_number in grid.is_number]

    def html_row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    lines = [
        f"<{heading}>{escaped(table.title)}</{heading}>",
        f'<div class="table"><table>\n<thead><tr>{html_row(grid.headers, "th")}</tr></thead>\n<tbody>',
        *(f"<tr>{html_row(row, 'td')}</tr>" for row in grid.rows),
        "</tbody>\n</table></div>",
        *(f'<p class="note">{escaped(note)}</p>' for note in table.all_notes),
    ]
    return "\n".join(lines)


def html_picture(draw: Callable[[Path], None], caption: str) -> str:
    """A picture inside of the page, drawn to a file by ``draw``, with its caption."""
    with OwnedFolder() as folder:
        path = folder / "picture.png"
        draw(path)
        content = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img src="data:image/png;base64,{content}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def check_page(path: Path | None) -> None:
    """Find out before anything is measured whether a page with pictures can be written.

    Raises:
        UsageError: the file's ending is no page's, or its folder cannot be written.
        CapabilityError: what draws the pictures is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--html {path}: the file must end in .html")
    check_drawing(f"--html {path}")
    check_writable(path, "--html")
