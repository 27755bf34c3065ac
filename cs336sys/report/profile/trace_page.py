"""The page of ``trace --html``: verdict, timeline of a step by rank and stream, the waterfall, tables that sort."""

import itertools
from collections.abc import Sequence

import numpy as np

from cs336sys.capture.reading import Read
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.capture.timeline import Timeline
from cs336sys.report.numbers import format_number
from cs336sys.report.page import escaped, html_page, html_table
from cs336sys.report.profile.kernels import CATEGORY_COLORS
from cs336sys.report.table import Table

# Of a timeline as wide as the page: shorter kernels are drawn together with their neighbours of the same kind.
_WIDTH = 10_000
_MOST_BARS = 2500
_MOST_STREAMS = 12
_MOST_RANKS = 32

_STYLE = """
.lane { display: grid; grid-template-columns: 8em 1fr; align-items: center; font-size: 12px; }
.lane span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; padding-right: 6px; }
.lane svg { width: 100%; height: 20px; background: #f5f5f5; border-bottom: 1px solid #fff; touch-action: pan-y; }
.axis { display: flex; justify-content: space-between; } .axis b { font-weight: normal; }
.zoom button { font: inherit; padding: 2px 10px; }
.key { font-size: 12px; } .key i { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 4px 0 10px; }
.fall { display: grid; grid-template-columns: minmax(8em, 18em) 1fr; font-size: 13px; gap: 2px 8px; }
.fall { align-items: center; }
.fall b { display: block; height: 14px; min-width: 1px; } .fall .more { background: #c44e52; }
.fall .less { background: #1f9e89; } .fall .whole { background: #8c8c8c; }
.fall span { overflow-wrap: anywhere; } thead th { cursor: pointer; }
.verdict { font-size: 17px; } .verdict p { margin: 0.3em 0; }
td { max-width: 40em; overflow: hidden; text-overflow: ellipsis; }
@media (prefers-color-scheme: dark) { .lane svg { background: #2a2a2a; border-color: #1a1a1a; } }
@media print { .zoom { display: none; } }
@media (max-width: 600px) { .lane { grid-template-columns: 5em 1fr; } td { max-width: 16em; } }
"""

# Sorting by a click on a header, and zooming all lanes together by buttons, wheel and dragging.
_SCRIPT = """
document.querySelectorAll('thead th').forEach(th => th.addEventListener('click', () => {
  const column = th.cellIndex, body = th.closest('table').tBodies[0], down = th.dataset.down !== '1';
  th.closest('tr').querySelectorAll('th').forEach(one => delete one.dataset.down);
  th.dataset.down = down ? '1' : '0';
  const value = row => row.cells[column].textContent.replace(/,/g, '');
  const compare = (a, b) => { const x = parseFloat(value(a)), y = parseFloat(value(b));
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || value(a).localeCompare(value(b));
    return down ? y - x : x - y; };
  [...body.rows].sort(compare).forEach(row => body.append(row));
}));
const lanes = [...document.querySelectorAll('.lane svg')];
let from = 0, wide = WIDTH;
const show = () => { wide = Math.min(WIDTH, Math.max(wide, 1)); from = Math.min(WIDTH - wide, Math.max(0, from));
  lanes.forEach(svg => svg.setAttribute('viewBox', `${from} 0 ${wide} 20`));
  document.querySelectorAll('.axis').forEach(axis => [...axis.children].forEach((tick, place) => {
    const span = axis.dataset.ms / WIDTH; tick.textContent = ((from + wide * place / 4) * span).toPrecision(4); })); };
const zoom = (factor, at) => { from += wide * at * (1 - factor); wide *= factor; show(); };
const act = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { from -= wide / 4; show(); },
  right: () => { from += wide / 4; show(); }, all: () => { wide = WIDTH; show(); } };
document.querySelectorAll('.zoom button').forEach(button =>
  button.addEventListener('click', () => act[button.dataset.act]()));
const keys = { '+': 'in', '=': 'in', '-': 'out', ArrowLeft: 'left', ArrowRight: 'right', 0: 'all' };
document.querySelectorAll('.lanes').forEach(box => box.addEventListener('keydown', event => {
  if (keys[event.key]) { event.preventDefault(); act[keys[event.key]](); } }));
show();
lanes.forEach(svg => {
  const place = event => (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth;
  svg.addEventListener('wheel', event => { event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)); }, { passive: false });
  let held = null;
  svg.addEventListener('pointerdown', event => { held = place(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener('pointermove', event => { if (held === null) return;
    from += (held - place(event)) * wide; held = place(event); show(); });
  svg.addEventListener('pointerup', () => { held = null; });
});
""".replace("WIDTH", str(_WIDTH))


def trace_page(
    tables: Sequence[Table], reads: Sequence[Read], falls: Sequence[tuple[str, float]], before_ms: float
) -> str:
    """The text of the page.

    Args:
        tables: the verdict first.
        reads: what was read, with timelines; the side before, and the one after.
        falls: the changes from before, at ``before_ms``, to after; empty for a single capture.
    """
    verdict, *rest = tables
    sentences = "".join(f"<p>{escaped(str(row['verdict']))}</p>" for row in verdict.rows)
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in verdict.notes)
    headings = ("One step, before", "One step, after") if len(reads) > 1 else ("One step",)
    parts = [
        f'<div class="verdict">{sentences}</div>{notes}',
        *([_waterfall_html(falls, before_ms)] if falls else []),
        *map(_timelines, reads, headings),
        *map(html_table, rest),
    ]
    return html_page(verdict.title, parts, _STYLE, _SCRIPT)


def _timelines(read: Read, heading: str) -> str:
    """The step of the middle length of the first rank, and that of the same number of the others."""
    order = sorted(range(len(read.analyses[0].step_ms)), key=read.analyses[0].step_ms.__getitem__)
    numbers = [analysis.step_numbers or tuple(range(len(analysis.step_ms))) for analysis in read.analyses[:_MOST_RANKS]]
    chosen = numbers[0][order[len(order) // 2]]
    lanes: list[str] = []
    used: set[str] = set()
    windows = []
    for rank, timeline in enumerate(read.timelines[:_MOST_RANKS]):
        place = numbers[rank].index(chosen) if chosen in numbers[rank] else len(numbers[rank]) // 2
        begin, end = timeline.steps.bounds[place].tolist()
        offset = 0.0
        if read.ranks is not None:
            aligned = read.ranks.clocks.aligned(rank, np.array([begin]))
            offset = float(aligned[0]) - begin
        windows.append((begin, end, offset))
    first = min(begin + offset for begin, _, offset in windows)
    length = max(end + offset for _, end, offset in windows) - first
    for (begin, end, offset), timeline, analysis in zip(windows, read.timelines, read.analyses, strict=False):
        lanes += _lanes(timeline, analysis.label, begin, end, first - offset, length, used)
    key = "".join(f'<i style="background:{CATEGORY_COLORS[kind]}"></i>{kind}' for kind in Category if kind in used)
    buttons = "".join(
        f'<button data-act="{act}" aria-label="{label}">{sign}</button> '
        for act, sign, label in (
            ("in", "+", "zoom in"),
            ("out", "-", "zoom out"),
            ("left", "&larr;", "earlier"),
            ("right", "&rarr;", "later"),
            ("all", "all", "the whole step"),
        )
    )
    step = f"Step {chosen}" if read.analyses[0].has_steps else "The capture"
    return (
        f"<h2>{escaped(heading)}</h2>\n<p class=zoom>{buttons}</p>\n"
        f'<div class="lanes" tabindex="0" aria-label="timeline: plus, minus, arrow keys and 0 zoom and move">'
        f'{"".join(lanes)}<div class="lane"><span>ms</span><div class="axis" data-ms="{length / 1e6:.6f}">'
        f"{'<b></b>' * 5}</div></div></div>\n<p class=key>{key}</p>"
        f'<p class="note">{step}, {format_number(length / 1e6, "ms")} ms from left to right, a lane for each '
        "stream; wheel, dragging, + - 0 and arrow keys zoom and move; a bar names its kernel</p>"
    )


def _lanes(
    timeline: Timeline, label: str, begin: int, end: int, first: float, length: float, used: set[str]
) -> list[str]:
    inside = np.flatnonzero((timeline.start < end) & (timeline.stop > begin))
    streams, counts = np.unique(timeline.stream[inside], return_counts=True)
    lanes = []
    for stream in streams[np.argsort(-counts, kind="stable")][:_MOST_STREAMS].tolist():
        bars = _bars(timeline, inside[timeline.stream[inside] == stream], first, length)
        used.update(kind for *_, kind, _ in bars)
        shapes = "".join(
            f'<rect x="{left:.1f}" y="1" width="{width:.1f}" height="18" fill="{CATEGORY_COLORS[kind]}"><title>'
            f"{escaped(title)}</title></rect>"
            for left, width, kind, title in bars
        )
        text = timeline.texts[stream]
        name = ", ".join(filter(None, (label, f"stream {text}" if text.isdigit() else text)))
        lanes.append(
            f'<div class="lane"><span title="{escaped(name)}">{escaped(name)}</span>'
            f'<svg viewBox="0 0 {_WIDTH} 20" preserveAspectRatio="none" role="img">{shapes}</svg></div>\n'
        )
    return lanes


def _bars(timeline: Timeline, chosen: np.ndarray, first: float, length: float) -> list[tuple[float, float, str, str]]:
    """Left, width, kind and words of each bar; where there are too many, neighbours of one kind are one."""
    scale = _WIDTH / max(length, 1.0)
    least = _WIDTH / _MOST_BARS if len(chosen) > _MOST_BARS else 0.0
    bars: list[tuple[float, float, str, str, int]] = []
    for number in chosen.tolist():
        left = (float(timeline.start[number]) - first) * scale
        width = float(timeline.stop[number] - timeline.start[number]) * scale
        name = timeline.texts[timeline.name[number]]
        kind = category_of(name)
        if bars and least and left + width - bars[-1][0] < least:
            before, _, of, label, count = bars[-1]
            bars[-1] = (before, left + width - before, of, label, count + 1)
            continue
        us = (timeline.stop[number] - timeline.start[number]) / 1e3
        bars.append((left, width, kind, f"{short_name(name)}, {format_number(float(us), 'us')} us", 1))
    return [
        (left, max(width, 0.5), kind, label if count == 1 else f"{label}, and {count - 1} more")
        for left, width, kind, label, count in bars
    ]


def _waterfall_html(falls: Sequence[tuple[str, float]], before_ms: float) -> str:
    after_ms = before_ms + sum(ms for _, ms in falls)
    edges = list(itertools.accumulate((ms for _, ms in falls), initial=before_ms))
    # The axis begins where it shows the changes, and not at 0.
    low, high = min(edges), max(edges)
    low = max(0.0, low - max(high - low, 1e-9) * 0.2)
    span = max(high - low, 1e-9)
    rows = [
        _bar("before", low, before_ms, low, span, "whole", before_ms),
        *(
            _bar(name, min(start, start + ms), max(start, start + ms), low, span, "more" if ms > 0 else "less", ms)
            for (name, ms), start in zip(falls, edges, strict=False)
        ),
        _bar("after", low, after_ms, low, span, "whole", after_ms),
    ]
    note = f'<p class="note">the axis begins at {format_number(low, "ms")} ms</p>'
    return f'<h2>From before to after</h2>\n<div class="fall">{"".join(rows)}</div>{note}'


def _bar(name: str, start: float, end: float, low: float, span: float, kind: str, ms: float) -> str:
    left, width = 100 * (start - low) / span, 100 * (end - start) / span
    sign = "+" if kind == "more" else ""
    return (
        f"<span>{escaped(name)}, {sign}{format_number(ms, 'ms')} ms</span>"
        f'<div><b class="{kind}" style="margin-left:{left:.2f}%;width:{width:.2f}%"></b></div>'
    )
