"""The page of ``trace --html``: verdict, timeline of a step by rank and stream, the waterfall, tables that sort."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cs336sys.capture.difference import CaptureDifference, compare_captures
from cs336sys.capture.reading import AnalysedCaptures
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.capture.timeline import Timeline
from cs336sys.commands.trace.difference_tables import change_name
from cs336sys.tables.numbers import format_number
from cs336sys.tables.page import html_page, html_table
from cs336sys.tables.table import Table

# A lane is the row of bars of one stream. Its units of length, and most bars: shorter ones join their neighbours.
_WIDTH = 10_000
_MOST_BARS = 2500
_MOST_STREAMS = 12
_MOST_RANKS = 32
_MOST_FALLS = 8


def trace_page(tables: Sequence[Table], captures: Sequence[AnalysedCaptures]) -> str:
    """Return the text of the page.

    Args:
        tables: the verdict first.
        captures: those of one side, or those before and those after.
    """
    from jinja2 import Environment, PackageLoader

    verdict, *other_tables = tables
    headings = ("One step, before", "One step, after") if len(captures) > 1 else ("One step",)
    templates = Environment(loader=PackageLoader("cs336sys.commands.trace", "."), autoescape=True)
    values = {"verdict": verdict, "steps": list(map(_step_drawing, captures, headings)), "width": _WIDTH}
    if len(captures) > 1:
        values |= _waterfall(compare_captures(*(of_side.analyses[0] for of_side in captures)))
    body, style, script = (templates.get_template(f"page.{kind}").render(values) for kind in ("jinja", "css", "js"))
    return html_page(verdict.title, [body, *map(html_table, other_tables)], style, script)


def _step_drawing(captures: AnalysedCaptures, heading: str) -> dict[str, Any]:
    """Return what page.jinja draws of the first rank's step of median length and the others' of the same number."""
    analyses = captures.analyses[:_MOST_RANKS]  # The timelines of further ranks are left out below.
    by_length = sorted(range(len(analyses[0].step_ms)), key=analyses[0].step_ms.__getitem__)
    numbers = [analysis.step_numbers or tuple(range(len(analysis.step_ms))) for analysis in analyses]
    chosen = numbers[0][by_length[len(by_length) // 2]]  # The median.
    windows = []
    for rank, (rank_numbers, timeline) in enumerate(zip(numbers, captures.timelines, strict=False)):
        # A rank without this step shows one from its middle.
        step_index = rank_numbers.index(chosen) if chosen in rank_numbers else len(rank_numbers) // 2
        begin, end = timeline.steps.bounds[step_index].tolist()
        aligned = begin  # By the first rank's clock, below; aligned() takes and returns arrays.
        if captures.ranks is not None:
            aligned = float(captures.ranks.clocks.aligned(rank, np.array([begin]))[0])
        windows.append((timeline, begin, end, aligned - begin))  # The offset: by what a rank's clock is behind.
    first = min(begin + offset for _, begin, _, offset in windows)
    length_ns = max(end + offset for _, _, end, offset in windows) - first
    lanes = [
        lane
        for (timeline, begin, end, offset), analysis in zip(windows, analyses, strict=True)
        for lane in _lanes(timeline, analysis.label, begin, end, origin=first - offset, axis_ns=length_ns)
    ]
    drawn_kinds = {bar["kind"] for lane in lanes for bar in lane["bars"]}
    return {
        "heading": heading,
        "name": f"Step {chosen}" if analyses[0].has_steps else "The capture",
        "lanes": lanes,
        "kinds": [kind for kind in Category if kind in drawn_kinds],
        "length_ms": length_ns / 1e6,
        "length": format_number(length_ns / 1e6, "ms"),
    }


def _lanes(timeline: Timeline, label: str, begin: int, end: int, origin: float, axis_ns: float) -> list[dict[str, Any]]:
    """Return lanes of the busiest streams, from ``begin`` to ``end``; all times are ns by the clock of the timeline."""
    inside = np.flatnonzero((timeline.start < end) & (timeline.stop > begin))
    streams, counts = np.unique(timeline.stream[inside], return_counts=True)
    lanes = []
    for stream in streams[np.argsort(-counts, kind="stable")][:_MOST_STREAMS].tolist():
        text = timeline.texts[stream]
        name = ", ".join(filter(None, (label, f"stream {text}" if text.isdigit() else text)))
        of_stream = inside[timeline.stream[inside] == stream]
        lanes.append({"name": name, "bars": _bars(timeline, of_stream, origin, axis_ns)})
    return lanes


def _bars(timeline: Timeline, chosen: np.ndarray, origin: float, axis_ns: float) -> list[dict[str, Any]]:
    """Return the bars of a lane; where there are too many, short neighbours are drawn as one."""
    scale = _WIDTH / max(axis_ns, 1.0)  # Units of length a ns.
    least_width = _WIDTH / _MOST_BARS if len(chosen) > _MOST_BARS else 0.0
    bars: list[dict[str, Any]] = []
    for number, length_ns in zip(chosen.tolist(), timeline.length[chosen].tolist(), strict=True):
        left = (float(timeline.start[number]) - origin) * scale
        width = max(length_ns * scale, 0.5)  # Wide enough to be seen.
        if bars and left + width - bars[-1]["left"] < least_width:
            text = f"{bars[-1]['text'].removesuffix(' and more')} and more"
            bars[-1] |= {"width": left + width - bars[-1]["left"], "text": text}
            continue
        name = timeline.texts[timeline.name[number]]
        text = f"{short_name(name)}, {format_number(length_ns / 1e3, 'us')} us"
        bars.append({"left": left, "width": width, "kind": category_of(name), "text": text})
    return bars


def _waterfall(difference: CaptureDifference) -> dict[str, Any]:
    """Return what page.jinja draws of the largest changes between two steps, the sum of smaller ones, and noise."""
    significant = [change for change in difference.changes if change.is_significant]
    falls = [(f"{change_name(change)} ({change.verdict})", change.delta_ms) for change in significant[:_MOST_FALLS]]
    if others := significant[_MOST_FALLS:]:
        falls.append((f"{len(others)} other changes", sum(change.delta_ms for change in others)))
    falls.append(("same, or undecided", difference.delta_ms - sum(ms for _, ms in falls)))
    edges_ms = list(itertools.accumulate((ms for _, ms in falls), initial=difference.before_ms))
    # The axis begins not at 0 but a little below the lowest edge, so that changes are seen.
    low_ms = max(0.0, min(edges_ms) - 0.2 * (max(edges_ms) - min(edges_ms)))
    percent_per_ms = 100 / max(max(edges_ms) - low_ms, 1e-9)  # The least, for edges that are all equal.

    def bar(name: str, kind: str, start_ms: float, end_ms: float, text: str) -> dict[str, Any]:
        left, width = round(percent_per_ms * (start_ms - low_ms), 2), round(percent_per_ms * (end_ms - start_ms), 2)
        return {"name": name, "kind": kind, "text": text, "left": left, "width": width}

    bars = [bar("before", "whole", low_ms, edges_ms[0], format_number(edges_ms[0], "ms"))]
    for (name, ms), edges in zip(falls, itertools.pairwise(edges_ms), strict=True):
        kind, sign = ("more", "+") if ms > 0 else ("less", "")
        bars.append(bar(name, kind, min(edges), max(edges), sign + format_number(ms, "ms")))
    bars.append(bar("after", "whole", low_ms, edges_ms[-1], format_number(edges_ms[-1], "ms")))
    return {"falls": bars, "falls_begin": format_number(low_ms, "ms")}
