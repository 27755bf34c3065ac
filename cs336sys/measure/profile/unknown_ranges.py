"""What takes the place of a step's phases in a capture of somebody's program, which has no ranges of ours."""

import sqlite3

from cs336sys.measure.profile.capture import Capture

# torch.profiler numbers the steps that a program tells it of by profiler.step().
_PROFILER_STEPS = "ProfilerStep#*"
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
    tables.execute("UPDATE ranges SET name = ? WHERE name GLOB ?", (PROFILER_STEP, _PROFILER_STEPS))
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
    found = tables.execute(
        f"""SELECT coalesce(sum(length), 0), coalesce(sum(length * is_launched), 0),
                   coalesce(sum(length * in_step), 0), coalesce(sum(length * max(in_step, in_other)), 0)
            FROM (SELECT work.stop - work.start AS length, launch.start IS NOT NULL AS is_launched,
                         {within.format(1)} AS in_step, {within.format(0)} AS in_other
                  FROM work LEFT JOIN launch USING (process, correlation))"""
    ).fetchone()
    tables.execute("DROP TABLE span")
    return found


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
    tables.execute("INSERT INTO launch SELECT process, correlation, start, '' FROM work WHERE correlation < 0")
    tables.execute(
        """INSERT INTO ranges SELECT ?, min(start), max(stop), process, '' FROM
               (SELECT process, start, start AS stop FROM launch UNION ALL SELECT process, start, stop FROM work)
           GROUP BY process""",
        (WHOLE,),
    )
