"""(a): how long a forward pass takes, with and without a profiler."""

from collections.abc import Sequence

from cs336sys.report.course.evidence import PLAIN, Evidence, Found
from cs336sys.report.course.problem import Answer, pictures_of, runs_of
from cs336sys.report.course.problems.nsys_profile.profiles import (
    answered_from_profiles,
    of_longest_contexts,
    profile_name,
    profile_rows,
)
from cs336sys.report.course.target import Handout
from cs336sys.report.course.words import ALIKE, failures, joined, ms, percent, spread
from cs336sys.report.profile.phases import LAUNCH_BOUND_IDLE_PERCENT
from cs336sys.report.tables import Table

_PHASE_KEYS = ("size", "context", "phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")

_SHOWN_PHASES = ("forward", "backward", "optimizer", None)


@answered_from_profiles
def forward_time(found: list[Found], evidence: Evidence, handout: Handout) -> Answer:
    rows = [row for row in profile_rows(found, "phases") if row.get("phase") == "forward"]
    spans = [
        f"{ms(row['span_ms'])} for {handout.called(row['size'])} at context {row['context']}"
        for row in of_longest_contexts(rows)
    ]
    sentences = [f"Under the profiler the kernels of a forward pass span {joined(spans)}."]
    ratios = [row["span_ms"] / row["unprofiled_ms"].median for row in rows if row["unprofiled_ms"]]
    agreeing = sum(abs(ratio - 1) <= 2 * ALIKE for ratio in ratios)
    if ratios:
        sentences.append(
            f"The same pass without a profiler takes {spread([1 / ratio for ratio in ratios])} that: the two agree "
            f"within {percent(200 * ALIKE)} in {agreeing} of {len(ratios)} profiles."
        )
        sentences += _disagreeing([row for row in rows if row["unprofiled_ms"]], handout)
    sentences += _beside_bench(rows, evidence)
    sentences += failures([cell for group in found for cell in group.cells], lambda cell: profile_name(cell, handout))
    if handout.year == 2026:
        sentences += _longest_fitting(found, handout)
    every = [table for group in found for table in group.table("phases", *_PHASE_KEYS)]
    tables = [
        Table(table.name, table.title, table.columns, [row for row in table.rows if row.get("phase") in _SHOWN_PHASES])
        for table in every
    ]
    pictures = pictures_of(found)
    return Answer(sentences, tables, pictures, runs_of(found), _missing(found, handout))


def _disagreeing(rows: Sequence[dict], handout: Handout) -> list[str]:
    """Why passes take another time under the profiler than without it."""
    ratios = [(row, row["span_ms"] / row["unprofiled_ms"].median) for row in rows]
    longer = [(row, ratio) for row, ratio in ratios if ratio > 1 + 2 * ALIKE]
    shorter = [(row, ratio) for row, ratio in ratios if ratio < 1 - 2 * ALIKE]
    sentences = []
    if longer:
        busy = [100 * row["busy_ms"] / row["span_ms"] for row, _ in longer]
        # Of a CPU nothing is said of launches.
        waits = max(busy) < 90 and all(row["launch_bound"] is not None for row, _ in longer)
        sentences.append(
            f"In {_these(longer, handout)} it is longer under the profiler, {spread([ratio for _, ratio in longer])}, "
            f"with kernels running in {spread(busy, percent)} of it"
            + (": the profiler slows down the CPU's launches, which the GPU waits for." if waits else ".")
        )
    if shorter:
        idle = [row["idle_percent"] for row, _ in shorter]
        sentences.append(
            f"In {_these(shorter, handout)} it is shorter under the profiler, {spread([ratio for _, ratio in shorter])}"
            + (
                f": without it the GPU was idle for {spread(idle, percent)}, so that the CPU's speed decided, which "
                "varied between the two."
                if min(idle) > LAUNCH_BOUND_IDLE_PERCENT
                else "."
            )
        )
    return sentences


def _these(rows: Sequence[tuple[dict, float]], handout: Handout) -> str:
    if len(rows) == 1:
        row = rows[0][0]
        return f"that of {handout.called(row['size'])} at context {row['context']}"
    return f"{len(rows)} of them"


def _missing(found: Sequence[Found], handout: Handout) -> list[str]:
    there = {(cell.configuration["size"], cell.configuration["context"]) for group in found for cell in group.cells}
    missing = []
    for size in handout.profile_sizes:
        contexts = [context for context in handout.profile_contexts if (size, context) not in there]
        if contexts:
            missing.append(f"{handout.called(size)} at context {joined(map(str, contexts))}")
    return missing


def _beside_bench(rows: Sequence[dict], evidence: Evidence) -> list[str]:
    """What ``bench`` measured of the same."""
    benched = {
        (cell.configuration["size"], cell.configuration["context"]): cell.samples["forward"].median
        for group in evidence.find("bench", precision=("fp32",), batch_size=(4,), **PLAIN)
        for cell in group.measured
    }
    pairs = [
        (row, benched[row["size"], row["context"]])
        for row in rows
        if row["unprofiled_ms"] and (row["size"], row["context"]) in benched
    ]
    if not pairs:
        return []
    words = [f"{ms(theirs)} ({row['size']}, context {row['context']})" for row, theirs in pairs]
    ratios = [row["unprofiled_ms"].median / theirs for row, theirs in pairs]
    return [f"`bench` measured {joined(words)}, in runs of their own; here it is {spread(ratios)} that."]


def _longest_fitting(found: Sequence[Found], handout: Handout) -> list[str]:
    sentences = []
    for size in dict.fromkeys(cell.configuration["size"] for group in found for cell in group.cells):
        cells = [cell for group in found for cell in group.cells if cell.configuration["size"] == size]
        fits = [cell.configuration["context"] for cell in cells if cell.status == "ok"]
        oom = [cell.configuration["context"] for cell in cells if cell.status == "oom"]
        if fits and oom:
            sentences.append(
                f"{handout.called(size)} fits at context {max(fits)} and no longer at {min(oom)}: {max(fits)} is the "
                "longest power of two."
            )
        elif fits:
            sentences.append(
                f"{handout.called(size)} was profiled up to context {max(fits)}, where it still fits; a longer one "
                "was not tried."
            )
    return sentences
