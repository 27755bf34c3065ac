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

from cs336sys.commands.memprof.tables import memory_tables
from cs336sys.results.model import Cell, Run
from cs336sys.settings.profiling import LARGEST_ALLOCATIONS, MemoryWorkload
from cs336sys.tables.numbers import format_number, format_quantity, in_shown_unit
from cs336sys.tables.outputs import Axes, check_writable, new_axes, write_figure, write_file
from cs336sys.tables.page import escaped, html_page, html_table
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, measured_cells
from cs336sys.tables.table import Table, with_rows
from cs336sys.tables.titles import machine_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cs336sys.commands.memprof.verdict import Verdict


@dataclass(frozen=True)
class CategoryStyle:
    """How a category is filled, to be told apart also without colors.

    Attributes:
        hatch: of ``/``, ``\\``, ``-``, ``|`` and ``.``, as matplotlib's.
        ink: the color of the hatch.
    """

    color: str
    hatch: str = ""
    ink: str = "#ffffff"


# What stays lies at the bottom. The least difference of two colors is 18 (CIE 1976), also to those who see no red, no
# green or no blue (Machado et al. 2009).
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
    categories = [category for category in CATEGORY_STYLES if category in timeline]
    totals = [sum(sizes) for sizes in zip(*(timeline[category] for category in categories), strict=True)]
    highest = max(range(len(totals)), key=totals.__getitem__)
    peak, unit = in_shown_unit(totals[highest], "bytes")
    scale = peak / totals[highest] if totals[highest] else 1.0
    shown = {name: [scale * size for size in timeline[name]] for name in categories if any(timeline[name])}
    if shown:
        areas = axes.stackplot(positions, *shown.values(), labels=list(shown), linewidth=0)
        for area, style in zip(areas, map(CATEGORY_STYLES.__getitem__, shown), strict=True):
            area.set(facecolor=style.color, hatch=2 * style.hatch, edgecolor=style.ink + "70")
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


def timeline_page(
    timelines: Sequence[tuple[str, Mapping[str, Any]]],
    title: str,
    tables: Sequence[Table],
    verdicts: Sequence["Verdict"] = (),
) -> str:
    """The text of a page: verdicts, then timelines, then tables.

    Args:
        timelines: by name, each with its regions, as a cell's derived columns hold them.
    """
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader("cs336sys.commands.memprof", "."))
    pages.filters |= {"escaped": escaped, "size": lambda size: format_quantity(size, "bytes")}
    drawn = [_timeline_data(number, name, derived) for number, (name, derived) in enumerate(timelines)]
    body = pages.get_template("page.jinja").render(verdicts=verdicts, timelines=drawn)
    folder = resources.files("cs336sys.commands.memprof")
    # "</script" would end the script element inside of a string, and "<!--<script" would keep its end from ending it.
    data = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
    # A block of its own: names such as top are taken at a page's top level.
    script = f"for (const data of {data}) {{\n{(folder / 'timeline.js').read_text()}}}"
    return html_page(title, [body, *map(html_table, tables)], (folder / "timeline.css").read_text(), script)


def _timeline_data(number: int, name: str, derived: Mapping[str, Any]) -> dict[str, Any]:
    timeline = derived["timeline"]
    styles = {category: asdict(style) for category, style in CATEGORY_STYLES.items() if any(timeline.get(category, ()))}
    most = max(map(sum, zip(*(timeline[category] for category in styles), strict=True)), default=0)
    highest, unit = in_shown_unit(most, "bytes")
    return {
        "number": number,
        "name": name,
        "timeline": timeline,
        "regions": derived["regions"],
        "moment": derived.get("moment"),
        "styles": styles,
        "unit": {"bytes": most / highest if most else 1, "label": unit},
        "ticks": axis_ticks(most),
        "events": [digit * 10**power for power in range(8) for digit in (1, 2, 5)],
    }


def axis_ticks(most: float) -> list[dict[str, float | str]]:
    """At most eleven ``bytes`` from 0 to ``most``, round in the unit of their ``label``."""
    highest, unit = in_shown_unit(most, "bytes")
    if not most:
        return [{"bytes": 0, "label": "0 B"}]
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(part * power for part in (0.1, 0.2, 0.5, 1, 2) if highest <= 10 * part * power)
    count = math.floor(highest / step)
    return [{"bytes": step * i * most / highest, "label": f"{step * i:.4g} {unit}"} for i in range(count + 1)]


def check_directory(directory: Path | None, names: Iterable[str]) -> None:
    """Raise a UsageError before anything is measured if files of these names, without endings, cannot be written."""
    if directory is not None:
        for name in names:
            check_writable(directory / f"{name}.pickle", "--snapshot")


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


def _memory_pictures(cells: Sequence[Cell], run: Run | None, options: Presentation) -> Pictures:
    return {
        MemoryWorkload.from_configuration(cell.configuration).name: partial(
            plot_timeline, cell.derived, timeline_title(cell, run), option="--plot"
        )
        for cell in measured_cells(cells)
    }


SAVED = SavedCommand(lambda cells, run, options: memory_tables(cells, run, options.top), _memory_pictures)
