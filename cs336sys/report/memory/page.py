"""The memory of a cell of ``memprof`` as one HTML file that loads nothing: a timeline to point at, and tables."""

import html
import json
from collections.abc import Sequence

from cs336sys.report.memory.plots import CATEGORY_COLORS
from cs336sys.report.numbers import format_value
from cs336sys.report.tables import Table
from cs336sys.results import Cell

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; padding: 0 1em; }}
h1 {{ font-size: 1.3em; }} h2 {{ font-size: 1.1em; margin-top: 2em; }}
canvas {{ width: 100%; height: 420px; border: 1px solid #ccc; }}
table {{ border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }}
th, td {{ padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }}
td.number, th.number {{ text-align: right; }}
.swatch {{ display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }}
#readout {{ min-height: 3em; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p id="readout">Point at the timeline: bytes held by category after so many allocations and frees.</p>
<canvas id="timeline"></canvas>
<p>{legend}</p>
{tables}
<script>
{{
// A block of its own: names such as top are taken at a page's top level.
const data = {data};
{script}
}}
</script>
</body>
</html>
"""

_SCRIPT = """
const canvas = document.getElementById("timeline"), readout = document.getElementById("readout");
const names = Object.keys(data.colors), last = data.timeline.position.at(-1) || 1;
const totals = data.timeline.position.map((_, i) => names.reduce((sum, name) => sum + data.timeline[name][i], 0));
const top = 1.15 * Math.max(...totals), gib = bytes => (bytes / 2 ** 30).toFixed(3) + " GiB";
const x = position => position / last * canvas.width, y = bytes => canvas.height * (1 - bytes / top);
function draw(marked) {
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = canvas.clientHeight * devicePixelRatio;
  const pen = canvas.getContext("2d"), below = totals.map(() => 0);
  for (const name of names) {
    pen.beginPath();
    below.forEach((base, i) => pen.lineTo(x(data.timeline.position[i]), y(base + data.timeline[name][i])));
    for (let i = below.length - 1; i >= 0; i--) pen.lineTo(x(data.timeline.position[i]), y(below[i]));
    below.forEach((base, i) => below[i] = base + data.timeline[name][i]);
    pen.fillStyle = data.colors[name];
    pen.fill();
  }
  pen.fillStyle = pen.strokeStyle = "#222";
  pen.font = 13 * devicePixelRatio + "px system-ui";
  for (const region of data.regions) {
    pen.fillRect(x(region.start), 0, 1, canvas.height);
    pen.fillText(region.name, x(region.start) + 5, 16 * devicePixelRatio);
  }
  if (marked !== undefined) pen.fillRect(x(data.timeline.position[marked]), 0, 2, canvas.height);
}
canvas.addEventListener("mousemove", event => {
  const wanted = event.offsetX / canvas.clientWidth * last;
  let at = data.timeline.position.findIndex(position => position >= wanted);
  if (at < 0) at = totals.length - 1;
  const position = data.timeline.position[at];
  const region = data.regions.find(region => position >= region.start && position <= region.end);
  const parts = names.filter(name => data.timeline[name][at]).map(name => name + " " + gib(data.timeline[name][at]));
  readout.textContent = "event " + position + (region ? ", " + region.name : "") + ": " + gib(totals[at]) + " = "
    + parts.join(" + ");
  draw(at);
});
addEventListener("resize", () => draw());
draw();
"""


def memory_page(cell: Cell, title: str, tables: Sequence[Table]) -> str:
    """The page's text."""
    data = {
        "timeline": cell.derived["timeline"],
        "regions": cell.derived["regions"],
        "colors": CATEGORY_COLORS,
    }
    legend = "".join(
        f'<span class="swatch" style="background:{color}"></span>{name}' for name, color in CATEGORY_COLORS.items()
    )
    return _PAGE.format(
        title=html.escape(title),
        legend=legend,
        tables="\n".join(map(_html_table, tables)),
        # "</" would end the script element inside of a string.
        data=json.dumps(data, allow_nan=False).replace("</", "<\\/"),
        script=_SCRIPT,
    )


def _html_table(table: Table) -> str:
    columns = [column for column in table.columns if any(row.get(column.key) is not None for row in table.rows)]
    is_text = {column.key: any(isinstance(row.get(column.key), str) for row in table.rows) for column in columns}
    kinds = {key: "" if text else ' class="number"' for key, text in is_text.items()}
    head = "".join(f"<th{kinds[column.key]}>{html.escape(column.title)}</th>" for column in columns)
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{kinds[column.key]}>{html.escape(format_value(row.get(column.key), column.unit))}</td>"
            for column in columns
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
    return f"<h2>{html.escape(table.title)}</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>\n{notes}"
