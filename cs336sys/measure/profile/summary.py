"""Attribute every kernel of a capture to the range in which it was launched, and sum up."""

import difflib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cs336sys.errors import UsageError
from cs336sys.measure.profile.capture import Capture
from cs336sys.measure.range_names import ATTENTION_PARTS, STEP, STEP_PHASES

PROFILER_STEP = "ProfilerStep"
WHOLE = "the whole capture"

# Annotations that cover less of the work's time than this do not speak for the capture.
_COVERED_PERCENT = 95.0


def choose_ranges(capture: Capture) -> tuple[tuple[str, ...], str]:
    """Names of the ranges to sum up, and a sentence that says which they are.

    Those are torch.profiler's steps, called :data:`PROFILER_STEP` from then on; without any the outermost annotations,
    if they cover the work and those of different names do not overlap; else a range around everything, :data:`WHOLE`.
    """
    tables = capture.tables
    # torch.profiler numbers the steps that a program tells it of by profiler.step().
    tables.execute("UPDATE ranges SET name = ? WHERE name GLOB 'ProfilerStep#*'", (PROFILER_STEP,))
    steps = tables.execute("SELECT count(*) FROM ranges WHERE name = ?", (PROFILER_STEP,)).fetchone()[0]
    total, launched, in_steps, annotated = _covered(tables)
    is_known = 100 * launched >= _COVERED_PERCENT * total
    if steps and is_known and in_steps:
        return (PROFILER_STEP,), f"phases: the steps of torch.profiler, {steps} of them; others are chosen with --range"
    annotations = _outermost_annotations(tables)
    if annotations and 100 * annotated >= _COVERED_PERCENT * total:
        return annotations, "phases: the program's own annotations, the outermost; others are chosen with --range"
    _add_whole(tables)
    return (WHOLE,), "phases: none, the capture as a whole; where it has ranges they are chosen with --range"


def _covered(tables: sqlite3.Connection) -> tuple[int, int, int, int]:
    """The work's time in ns: all, that with a launch, that launched in torch.profiler's steps, and in any range."""
    tables.execute("CREATE TEMP TABLE span AS SELECT *, 0 AS is_step FROM ranges LIMIT 0")
    tables.execute(
        """INSERT INTO span SELECT name, start, stop, process, thread, name = ? FROM
               (SELECT *, max(stop) OVER (PARTITION BY process, name = ? ORDER BY start, stop DESC
                                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached FROM ranges)
           WHERE reached IS NULL OR stop > reached""",
        (PROFILER_STEP, PROFILER_STEP),
    )
    tables.execute("CREATE INDEX temp.span_by_start ON span (process, is_step, start)")
    # The last one that began before it: those that lie in others are gone.
    within = """coalesce((SELECT span.stop >= launch.start FROM span WHERE span.process = launch.process
                           AND span.is_step = {} AND span.start <= launch.start ORDER BY span.start DESC LIMIT 1), 0)"""
    sums = tables.execute(
        f"""SELECT coalesce(sum(length), 0), coalesce(sum(length * is_launched), 0),
                   coalesce(sum(length * in_step), 0), coalesce(sum(length * max(in_step, in_other)), 0)
            FROM (SELECT work.stop - work.start AS length, launch.start IS NOT NULL AS is_launched,
                         {within.format(1)} AS in_step, {within.format(0)} AS in_other
                  FROM work LEFT JOIN launch USING (process, correlation))"""
    ).fetchone()
    tables.execute("DROP TABLE span")
    return sums


def _outermost_annotations(tables: sqlite3.Connection) -> tuple[str, ...]:
    """Names of ranges in no other, in the order of their first begin; none where those of two names overlap."""
    tables.execute(
        """CREATE TEMP TABLE outermost AS SELECT name, start, stop, process FROM
               (SELECT *, max(stop) OVER (PARTITION BY process ORDER BY start, stop DESC
                                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached FROM ranges)
           WHERE reached IS NULL OR stop > reached"""
    )
    try:
        names = [row[0] for row in tables.execute("SELECT name FROM outermost GROUP BY name ORDER BY min(start)")]
        overlaps = tables.execute(
            """SELECT 1 FROM (SELECT r.name, r.start, r.process, lag(r.stop) OVER earlier AS until,
                                     lag(r.name) OVER earlier AS previous
                              FROM ranges AS r WHERE r.name IN (SELECT name FROM outermost)
                              WINDOW earlier AS (PARTITION BY r.process ORDER BY r.start, r.stop DESC))
               WHERE start < until AND name != previous LIMIT 1"""
        ).fetchone()
        return () if overlaps else tuple(names)
    finally:
        tables.execute("DROP TABLE outermost")


def _add_whole(tables: sqlite3.Connection) -> None:
    """A range around all work of each process, and a launch for work whose own was not recorded, when it began."""
    tables.execute(
        """UPDATE work SET correlation = -rowid WHERE NOT EXISTS
               (SELECT 1 FROM launch WHERE launch.process = work.process AND launch.correlation = work.correlation)"""
    )
    tables.execute("INSERT INTO launch SELECT process, correlation, start, start, '' FROM work WHERE correlation < 0")
    tables.execute(
        """INSERT INTO ranges SELECT ?, min(start), max(stop), process, '' FROM
               (SELECT process, start, start AS stop FROM launch UNION ALL SELECT process, start, stop FROM work)
           GROUP BY process""",
        (WHOLE,),
    )


# Less than this share of the GPU's time given to phases means that the answers would be wrong, not imprecise.
MINIMUM_ATTRIBUTED_PERCENT = 95.0


@dataclass(frozen=True)
class RangeTime:
    """All ranges of one name, and the work that was launched in them. Times are sums over the ranges, in ns.

    Attributes:
        count: how many ranges there are.
        wall_ns: their own length on the CPU's clock.
        kernels: kernels, copies and fills launched in them.
        kernel_ns: how long each of these ran, added up; more than ``busy_ns`` where some ran side by side.
        busy_ns: how long at least one of them ran.
        span_ns: from the start of the first one to the end of the last one, range by range.
        gpu: the number of the GPU on which this work ran; None for that of all.
    """

    name: str
    count: int
    wall_ns: int
    kernels: int
    kernel_ns: int
    busy_ns: int
    span_ns: int
    gpu: int | None = None


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in all ranges of one name; durations in ns."""

    range: str
    kernel: str
    count: int
    total_ns: int
    median_ns: float
    min_ns: int
    max_ns: int


@dataclass(frozen=True)
class Profile:
    """A capture's answer about its phases.

    Attributes:
        profiler: what made the capture.
        is_gpu: False where CPU operations replace kernels.
        phases: in the order in which they first begin; they do not overlap.
        step: the ranges called ``step``, which the phases are parts of; None where there are none.
        parts: those of the attention on the forward pass, by launching thread, within the steps.
        kernels: by phase and kernel, the longest first.
        part_kernels: likewise for ``parts``.
        attributed_percent: share of the work's time that has a phase, in the time from the first to the last step, or
            of all work whose launch was recorded where the phases were chosen by hand and need not cover everything.
        outside_ns: work launched before the first and after the last of those, or outside of the chosen ranges.
        configuration: what ``cs336sys nsys`` ran, as its report says.
        phases_are: what the phases are in a capture without ours where none were chosen, one sentence.
        of_gpus: phases and steps GPU by GPU, in a capture of several: where one waits, another may be busy.
    """

    profiler: str
    is_gpu: bool
    phases: tuple[RangeTime, ...]
    step: RangeTime | None
    parts: tuple[RangeTime, ...]
    kernels: tuple[KernelTime, ...]
    part_kernels: tuple[KernelTime, ...]
    attributed_percent: float
    outside_ns: int
    configuration: dict[str, Any] | None = None
    phases_are: str = ""
    of_gpus: tuple[RangeTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON types only, for a results file."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Profile":
        """The inverse of :meth:`to_json`."""
        ranges = {name: tuple(RangeTime(**row) for row in record[name]) for name in ("phases", "parts", "of_gpus")}
        kernels = {name: tuple(KernelTime(**row) for row in record[name]) for name in ("kernels", "part_kernels")}
        step = RangeTime(**record["step"]) if record["step"] else None
        return cls(**{**record, **ranges, **kernels, "step": step})


def summarize(capture: Capture, chosen: Sequence[str] = ()) -> Profile:
    """Sum up a capture by phase.

    A kernel belongs to the range that is open, on whatever thread of the same process, when the API call that launched
    it begins: the backward pass launches from autograd's thread, and the kernel itself runs later than its launch. The
    call is found by correlation id and process. All kernels of a CUDA graph belong to the graph's launch. Parts of the
    attention are those of the launching thread.

    Args:
        chosen: names of the ranges that are the phases; none for those of ``cs336sys nsys``, or where it has none,
            for what :func:`~cs336sys.measure.profile.summary.choose_ranges` finds.

    Raises:
        UsageError: a chosen range is unknown, the chosen ones overlap, or phases have too little of the work.
    """
    names = capture.range_names()
    phases_are = ""
    if not chosen and not any(name in names for name in STEP_PHASES):
        chosen, phases_are = choose_ranges(capture)
        names = capture.range_names()
    phases = tuple(dict.fromkeys(chosen)) or tuple(name for name in STEP_PHASES if name in names)
    _check_range_names(phases, names)
    tables = capture.tables
    _select_ranges(tables, "phase", phases, same_thread=False)
    _check_disjoint(tables)
    _select_ranges(tables, "step", () if chosen else (STEP,), same_thread=False)
    _select_ranges(tables, "part", ATTENTION_PARTS, same_thread=True)
    if STEP in names and not chosen:
        # A warm-up has attention too.
        tables.execute(
            """DELETE FROM part WHERE start > coalesce(
                   (SELECT step.stop FROM step WHERE step.process = part.process AND step.start <= part.start
                    ORDER BY step.start DESC LIMIT 1), -1)"""
        )
    tables.execute(
        f"""CREATE TABLE attributed AS
            SELECT work.start, work.stop, work.name, launch.start AS launched, work.process, work.gpu,
                   {_open_range("phase")} AS phase, {_open_range("step")} AS step, {_open_range("part")} AS part
            FROM work LEFT JOIN launch USING (process, correlation)"""
    )
    attributed_percent, outside_ns = _check_attributed(tables, must_cover=not chosen)
    step = _range_times(tables, "step")
    gpus = [row[0] for row in tables.execute("SELECT DISTINCT gpu FROM attributed ORDER BY gpu")]
    return Profile(
        profiler=capture.profiler,
        is_gpu=capture.is_gpu,
        phases=_range_times(tables, "phase"),
        step=step[0] if step else None,
        parts=_range_times(tables, "part"),
        kernels=_kernel_times(tables, "phase"),
        part_kernels=_kernel_times(tables, "part"),
        attributed_percent=attributed_percent,
        outside_ns=outside_ns,
        configuration=capture.configuration(),
        phases_are=phases_are,
        of_gpus=tuple(row for gpu in gpus for kind in ("phase", "step") for row in _range_times(tables, kind, gpu))
        if len(gpus) > 1
        else (),
    )


def _check_range_names(phases: Sequence[str], names: Mapping[str, int]) -> None:
    if not names:
        raise UsageError("the capture holds no ranges, so kernels have no phase: annotate the program with NVTX ranges")
    for name in phases:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
            shown = list(dict.fromkeys([*near, *names]))[: max(8, len(near))]
            rest = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
            listed = ", ".join(f"'{choice}'" for choice in shown)
            raise UsageError(f"--range '{name}': the capture has no range of this name; it has {listed}{rest}")


def _select_ranges(tables: sqlite3.Connection, kind: str, names: Sequence[str], *, same_thread: bool) -> None:
    """Table ``kind`` of these ranges, without those that lie in another of the same name."""
    parameters = ", ".join("?" * len(names))
    scope = "process, thread" if same_thread else "process"
    tables.execute(
        f"""CREATE TABLE {kind} AS
            SELECT name, dense_rank() OVER (ORDER BY name) AS name_number, start, stop, {scope} FROM
                (SELECT *, max(stop) OVER (PARTITION BY {scope}, name ORDER BY start, stop DESC
                                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                 FROM ranges WHERE name IN ({parameters}))
            WHERE reached IS NULL OR stop > reached
            ORDER BY {scope}, start""",
        names,
    )
    tables.execute(f"CREATE INDEX {kind}_by_start ON {kind} ({scope}, start)")


def _check_disjoint(tables: sqlite3.Connection) -> None:
    overlap = tables.execute(
        """SELECT previous, name FROM
               (SELECT *, lag(name) OVER earlier AS previous, lag(stop) OVER earlier AS until FROM phase
                WINDOW earlier AS (PARTITION BY process ORDER BY start, stop DESC))
           WHERE start < until AND name != previous LIMIT 1"""
    ).fetchone()
    if overlap:
        raise UsageError(
            f"ranges '{overlap[0]}' and '{overlap[1]}' overlap, so kernels would count twice: choose ranges that do not"
        )


def _open_range(kind: str) -> str:
    """SQL for the range of a table that was open when the work was launched.

    Ranges within ranges of the same name are gone, so later starts have later ends, and if the last one that started
    has ended, all have.
    """
    same_thread = f"AND {kind}.thread = launch.thread" if kind == "part" else ""
    return f"""(SELECT CASE WHEN {kind}.stop >= launch.start THEN {kind}.rowid END FROM {kind}
                WHERE {kind}.process = launch.process {same_thread} AND {kind}.start <= launch.start
                ORDER BY {kind}.start DESC LIMIT 1)"""


def _check_attributed(tables: sqlite3.Connection, *, must_cover: bool) -> tuple[float, int]:
    """Share of the work that has a phase, in percent, and the time of work that no phase need have, in ns."""
    # What has no launch (it was recorded before the capture began, or dropped) is placed by when it ran.
    total, with_phase, without_launch, outside = tables.execute(
        """WITH extent AS (SELECT process, min(start) AS start, max(stop) AS stop FROM
                               (SELECT process, start, stop FROM step UNION ALL SELECT process, start, stop FROM phase)
                           GROUP BY process)
           SELECT sum(a.stop - a.start), sum((a.stop - a.start) * (phase IS NOT NULL)),
                  sum((a.stop - a.start) * (launched IS NULL)),
                  sum((a.stop - a.start) * (extent.process IS NULL
                      OR coalesce(launched, a.start) NOT BETWEEN extent.start AND extent.stop))
           FROM attributed AS a LEFT JOIN extent USING (process)"""
    ).fetchone()
    if not with_phase:
        raise UsageError("no kernel was launched in these ranges: the kernels belong to other processes or other times")
    if must_cover:
        expected = total - outside
        percent = 100 * with_phase / expected
    else:
        expected, outside = total, total - with_phase - without_launch
        percent = 100 * (total - without_launch) / total
    if percent < MINIMUM_ATTRIBUTED_PERCENT:
        raise UsageError(
            f"only {percent:.1f} % of {expected / 1e6:.3g} ms of work on the GPU could be given to phases, "
            f"{MINIMUM_ATTRIBUTED_PERCENT:g} % is the least: {without_launch / 1e6:.3g} ms have no launch in the "
            "capture, the rest was launched between phases"
        )
    return percent, outside


def _range_times(tables: sqlite3.Connection, kind: str, gpu: int | None = None) -> tuple[RangeTime, ...]:
    """Sums over the ranges of a table by name, in the order of first begin.

    Args:
        gpu: count only what ran on this one, in the ranges of processes that use it.
    """
    ran = uses = ""
    if gpu is not None:
        ran = f"AND gpu = {int(gpu)}"
        uses = f"WHERE process IN (SELECT process FROM attributed WHERE gpu = {int(gpu)})"
    # Each interval adds to the union what lies beyond all that began before it. The order of the cross join is meant:
    # a few thousand ranges are then looked up by number and not searched for each other.
    rows = tables.execute(
        f"""WITH ordered AS
                (SELECT {kind}, start, stop,
                        max(stop) OVER (PARTITION BY {kind} ORDER BY start, stop
                                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                 FROM attributed WHERE {kind} IS NOT NULL {ran}),
            per_range AS
                (SELECT {kind} AS id, count(*) AS kernels, sum(stop - start) AS total,
                        sum(max(0, stop - max(start, coalesce(reached, start)))) AS busy, max(stop) - min(start) AS span
                 FROM ordered GROUP BY {kind}),
            done AS
                (SELECT name, sum(kernels) AS kernels, sum(total) AS total, sum(busy) AS busy, sum(span) AS span
                 FROM per_range CROSS JOIN {kind} ON {kind}.rowid = id GROUP BY name),
            lengths AS
                (SELECT name, count(*) AS count, sum(stop - start) AS wall, min(start) AS start
                 FROM {kind} {uses} GROUP BY name)
            SELECT lengths.name, count, wall, coalesce(kernels, 0), coalesce(total, 0), coalesce(busy, 0),
                   coalesce(span, 0)
            FROM lengths LEFT JOIN done USING (name) ORDER BY lengths.start"""
    )
    return tuple(replace(RangeTime(*row), gpu=gpu) for row in rows)


def _kernel_times(tables: sqlite3.Connection, kind: str) -> tuple[KernelTime, ...]:
    rows = tables.execute(
        f"""WITH ordered AS
                (SELECT name_number, a.name AS id, a.stop - a.start AS duration, row_number() OVER same AS number,
                        count(*) OVER (same ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS count
                 FROM attributed AS a JOIN {kind} ON {kind}.rowid = a.{kind}
                 WINDOW same AS (PARTITION BY name_number, a.name ORDER BY a.stop - a.start)),
            times AS
                (SELECT name_number, id, max(count) AS count, sum(duration) AS total,
                        avg(CASE WHEN number IN ((count + 1) / 2, (count + 2) / 2) THEN duration END) AS median,
                        min(duration) AS shortest, max(duration) AS longest
                 FROM ordered GROUP BY name_number, id)
            SELECT names.name, coalesce(text, 'unnamed ' || times.id) AS kernel, count, total, median, shortest, longest
            FROM times JOIN (SELECT DISTINCT name, name_number FROM {kind}) AS names USING (name_number)
            LEFT JOIN name ON name.id = times.id
            ORDER BY total DESC, kernel"""
    )
    return tuple(KernelTime(*row) for row in rows)
