"""The page of ``trace --html``: verdict, timeline of a step by rank and stream, the waterfall, tables that sort."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cs336sys.capture.difference import CaptureDifference
from cs336sys.capture.reading import Read
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.capture.timeline import Timeline
from cs336sys.report.numbers import format_number
from cs336sys.report.page import html_page, html_table
from cs336sys.report.profile.kernels import CATEGORY_COLORS
from cs336sys.report.profile.trace_difference import waterfall
from cs336sys.report.table import Table

# Of a timeline as wide as the page: shorter kernels are drawn together with their neighbours of the same kind.
_WIDTH = 10_000
_MOST_BARS = 2500
_MOST_STREAMS = 12
_MOST_RANKS = 32


def trace_page(tables: Sequence[Table], reads: Sequence[Read], difference: CaptureDifference | None = None) -> str:
    """The text of the page.

    Args:
        tables: the verdict first.
        reads: what was read, with timelines; the side before, and the one after.
        difference: of the two.
    """
    from jinja2 import Environment, PackageLoader

    verdict, *rest = tables
    headings = ("One step, before", "One step, after") if len(reads) > 1 else ("One step",)
    templates = Environment(loader=PackageLoader("cs336sys.report", "profile"), autoescape=True)
    values = {
        "verdict": verdict,
        "steps": list(map(_step, reads, headings)),
        "colors": CATEGORY_COLORS,
        "width": _WIDTH,
    }
    if difference is not None:
        values |= _waterfall(difference)
    body, style, script = (
        templates.get_template(f"trace_page.{kind}").render(values) for kind in ("jinja", "css", "js")
    )
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
    used = {bar.kind for lane in lanes for bar in lane["bars"]}
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


@dataclass
class _LaneBar:
    left: float
    width: float
    kind: str
    text: str


def _bars(timeline: Timeline, chosen: np.ndarray, first: float, length: float) -> list[_LaneBar]:
    """The bars of a lane; where there are too many, neighbours are one."""
    scale = _WIDTH / max(length, 1.0)
    least = _WIDTH / _MOST_BARS if len(chosen) > _MOST_BARS else 0.0
    bars: list[_LaneBar] = []
    for number in chosen.tolist():
        left = (float(timeline.start[number]) - first) * scale
        width = max(float(timeline.stop[number] - timeline.start[number]) * scale, 0.5)
        if bars and left + width - bars[-1].left < least:
            bars[-1].width = left + width - bars[-1].left
            bars[-1].text = f"{bars[-1].text.removesuffix(' and more')} and more"
            continue
        name, us = timeline.texts[timeline.name[number]], (timeline.stop[number] - timeline.start[number]) / 1e3
        text = f"{short_name(name)}, {format_number(float(us), 'us')} us"
        bars.append(_LaneBar(left, width, category_of(name), text))
    return bars


def _waterfall(difference: CaptureDifference) -> dict[str, Any]:
    falls = waterfall(difference)
    edges = list(itertools.accumulate((ms for _, ms in falls), initial=difference.before_ms))
    # The axis begins where it shows the changes, and not at 0.
    low = max(0.0, min(edges) - 0.2 * (max(edges) - min(edges)))
    percent = 100 / max(max(edges) - low, 1e-9)
    bars = [("before", "whole", low, edges[0], edges[0])]
    bars += [
        (name, "more" if ms > 0 else "less", min(start, start + ms), max(start, start + ms), ms)
        for (name, ms), start in zip(falls, edges, strict=False)
    ]
    bars.append(("after", "whole", low, edges[-1], edges[-1]))
    rows = [
        {
            "name": name,
            "kind": kind,
            "text": f"{'+' if kind == 'more' else ''}{format_number(ms, 'ms')}",
            "left": round(percent * (start - low), 2),
            "width": round(percent * (end - start), 2),
        }
        for name, kind, start, end, ms in bars
    ]
    return {"falls": rows, "falls_begin": format_number(low, "ms")}
