"""The memory of a cell of ``memprof`` as a picture, and as an HTML file that loads nothing: a timeline to point at."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.report.memory.tables import memory_tables
from cs336sys.report.numbers import format_number, in_shown_unit
from cs336sys.report.outputs import Axes, check_writable, new_axes, write_figure, write_file
from cs336sys.report.page import escaped, html_page, html_table
from cs336sys.report.table import Table, with_rows
from cs336sys.report.titles import machine_words
from cs336sys.results.model import Cell, Run
from cs336sys.workload import LARGEST_ALLOCATIONS, MemoryWorkload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What stays lies at the bottom.
CATEGORY_COLORS = {
    "parameters": "#4c72b0",
    "optimizer state": "#8172b3",
    "other": "#8c8c8c",
    "unknown": "#c7c7c7",
    "graph pools": "#937860",
    "gradients": "#c44e52",
    "activations": "#55a868",
    "temporary": "#dd8452",
}

# Characters of a phase's name that an inch of the plot holds, at its font size of 9 points.
_CHARACTERS_PER_INCH = 14.0

# What fits above the plot at the title's 10 points without reaching the legend: 12.6 characters are an inch of 8.2.
_TITLE_CHARACTERS = 95

# Part of the plot's width next to either axis in which a number that is centred on its point would be cut.
_NEAR_AXIS = 0.08


def plot_timeline(derived: Mapping[str, Any], title: str, *paths: Path, option: str = "--snapshot") -> None:
    """Bytes held by category over the events of a step, with its phases marked, to files of any ending.

    Args:
        derived: the timeline and its regions, as a cell's derived columns hold them.
    """
    import matplotlib

    # A fixed salt and no date: the same cell gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "cs336sys", "svg.fonttype": "none"}):
        figure = timeline_figure(derived, title)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            write_figure(figure, path, option, metadata)


def timeline_figure(derived: Mapping[str, Any], title: str) -> "Figure":
    """The picture of a cell's derived columns."""
    timeline = derived["timeline"]
    positions = timeline["position"]
    figure, ((axes,),) = new_axes(11, 5)
    categories = [category for category in CATEGORY_COLORS if category in timeline]
    totals = [sum(sizes) for sizes in zip(*(timeline[category] for category in categories), strict=True)]
    highest = max(range(len(totals)), key=totals.__getitem__)
    peak, unit = in_shown_unit(totals[highest], "bytes")
    scale = peak / totals[highest] if totals[highest] else 1.0
    scaled = {category: [scale * size for size in timeline[category]] for category in categories}
    shown = {category: sizes for category, sizes in scaled.items() if any(sizes)}
    if shown:
        colors = [CATEGORY_COLORS[category] for category in shown]
        axes.stackplot(positions, *shown.values(), labels=list(shown), colors=colors, linewidth=0)
    axes.set_ylim(0, 1.12 * peak or 1)
    last = max(positions[-1], 1)
    axes.set_xlim(positions[0], last)
    rows = _name_phases(axes, derived["regions"], figure.get_figwidth() * 0.75)
    # A label in the middle of the peak would be cut by the axis where that is near one.
    part = positions[highest] / last
    axes.annotate(
        f"{format_number(peak, unit)} {unit}",
        (positions[highest], peak),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if part < _NEAR_AXIS else "right" if part > 1 - _NEAR_AXIS else "center",
        fontsize=9,
    )
    axes.set(xlabel="allocations and frees since the step began", ylabel=f"active memory, {unit}")
    axes.set_title(textwrap.fill(title, _TITLE_CHARACTERS), fontsize=10, pad=6 + 13 * rows)
    axes.grid(alpha=0.3)
    if shown:
        figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    return figure


def _name_phases(axes: Axes, regions: Sequence[Mapping[str, Any]], inches: float) -> int:
    """Lines where phases begin and names above the plot, each in the lowest row with room for it; how many rows."""
    first, last = axes.get_xlim()
    ends: list[float] = []
    for region in regions:
        axes.axvline(region["start"], color="black", linewidth=0.6, linestyle=":")
        if region["end"] <= region["start"]:
            continue
        half = len(region["name"]) / _CHARACTERS_PER_INCH / inches / 2
        middle = ((region["start"] + region["end"]) / 2 - first) / (last - first)
        middle = min(max(middle, half), 1 - half)
        row = next((row for row, end in enumerate(ends) if end <= middle - half), len(ends))
        ends[row : row + 1] = [middle + half]
        axes.text(
            middle, 1.01 + 0.045 * row, region["name"], transform=axes.transAxes, ha="center", va="bottom", fontsize=9
        )
    return len(ends)


_STYLE = """
canvas { width: 100%; height: 420px; border: 1px solid #ccc; }
.swatch { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }
.readout { min-height: 3em; font-variant-numeric: tabular-nums; }
"""

_TIMELINE = """
<h2>{name}</h2>
<p class="readout" id="readout{number}">Point at the timeline: bytes held by category after so many allocations and
frees.</p>
<canvas id="timeline{number}"></canvas>
<p>{legend}</p>
"""

# A block of its own: names such as top are taken at a page's top level.
_DATA = """
{{
const data = {data};
{script}
}}
"""

_SCRIPT = """
const canvas = document.getElementById("timeline" + data.number);
const readout = document.getElementById("readout" + data.number);
const names = Object.keys(data.colors), last = data.timeline.position.at(-1) || 1;
const totals = data.timeline.position.map((_, i) => names.reduce((sum, name) => sum + data.timeline[name][i], 0));
const highest = Math.max(...totals);
const size = bytes => (bytes / data.unit.bytes).toFixed(3) + " " + data.unit.label;
const left = 80, line = 18;  // of the plot, and from one row of names to the next; in CSS pixels
function rows(pen) {  // of each phase's name: the lowest with room beside the names before it
  const ends = [];
  return data.regions.map(region => {
    const width = pen.measureText(region.name).width;
    const start = Math.max(0, Math.min(x(region.start) + 5, canvas.clientWidth - width - 2));
    let row = ends.findIndex(end => end < start);
    if (row < 0) row = ends.length;
    ends[row] = start + width + 5;
    return {start, row};
  });
}
const x = position => left + position / last * (canvas.clientWidth - left);
function draw(marked) {
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = canvas.clientHeight * devicePixelRatio;
  const pen = canvas.getContext("2d"), below = totals.map(() => 0), bottom = canvas.clientHeight - line / 2;
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.font = "13px system-ui";
  const placed = rows(pen), top = line * (1 + Math.max(0, ...placed.map(name => name.row))) + line / 2;
  const y = bytes => bottom - (bottom - top) * bytes / (highest || 1);
  for (const name of names) {
    pen.beginPath();
    below.forEach((base, i) => pen.lineTo(x(data.timeline.position[i]), y(base + data.timeline[name][i])));
    for (let i = below.length - 1; i >= 0; i--) pen.lineTo(x(data.timeline.position[i]), y(below[i]));
    below.forEach((base, i) => below[i] = base + data.timeline[name][i]);
    pen.fillStyle = data.colors[name];
    pen.fill();
  }
  pen.fillStyle = "#222";
  data.regions.forEach((region, i) => {
    pen.fillRect(x(region.start), 0, 1, bottom);
    pen.fillText(region.name, placed[i].start, line * (1 + placed[i].row) - 4);
  });
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of data.ticks) {
    pen.fillRect(left - 5, y(tick.bytes), 5, 1);
    pen.fillText(tick.label, left - 8, y(tick.bytes));
  }
  pen.fillRect(left, 0, 1, bottom);
  pen.fillRect(left, bottom, canvas.clientWidth, 1);
  if (marked !== undefined) pen.fillRect(x(data.timeline.position[marked]), 0, 2, bottom);
}
canvas.addEventListener("mousemove", event => {
  const wanted = (event.offsetX - left) / (canvas.clientWidth - left) * last;
  let at = data.timeline.position.findIndex(position => position >= wanted);
  if (at < 0) at = totals.length - 1;
  const position = data.timeline.position[at];
  const region = data.regions.find(region => position >= region.start && position <= region.end);
  const parts = names.filter(name => data.timeline[name][at]).map(name => name + " " + size(data.timeline[name][at]));
  readout.textContent = "event " + position + (region ? ", " + region.name : "") + ": " + size(totals[at]) + " = "
    + parts.join(" + ");
  draw(at);
});
addEventListener("resize", () => draw());
draw();
"""


def timeline_page(timelines: Sequence[tuple[str, Mapping[str, Any]]], title: str, tables: Sequence[Table]) -> str:
    """The text of a page.

    Args:
        timelines: by name, each with its regions, as a cell's derived columns hold them.
    """
    drawn = [_timeline_html(number, name, derived) for number, (name, derived) in enumerate(timelines)]
    parts = [*(part for part, _ in drawn), *map(html_table, tables)]
    return html_page(title, parts, _STYLE, "".join(script for _, script in drawn))


def _timeline_html(number: int, name: str, derived: Mapping[str, Any]) -> tuple[str, str]:
    timeline = derived["timeline"]
    colors = {category: color for category, color in CATEGORY_COLORS.items() if any(timeline.get(category, ()))}
    most = max(map(sum, zip(*(timeline[category] for category in colors), strict=True)), default=0)
    highest, unit = in_shown_unit(most, "bytes")
    data = {
        "number": number,
        "timeline": timeline,
        "regions": derived["regions"],
        "colors": colors,
        "unit": {"bytes": most / highest if most else 1, "label": unit},
        "ticks": axis_ticks(most),
    }
    legend = "".join(
        f'<span class="swatch" style="background:{color}"></span>{category}' for category, color in colors.items()
    )
    # "</script" would end the script element inside of a string, and "<!--<script" would keep its end from ending it.
    script = _DATA.format(data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"), script=_SCRIPT)
    heading = escaped(name)
    part = _TIMELINE.format(number=number, name=heading, legend=legend)
    return (part if heading else part.replace("<h2></h2>\n", "")), script


def axis_ticks(most: float) -> list[dict[str, float | str]]:
    """At most eleven ``bytes`` from 0 to ``most``, round in the unit of their ``label``."""
    highest, unit = in_shown_unit(most, "bytes")
    if not most:
        return [{"bytes": 0, "label": "0 B"}]
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(part * power for part in (0.1, 0.2, 0.5, 1, 2) if highest <= 10 * part * power)
    count = math.floor(highest / step)
    return [{"bytes": step * i * most / highest, "label": f"{step * i:.4g} {unit}"} for i in range(count + 1)]


def check_directory(directory: Path | None) -> None:
    """Raise a UsageError before anything is measured if files cannot be written there."""
    if directory is not None:
        check_writable(directory / "memory.pickle", "--snapshot")


def write_files(cells: Sequence[Cell], run: Run | None, directory: Path) -> None:
    """Write every measured cell's timeline as ``.png`` and ``.svg`` and its page as ``.html``, or raise OutputError."""
    for cell in cells:
        if cell.status != "ok":
            continue
        path = directory / MemoryWorkload.from_configuration(cell.configuration).name
        title = timeline_title(cell, run)
        tables = with_rows(*memory_tables([cell], run, LARGEST_ALLOCATIONS))
        write_timeline(path, cell.derived, title, timeline_page([("", cell.derived)], title, tables))


def write_timeline(stem: Path, derived: Mapping[str, Any], title: str, page: str) -> None:
    """Write a timeline as ``.png`` and ``.svg`` and its page as ``.html``, or raise an OutputError."""
    plot_timeline(derived, title, *(stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")))
    write_file(stem.with_name(f"{stem.name}.html"), page.encode(), "--snapshot")


def timeline_title(cell: Cell, run: Run | None) -> str:
    """Title a cell's picture or page: what was run, and on which machine."""
    workload = MemoryWorkload.from_configuration(cell.configuration)
    training, size = workload.training, workload.training.size
    parts = [f"{size.name}: batch {size.batch_size} x context {size.context}", training.mode, training.precision]
    parts += [f"{training.attention} attention", f"compile {training.compile}"]
    return ", ".join([*parts, f"checkpointing {workload.checkpointing}", *machine_words(run)])
