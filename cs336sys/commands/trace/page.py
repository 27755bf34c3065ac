"""The page of ``trace --html``: verdict, timeline of a step by rank and stream, the waterfall, tables that sort."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cs336sys.capture.difference import CaptureDifference, compare_captures
from cs336sys.capture.reading import Read
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.capture.timeline import Timeline
from cs336sys.commands.trace.difference_tables import change_name
from cs336sys.tables.numbers import format_number
from cs336sys.tables.page import html_page, html_table
from cs336sys.tables.table import Table

# Of a timeline as wide as the page: shorter kernels are drawn together with their neighbours of the same kind.
_WIDTH = 10_000
_MOST_BARS = 2500
_MOST_STREAMS = 12
_MOST_RANKS = 32
_MOST_FALLS = 8


def trace_page(tables: Sequence[Table], reads: Sequence[Read]) -> str:
    """The text of the page.

    Args:
        tables: the verdict first.
        reads: the captures; of two, the one before and the one after.
    """
    from jinja2 import Environment, PackageLoader

    verdict, *rest = tables
    headings = ("One step, before", "One step, after") if len(reads) > 1 else ("One step",)
    templates = Environment(loader=PackageLoader("cs336sys.commands.trace", "."), autoescape=True)
    values = {"verdict": verdict, "steps": list(map(_step, reads, headings)), "width": _WIDTH}
    if len(reads) > 1:
        values |= _waterfall(compare_captures(*(read.analyses[0] for read in reads)))
    body, style, script = (templates.get_template(f"page.{kind}").render(values) for kind in ("jinja", "css", "js"))
    return html_page(verdict.title, [body, *map(html_table, rest)], style, script)


def _step(read: Read, heading: str) -> dict[str, Any]:
    """The step of the middle length of the first rank, and that of the same number of the others."""
    analyses = read.analyses[:_MOST_RANKS]
    order = sorted(range(len(analyses[0].step_ms)), key=analyses[0].step_ms.__getitem__)
    numbers = [analysis.step_numbers or tuple(range(len(analysis.step_ms))) for analysis in analyses]
    chosen = numbers[0][order[len(order) // 2]]
    windows = []
    for rank, of_rank in enumerate(numbers):
        place = of_rank.index(chosen) if chosen in of_rank else len(of_rank) // 2
        begin, end = read.timelines[rank].steps.bounds[place].tolist()
        aligned = begin if read.ranks is None else float(read.ranks.clocks.aligned(rank, np.array([begin]))[0])
        windows.append((begin, end, aligned - begin))
    first = min(begin + offset for begin, _, offset in windows)
    length = max(end + offset for _, end, offset in windows) - first
    lanes = [
        lane
        for (begin, end, offset), timeline, analysis in zip(windows, read.timelines, analyses, strict=False)
        for lane in _lanes(timeline, analysis.label, begin, end, first - offset, length)
    ]
    used = {bar["kind"] for lane in lanes for bar in lane["bars"]}
    return {
        "heading": heading,
        "name": f"Step {chosen}" if analyses[0].has_steps else "The capture",
        "lanes": lanes,
        "kinds": [kind for kind in Category if kind in used],
        "length_ms": length / 1e6,
        "length": format_number(length / 1e6, "ms"),
    }


def _lanes(timeline: Timeline, label: str, begin: int, end: int, first: float, length: float) -> list[dict[str, Any]]:
    inside = np.flatnonzero((timeline.start < end) & (timeline.stop > begin))
    streams, counts = np.unique(timeline.stream[inside], return_counts=True)
    lanes = []
    for stream in streams[np.argsort(-counts, kind="stable")][:_MOST_STREAMS].tolist():
        text = timeline.texts[stream]
        name = ", ".join(filter(None, (label, f"stream {text}" if text.isdigit() else text)))
        lanes.append({"name": name, "bars": _bars(timeline, inside[timeline.stream[inside] == stream], first, length)})
    return lanes


def _bars(timeline: Timeline, chosen: np.ndarray, first: float, length: float) -> list[dict[str, Any]]:
    """The bars of a lane; where there are too many, neighbours are one."""
    scale = _WIDTH / max(length, 1.0)
    least = _WIDTH / _MOST_BARS if len(chosen) > _MOST_BARS else 0.0
    bars: list[dict[str, Any]] = []
    for number, length_ns in zip(chosen.tolist(), timeline.length[chosen].tolist(), strict=True):
        left = (float(timeline.start[number]) - first) * scale
        width = max(length_ns * scale, 0.5)
        if bars and left + width - bars[-1]["left"] < least:
            text = f"{bars[-1]['text'].removesuffix(' and more')} and more"
            bars[-1] |= {"width": left + width - bars[-1]["left"], "text": text}
            continue
        name = timeline.texts[timeline.name[number]]
        text = f"{short_name(name)}, {format_number(length_ns / 1e3, 'us')} us"
        bars.append({"left": left, "width": width, "kind": category_of(name), "text": text})
    return bars


def _waterfall(difference: CaptureDifference) -> dict[str, Any]:
    """The largest changes from one step to the other, the sum of the smaller ones, and noise."""
    significant = [change for change in difference.changes if change.is_significant]
    falls = [(f"{change_name(change)} ({change.verdict})", change.delta_ms) for change in significant[:_MOST_FALLS]]
    if rest := significant[_MOST_FALLS:]:
        falls.append((f"{len(rest)} other changes", sum(change.delta_ms for change in rest)))
    falls.append(("same, or undecided", difference.delta_ms - sum(ms for _, ms in falls)))
    edges = list(itertools.accumulate((ms for _, ms in falls), initial=difference.before_ms))
    # The axis begins where it shows the changes, and not at 0.
    low = max(0.0, min(edges) - 0.2 * (max(edges) - min(edges)))
    percent = 100 / max(max(edges) - low, 1e-9)

    def bar(name: str, kind: str, start: float, end: float, text: str) -> dict[str, Any]:
        place = {"left": round(percent * (start - low), 2), "width": round(percent * (end - start), 2)}
        return {"name": name, "kind": kind, "text": text} | place

    bars = [bar("before", "whole", low, edges[0], format_number(edges[0], "ms"))]
    for (name, ms), start in zip(falls, edges, strict=False):
        kind, sign = ("more", "+") if ms > 0 else ("less", "")
        bars.append(bar(name, kind, min(start, start + ms), max(start, start + ms), sign + format_number(ms, "ms")))
    bars.append(bar("after", "whole", low, edges[-1], format_number(edges[-1], "ms")))
    return {"falls": bars, "falls_begin": format_number(low, "ms")}
