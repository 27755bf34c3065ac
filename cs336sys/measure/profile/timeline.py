"""Timeline of one GPU, as arrays: work in the order of time, with its launch, operator and module, and the steps."""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.errors import UsageError, choose_from
from cs336sys.measure.profile.capture import Capture, collective_kind
from cs336sys.measure.profile.intervals import Nested, Times
from cs336sys.measure.profile.operators import CalledOperators
from cs336sys.measure.profile.taxonomy import COMMUNICATION, category_of
from cs336sys.measure.range_names import STEP, STEP_PHASES, WARM_UP

Indices = NDArray[np.int64]

# Classes of work, in the order in which they take an instant that several run in.
COMPUTING, COMMUNICATING, COPYING = 0, 1, 2

_ROWS_AT_ONCE = 50_000
_PROFILER_STEP = "ProfilerStep#"
# Ranges in which a program waits for its next batch.
_LOADER_NAME = re.compile(r"dataloader|data[ _]load|load(ing)? (data|batch)|next[ _]batch|get_batch", re.IGNORECASE)
_NO_MODULE = re.compile(rf"^({_PROFILER_STEP}|cs336sys |nccl:|gloo:|## Call|Torch-Compiled|{STEP}$|{WARM_UP}$)")


@dataclass(frozen=True)
class Steps:
    """The steps of a timeline.

    Attributes:
        bounds: (steps, 2) begin and end of each on the GPU, in ns. A step ends when all that it launched has run.
        definition: how they were found, to follow "steps: ".
        are_found: False where the capture as a whole replaces steps.
    """

    bounds: Times
    definition: str
    are_found: bool = True


_NO_STEPS = Steps(np.zeros((0, 2), np.int64), "", False)


@dataclass(frozen=True)
class Collectives:
    """The collectives of a timeline, in the order of time.

    Attributes:
        index: of the work.
        kinds, groups, sequences, sizes, ranks: as :mod:`~cs336sys.measure.profile.capture` has them; a sequence
            or number of ranks of -1, and a size of 0, is not recorded.
    """

    index: Indices
    kinds: Sequence[str]
    groups: Sequence[str]
    sequences: Times
    sizes: Times
    ranks: Times


@dataclass(frozen=True)
class Timeline:
    """Work of one GPU, launched by one process, in the order in which it began. Times are in ns.

    Attributes:
        start, stop: of each.
        name, stream, module, operator, shape: numbers into the lists of texts; -1 for none.
        launched: when its API call began; -1 where that was not recorded.
        waits: (calls, 2) begin and end of calls that wait for the GPU; ``wait_names`` of each.
        loading: (ranges, 2) times in which the program waits for its next batch.
        class_of: computing, communicating or copying, by name.
    """

    gpu: int
    process: int
    start: Times
    stop: Times
    name: Indices
    stream: Indices
    launched: Times
    module: Indices
    operator: Indices
    shape: Indices
    bytes: Times
    names: Sequence[str]
    streams: Sequence[str]
    modules: Sequence[str]
    shapes: Sequence[str]
    class_of: NDArray[np.int8]
    waits: Times
    wait_names: Sequence[str]
    loading: Times
    collectives: Collectives
    steps: Steps = _NO_STEPS

    @property
    def work_class(self) -> NDArray[np.int8]:
        return self.class_of[self.name]


def timelines(capture: Capture, step: str | None = None) -> list[Timeline]:
    """Each GPU of each process of a capture that did more than a little.

    Args:
        step: name of the ranges that are the steps.

    Raises:
        UsageError: there are no ranges of that name.
    """
    tables = capture.tables
    used = tables.execute(
        "SELECT process, gpu, sum(stop - start) FROM work GROUP BY process, gpu ORDER BY gpu, process"
    ).fetchall()
    most = max(row[2] for row in used)
    names = dict(tables.execute("SELECT id, text FROM name"))
    shapes = dict(tables.execute("SELECT id, text FROM shape"))
    return [
        _timeline(capture, process, gpu, names, shapes, step)
        for process, gpu, total in used
        # A GPU with less of the work was only touched.
        if total >= 0.02 * most
    ]


def _timeline(
    capture: Capture, process: int, gpu: int, names: Mapping[int, str], shapes: Mapping[int, str], step: str | None
) -> Timeline:
    tables = capture.tables
    rows = tables.execute(
        """SELECT number, work.start, work.stop, name, coalesce(launch.start, -1), coalesce(bytes, -1),
                  coalesce(operation, -1), stream, thread
           FROM work LEFT JOIN launch USING (process, correlation)
           WHERE process = ? AND gpu = ? ORDER BY work.start, work.stop""",
        (process, gpu),
    )
    number, start, stop, name, launched, size, operation, stream, thread, streams, threads = _work_columns(rows)
    kernel_names = [names.get(id_, f"unnamed {id_}") for id_ in np.unique(name).tolist()]
    name = np.unique(name, return_inverse=True)[1]
    called = CalledOperators(tables, operation, threads)
    operator, texts = called.named(names, kernel_names)
    # Where its launch was not recorded, it was launched in its operator.
    is_lost = (launched < 0) & (called.place >= 0)
    launched[is_lost] = called.start[called.place[is_lost]]
    thread[is_lost] = called.thread[called.place[is_lost]]
    module, modules = _modules(tables, process, launched, thread, threads, names)
    waits, ranges = (
        tables.execute(f"SELECT start, stop, name FROM {table} WHERE process = ? ORDER BY start", (process,)).fetchall()
        for table in ("waits", "ranges")
    )
    loading = [(begin, end) for begin, end, text in ranges if _LOADER_NAME.search(text)]
    timeline = Timeline(
        gpu=gpu,
        process=process,
        start=start,
        stop=stop,
        name=name,
        stream=stream,
        launched=launched,
        module=module,
        operator=operator,
        shape=np.where(called.place >= 0, called.shape[called.place], -1),
        bytes=size,
        names=texts,
        streams=streams,
        modules=modules,
        shapes=[shapes.get(number, "") for number in range(max(shapes, default=-1) + 1)],
        class_of=np.array([_class_of(text) for text in texts], np.int8),
        waits=_interval_pairs([row[:2] for row in waits]),
        wait_names=[row[2] for row in waits],
        loading=_interval_pairs(loading),
        collectives=_collectives(tables, number, name, operation, texts),
    )
    return replace(timeline, steps=_find_steps(capture, timeline, step))


def _class_of(name: str) -> int:
    if name.startswith(("Memcpy", "Memset")):
        return COPYING
    return COMMUNICATING if category_of(name) == COMMUNICATION else COMPUTING


def _interval_pairs(rows: Sequence[tuple[int, int]]) -> Times:
    return np.array(rows, np.int64).reshape(-1, 2)


def _work_columns(rows: sqlite3.Cursor) -> tuple:
    """The columns as arrays, with streams and threads numbered, and the names of these."""
    blocks = []
    streams: dict[str, int] = {}
    threads: dict[str, int] = {}
    while block := rows.fetchmany(_ROWS_AT_ONCE):
        of_stream = [streams.setdefault(str(row[7]), len(streams)) for row in block]
        of_thread = [threads.setdefault(str(row[8]), len(threads)) for row in block]
        numbers = np.array([row[:7] for row in block], np.int64)
        blocks.append(np.column_stack((numbers, of_stream, of_thread)))
    columns = np.concatenate(blocks).T.copy()
    return (*columns, list(streams), list(threads))


def _modules(
    tables: sqlite3.Connection,
    process: int,
    launched: Times,
    thread: Indices,
    threads: Sequence[str],
    names: Mapping[int, str],
) -> tuple[Indices, list[str]]:
    """The module that launched each kernel, in the backward pass the one whose forward operator it belongs to.

    Where modules were not recorded, the innermost range of the launching thread.
    """
    thread_of = {text: number for number, text in enumerate(threads)}

    def number_of(thread: Any) -> int:
        return thread_of.setdefault(str(thread), len(thread_of))

    rows = [
        (begin, end, number_of(of), re.sub(r"_\d+$", "", names[id_].removeprefix("nn.Module: ")))
        for begin, end, of, id_ in tables.execute("SELECT start, stop, thread, name FROM module")
    ]
    has_modules = bool(rows)
    if not rows:
        ranges = tables.execute("SELECT start, stop, thread, name FROM ranges WHERE process = ?", (process,))
        rows = [
            (begin, end, number_of(of), text)
            for begin, end, of, text in ranges
            if not _NO_MODULE.match(text) and not _LOADER_NAME.search(text)
        ]
        phases = [row for row in rows if row[3] in STEP_PHASES]
        # Phases are open for every thread.
        rows += [
            (begin, end, other, text) for begin, end, of, text in phases for other in range(len(threads)) if other != of
        ]
    if not rows:
        return np.full(len(launched), -1), []
    nested = Nested([row[:3] for row in rows])
    innermost = nested.innermost(launched, thread)
    if has_modules:
        at, of = _forward_times(tables, launched, thread, thread_of)
        is_backward = (innermost < 0) & (at >= 0)
        innermost[is_backward] = nested.innermost(at[is_backward], of[is_backward])
    labels: dict[str, int] = {}
    label_of = np.full(len(rows) + 1, -1)
    for number in np.unique(innermost[innermost >= 0]).tolist():
        parent = int(nested.parent[number])
        text = nested.pick(rows, number)[3]
        if has_modules and parent >= 0:
            text = f"{nested.pick(rows, parent)[3]}.{text}"
        label_of[number] = labels.setdefault(text, len(labels))
    return label_of[innermost], list(labels)


def _forward_times(
    tables: sqlite3.Connection, launched: Times, thread: Indices, thread_of: Mapping[str, int]
) -> tuple[Times, Indices]:
    """Return time and thread of the forward operator of each kernel of the backward pass; -1 for none."""
    at, of = np.full(len(launched), -1), np.full(len(launched), -1)
    rows = tables.execute(
        """SELECT start, stop, thread, sequence, text LIKE '%Backward%' FROM operation JOIN name ON name.id = name
           WHERE sequence >= 0 ORDER BY start"""
    ).fetchall()
    forward: dict[int, tuple[int, int]] = {}
    backward = []
    for begin, end, where, sequence, is_backward in rows:
        number = thread_of.get(str(where), -1)
        if is_backward:
            backward.append((begin, end, number, sequence))
        elif number >= 0:
            # Of an operator and those that it calls, all of one number, the outermost began first.
            forward.setdefault(sequence, (begin, number))
    if not backward or not forward:
        return at, of
    nested = Nested([row[:3] for row in backward])
    innermost = nested.innermost(launched, thread)
    for place in np.flatnonzero(innermost >= 0).tolist():
        time_and_thread = forward.get(nested.pick(backward, int(innermost[place]))[3])
        if time_and_thread:
            at[place], of[place] = time_and_thread
    return at, of


def _collectives(
    tables: sqlite3.Connection, number: Indices, name: Indices, operation: Indices, names: Sequence[str]
) -> Collectives:
    is_one = np.array([_class_of(text) == COMMUNICATING for text in names], bool)[name]
    # On a CPU the operators that call Gloo are no collectives.
    is_call = np.array([text.startswith(("c10d::", "record_param")) for text in names], bool)[name]
    index = np.flatnonzero(is_one & ~is_call)
    recorded, of_operators = (
        {row[0]: row[1:] for row in tables.execute(f"SELECT {key}, kind, grp, sequence, bytes, ranks FROM collective")}
        for key in ("work", "operation")
    )
    kinds, groups, numbers = [], [], []
    for place in index.tolist():
        row = recorded.get(int(number[place])) or of_operators.get(int(operation[place]))
        kind, group, sequence, size, ranks = row or (collective_kind(names[name[place]]), "", None, None, None)
        kinds.append(kind)
        groups.append(group)
        numbers.append((-1 if sequence is None else sequence, size or 0, ranks or -1))
    values = np.array(numbers, np.int64).reshape(-1, 3)
    return Collectives(index, kinds, groups, values[:, 0], values[:, 1], values[:, 2])


def _find_steps(capture: Capture, timeline: Timeline, range_name: str | None) -> Steps:
    names = capture.range_names()
    if range_name is not None:
        if range_name not in names:
            raise UsageError(
                f"--step '{range_name}': the capture has no range of this name: {choose_from(range_name, names)}"
            )
        return _by_ranges(capture, timeline, range_name, f"the ranges '{range_name}'")
    if STEP in names and (steps := _by_ranges(capture, timeline, STEP, "the ranges 'step'")).are_found:
        return steps
    if any(name.startswith(_PROFILER_STEP) for name in names):
        steps = _by_ranges(capture, timeline, f"{_PROFILER_STEP}*", "those that torch.profiler was told of")
        if steps.are_found:
            return steps
    whole = np.array([[timeline.start[0], timeline.stop.max()]])
    definition = "none was found, the capture as a whole; --step NAME chooses ranges"
    return _by_repetition(timeline) or Steps(whole, definition, are_found=False)


def _by_ranges(capture: Capture, timeline: Timeline, name: str, definition: str) -> Steps:
    """Steps that ranges mark; each ends when its work has run and its range has ended.

    The time from one to the next belongs to the next where torch.profiler marked them, for it has nothing between.
    """
    is_pattern = name.endswith("*")
    rows = capture.tables.execute(
        f"SELECT start, stop FROM ranges WHERE name {'GLOB' if is_pattern else '='} ? AND process = ? ORDER BY start",
        (name.replace("#", "[#]") if is_pattern else name, timeline.process),
    ).fetchall()
    ranges: list[tuple[int, int]] = []
    for begin, end in rows:
        # Those within others are left out. Rounding makes neighbours overlap by a nanosecond.
        if not ranges or (end > ranges[-1][1] and 2 * begin > sum(ranges[-1])):
            ranges.append((begin, end))
    if not ranges:
        return _NO_STEPS
    launched = np.where(timeline.launched < 0, timeline.start, timeline.launched)
    # What ran before anything that was launched in the steps, and has no launch, was launched before the capture.
    starts_of_launched = timeline.start[timeline.launched >= ranges[0][0]]
    is_earlier = (timeline.launched < 0) & (timeline.start < (starts_of_launched[0] if len(starts_of_launched) else 0))
    launched[is_earlier] = np.minimum(launched[is_earlier], ranges[0][0] - 1)
    order = np.argsort(launched, kind="stable")
    ends = np.maximum.accumulate(timeline.stop[order]) if len(order) else order
    sorted_launches = launched[order]

    def reached(time: int) -> int:
        """Return the time at which all work launched before this time had run."""
        count = int(np.searchsorted(sorted_launches, time))
        return int(ends[count - 1]) if count else time

    bounds = []
    before = max(ranges[0][0], reached(ranges[0][0]))
    for begin, end in ranges:
        after = max(end, reached(end))
        bounds.append((before if is_pattern else max(before, begin), after))
        before = after
    first, last = np.searchsorted(sorted_launches, [ranges[0][0], ranges[-1][1]])
    return Steps(np.array(bounds, np.int64), definition) if last > first else _NO_STEPS


def _by_repetition(timeline: Timeline) -> Steps | None:
    """Steps by the shortest period in which kernels repeat that has every name in every period.

    A layer repeats, too, but what stands once a step (the loss, an embedding) is not in every layer.
    """
    order = np.argsort(np.where(timeline.launched < 0, timeline.start, timeline.launched), kind="stable")
    order = order[timeline.class_of[timeline.name[order]] == COMPUTING]
    sequence = timeline.name[order]
    counts = np.bincount(sequence)
    rarest = np.argsort(np.where(counts > 1, counts, np.iinfo(np.int64).max), kind="stable")
    tried: set[int] = set()
    for name in rarest[:40].tolist():
        if counts[name] < 2:
            break
        places = np.flatnonzero(sequence == name)
        period = int(np.median(np.diff(places)))
        # A step has four kernels at least.
        if period in tried or period < 4 or 2 * period > len(sequence):
            continue
        tried.add(period)
        if np.mean(sequence[period:] == sequence[:-period]) < 0.97:
            continue
        first = int(places[0])
        # From the first place on which everything repeats.
        whole = (len(sequence) - first) // period
        used = np.unique(sequence[first : first + whole * period])
        rows = sequence[first : first + whole * period].reshape(whole, period)
        if whole < 2 or any(not np.all(np.any(rows == name_in_period, axis=1)) for name_in_period in used.tolist()):
            continue
        if len(used) < (counts > 0).sum():
            continue
        begins = timeline.start[order[first + period * np.arange(whole)]]
        after = first + whole * period
        end = timeline.start[order[after]] if after < len(order) else timeline.stop[order[first:after]].max()
        edges = np.append(begins, max(end, begins[-1] + 1))
        if np.any(np.diff(edges) <= 0):
            continue
        return Steps(
            np.column_stack((edges[:-1], edges[1:])), f"by repetition, the same {period:,} kernels {whole} times"
        )
    return None
