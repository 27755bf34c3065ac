"""The memory of a cell of ``memprof`` as a picture, and as an HTML file that loads nothing: a timeline to point at."""

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.commands.memprof.tables import CERTAINTIES, Verdict, memory_tables, say_memory, workload_of
from cs336sys.results.model import Cell, Run
from cs336sys.settings.profiling import LARGEST_ALLOCATIONS
from cs336sys.tables.numbers import format_number, format_quantity, in_shown_unit
from cs336sys.tables.outputs import Axes, check_writable, new_axes, write_figure, write_file
from cs336sys.tables.page import escaped, html_page, html_table
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, measured_cells
from cs336sys.tables.table import Table, with_rows
from cs336sys.tables.titles import machine_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CategoryStyle:
    """The fill of a category, to be told apart also without colors."""

    color: str
    hatch: str = ""  # Of ``/``, ``\``, ``-``, ``|`` and ``.``, as matplotlib's.
    ink: str = "#ffffff"  # The color of the hatch.


# From the bottom up, what stays longest first. The least difference of two colors is 18 (CIE 1976), also to those who
# see no red, no green or no blue (Machado et al. 2009).
CATEGORY_STYLES = {
    "parameters": CategoryStyle("#1f4e96"),
    "optimizer state": CategoryStyle("#7fb2e5", "/", "#000000"),
    "other": CategoryStyle("#777777", "."),
    "unknown": CategoryStyle("#cfcfcf", ".", "#000000"),
    "graph pools": CategoryStyle("#5a3d28", "-"),
    "gradients": CategoryStyle("#c23b22", "\\"),
    "activations": CategoryStyle("#00a35c"),
    "temporary": CategoryStyle("#f2c14e", "|", "#000000"),
}

_CHARACTERS_PER_INCH = 14.0  # Of a phase's name, at its font size of 9 points, on the plot.
_TITLE_CHARACTERS = 95  # Of a title's line, at 10 points above a plot of 8.2 inches: an inch holds 12.6.
# So close to either side of the plot, in parts of its width, a number that is centred on its point would be cut.
_NEAR_AXIS = 0.08


def plot_timeline(derived: Mapping[str, Any], title: str, *paths: Path, option: str = "--snapshot") -> None:
    """Draw bytes held by category over a step's events, and its phases, to files; ``derived`` are a cell's columns."""
    import matplotlib

    # A fixed salt and no date: the same cell gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "cs336sys", "svg.fonttype": "none"}):
        figure = timeline_figure(derived, title)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            write_figure(figure, path, option, metadata)


def timeline_figure(derived: Mapping[str, Any], title: str) -> "Figure":
    """Return the picture of a cell's derived columns."""
    timeline = derived["timeline"]
    positions = timeline["position"]
    figure, ((axes,),) = new_axes(width=11, height=5)
    categories = [category for category in CATEGORY_STYLES if category in timeline]
    totals = [sum(sizes) for sizes in zip(*(timeline[category] for category in categories), strict=True)]
    peak_bytes = max(totals)
    peak, unit = in_shown_unit(peak_bytes, "bytes")  # The unit that the peak is written in is that of the axis.
    scale = peak / peak_bytes if peak_bytes else 1.0
    shown = {name: [scale * size for size in timeline[name]] for name in categories if any(timeline[name])}
    if shown:
        areas = axes.stackplot(positions, *shown.values(), labels=list(shown), linewidth=0)
        for area, style in zip(areas, map(CATEGORY_STYLES.__getitem__, shown), strict=True):
            # A doubled hatch is twice as dense; 70 is its opacity.
            area.set(facecolor=style.color, hatch=2 * style.hatch, edgecolor=style.ink + "70")
    axes.set_ylim(0, 1.12 * peak or 1)  # Room above the peak for its number; 1 where nothing is held.
    last = max(positions[-1], 1)
    axes.set_xlim(positions[0], last)
    # The legend takes the right quarter.
    rows = _name_phases(axes, derived["regions"], plot_inches=figure.get_figwidth() * 0.75)
    peak_position = positions[totals.index(peak_bytes)]
    peak_x = peak_position / last  # From the left to the right end of the plot, 0 to 1.
    axes.annotate(
        f"{format_number(peak, unit)} {unit}",
        (peak_position, peak),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if peak_x < _NEAR_AXIS else "right" if peak_x > 1 - _NEAR_AXIS else "center",
        fontsize=9,
    )
    axes.set(xlabel="allocations and frees since the step began", ylabel=f"active memory, {unit}")
    axes.set_title(textwrap.fill(title, _TITLE_CHARACTERS), fontsize=10, pad=6 + 13 * rows)  # A row is 13 points.
    axes.grid(alpha=0.3)
    if shown:
        figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    return figure


def _name_phases(axes: Axes, regions: Sequence[Mapping[str, Any]], plot_inches: float) -> int:
    """Draw lines where phases begin, and their names above the plot; return in how many rows, so that none overlap."""
    first, last = axes.get_xlim()
    row_ends: list[float] = []  # Where the last name of each row ends; all in parts of the plot's width.
    for region in regions:
        axes.axvline(region["start"], color="black", linewidth=0.6, linestyle=":")
        if region["end"] <= region["start"]:
            continue
        half_width = len(region["name"]) / _CHARACTERS_PER_INCH / plot_inches / 2
        middle = ((region["start"] + region["end"]) / 2 - first) / (last - first)
        middle = min(max(middle, half_width), 1 - half_width)  # Within the plot; in the lowest row that has room.
        row = next((row for row, end in enumerate(row_ends) if end <= middle - half_width), len(row_ends))
        row_ends[row : row + 1] = [middle + half_width]  # Replaces the row's end, or adds a row.
        # Just above the plot, whose height is 1, in rows of 0.045.
        axes.text(
            middle, 1.01 + 0.045 * row, region["name"], transform=axes.transAxes, ha="center", va="bottom", fontsize=9
        )
    return len(row_ends)


def timeline_page(
    timelines: Sequence[tuple[str, Mapping[str, Any]]],
    title: str,
    tables: Sequence[Table],
    verdicts: Sequence[Verdict] = (),
) -> str:
    """Return the text of a page: verdicts, then timelines (by name, as derived columns hold them), then tables."""
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader("cs336sys.commands.memprof", "."))
    pages.filters |= {"escaped": escaped, "size": lambda size: format_quantity(size, "bytes")}
    drawn = [_timeline_data(number, name, derived) for number, (name, derived) in enumerate(timelines)]
    body = pages.get_template("page.jinja").render(
        verdicts=verdicts, timelines=drawn, say=say_memory, certainties=CERTAINTIES
    )
    folder = resources.files("cs336sys.commands.memprof")
    # Even in a string, "</script" ends the script element, and "<!--<script" keeps its end from ending it.
    data = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
    # In a block, as names such as top belong to the browser at the top level.
    script = f"for (const data of {data}) {{\n{(folder / 'timeline.js').read_text()}}}"
    return html_page(title, [body, *map(html_table, tables)], (folder / "timeline.css").read_text(), script)


def _timeline_data(number: int, name: str, derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return what timeline.js draws; ``events`` are distances of ticks to choose from, for up to 1e8 events."""
    timeline = derived["timeline"]
    styles = {category: asdict(style) for category, style in CATEGORY_STYLES.items() if any(timeline.get(category, ()))}
    peak_bytes = max(map(sum, zip(*(timeline[category] for category in styles), strict=True)), default=0)
    peak, unit = in_shown_unit(peak_bytes, "bytes")
    return {
        "number": number,
        "name": name,
        "timeline": timeline,
        "regions": derived["regions"],
        "moment": derived.get("moment"),
        "styles": styles,
        "unit": {"bytes": peak_bytes / peak if peak_bytes else 1, "label": unit},
        "ticks": axis_ticks(peak_bytes),
        "events": [digit * 10**power for power in range(8) for digit in (1, 2, 5)],
    }


def axis_ticks(peak_bytes: float) -> list[dict[str, float | str]]:
    """Return at most eleven ``bytes`` from 0 to the peak, round in the unit of their ``label``."""
    peak, unit = in_shown_unit(peak_bytes, "bytes")
    if not peak_bytes:
        return [{"bytes": 0, "label": "0 B"}]
    power = 10.0 ** math.floor(math.log10(peak))
    step = next(part * power for part in (0.1, 0.2, 0.5, 1, 2) if peak <= 10 * part * power)  # At most ten of it.
    ticks = [step * number for number in range(math.floor(peak / step) + 1)]
    return [{"bytes": tick * peak_bytes / peak, "label": f"{tick:.4g} {unit}"} for tick in ticks]


def check_directory(directory: Path | None, names: Iterable[str]) -> None:
    """Raise a UsageError, before anything is measured, if files cannot be written here; names are without endings."""
    if directory is not None:
        for name in names:
            check_writable(directory / f"{name}.pickle", "--snapshot")  # All its files are in one folder.


def write_files(cells: Sequence[Cell], run: Run | None, directory: Path) -> None:
    """Write every measured cell's timeline as ``.png`` and ``.svg`` and its page as ``.html``, or raise OutputError."""
    for cell in measured_cells(cells):
        stem = directory / workload_of(cell).name
        title = timeline_title(cell, run)
        tables = with_rows(*memory_tables([cell], run, LARGEST_ALLOCATIONS))
        write_timeline(stem, cell.derived, title, timeline_page([("", cell.derived)], title, tables))


def write_timeline(stem: Path, derived: Mapping[str, Any], title: str, page: str) -> None:
    """Write a timeline as ``.png`` and ``.svg`` and its page as ``.html``, or raise an OutputError."""
    plot_timeline(derived, title, *(stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")))
    write_file(stem.with_name(f"{stem.name}.html"), page.encode(), "--snapshot")


def timeline_title(cell: Cell, run: Run | None) -> str:
    """Title a cell's picture or page: what was run, and on which machine."""
    workload = workload_of(cell)
    training, size = workload.training, workload.training.size
    parts = [f"{size.name}: batch {size.batch_size} x context {size.context}", training.mode, training.precision]
    parts += [f"{training.attention} attention", f"compile {training.compile}"]
    return ", ".join([*parts, f"checkpointing {workload.checkpointing}", *machine_words(run)])


def _memory_pictures(cells: Sequence[Cell], run: Run | None, options: Presentation) -> Pictures:
    """Return, by workload, a function that draws a measured cell's timeline; ``options`` change nothing in it."""
    return {
        workload_of(cell).name: partial(plot_timeline, cell.derived, timeline_title(cell, run), option="--plot")
        for cell in measured_cells(cells)
    }


SAVED = SavedCommand(lambda cells, run, options: memory_tables(cells, run, options.top), _memory_pictures)
