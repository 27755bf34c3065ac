"""``ddp_bucketed_benchmarking``: sizes of buckets, and the model of their overhead."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.accounting.answers.communication import bucket_answers
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence
from cs336sys.report.course.problem import Answer, Part, Problem, runs_of
from cs336sys.report.course.problems.ddp import (
    STEP_COLUMNS,
    compared,
    ddp_commands,
    median_words,
    other_size,
    rows_of,
    steps_of,
)
from cs336sys.report.course.target import Handout, arithmetic
from cs336sys.report.course.words import derived_sentence, failures, joined, times
from cs336sys.report.noise import ratio
from cs336sys.report.numbers import format_quantity
from cs336sys.report.parallel.ddp import bucket_sweeps, link_of
from cs336sys.results import Cell
from cs336sys.sizes import SIZES


def buckets(evidence: Evidence, handout: Handout) -> Answer | None:
    found = steps_of(evidence, handout)
    group = next((group for group in found if bucket_sweeps(group.measured)), None)
    if group is None:
        return None
    rows = [row for row in rows_of(group) if row["strategy"] == "bucketed"]
    others = [row for row in rows_of(group) if row["strategy"] in ("naive", "flat", "overlap")]
    listed = [f"{median_words(row['step_ms'])} ({row['bucket_mb']:g} MB, {row['calls']} calls)" for row in rows]
    best = min(rows, key=lambda row: row["step_ms"].median)
    sentences = [
        f"A step takes {joined(listed)}.",
        f"The fastest are buckets of {best['bucket_mb']:g} MB.",
        *(compared("that", best, row["strategy"], row) for row in others),
    ]
    sentences += _expectation(rows, best)
    link = link_of(bucket_sweeps(group.measured)[0][0])
    sentences.append(
        f"All-reduces of these ranks cost {format_quantity(1e6 * link.latency_s, 'us')} a call and move "
        f"{format_quantity(link.bytes_per_s / 1e9, 'gbps')}: a slower link, or more and smaller parameters, would make "
        "the differences between bucket sizes larger."
    )
    sentences += failures(group.cells, lambda cell: f"{cell.configuration['strategy']}")
    tables = [*group.table("ddp", *STEP_COLUMNS), *group.table("buckets")]
    return Answer(sentences, tables, group.pictures("buckets"), runs_of([group]), other_size(group, handout))


def _expectation(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> list[str]:
    largest = max(rows, key=lambda row: row["bucket_mb"])
    smallest = min(rows, key=lambda row: row["bucket_mb"])
    expected = best is not largest and best is not smallest
    sentence = (
        "Expected is a size in between: small buckets pay for many calls, and the last of the large ones starts when "
        "the backward pass is nearly done. "
    )
    slowest = max(rows, key=lambda row: row["step_ms"].median)
    found = ratio(slowest["step_ms"], best["step_ms"])
    spread = found.estimate
    if found.is_noise:
        return [
            f"{sentence}Here all sizes are alike within the noise: the slowest takes {times(found.low)} to "
            f"{times(found.high)} as long as the fastest."
        ]
    if expected:
        return [sentence + f"So it is here; the slowest size takes {times(spread)} as long as the fastest."]
    if best is largest:
        why = "calls cost more here, launched one by one, than the transfer that the last bucket exposes"
    else:
        why = "calls cost next to nothing here beside the transfer that the last bucket exposes"
    return [sentence + f"Here the {'largest' if best is largest else 'smallest'} win ({times(spread)} apart): {why}."]


def bucket_equation(evidence: Evidence, handout: Handout) -> Answer:
    group = next((one for one in steps_of(evidence, handout) if bucket_sweeps(one.measured)), None)
    cell: Cell | None = bucket_sweeps(group.measured)[0][0] if group else None
    if cell is not None:
        link, total = link_of(cell), cell.derived["communicated_bytes"]
        setting = (total, cell.derived["gradient_calls"], link.bytes_per_s, link.latency_s)
        given = "with the bandwidth and overhead measured on these ranks"
    else:
        setting = (4 * count_parameters(SIZES["xl"]), 100, 200e9, 20e-6)
        given = "with w = 200 GB/s and o = 20 us put in, as nothing was measured"
    sentences = [
        "All but the last of n_b buckets travel while the next one is computed, and every call costs o: "
        "overhead = s / (n_b w) + n_b o, least at n_b = sqrt(s / (w o)), that is for buckets of b = sqrt(s w o) bytes, "
        f"where it is 2 sqrt(s o / w). {given[:1].upper()}{given[1:]}:",
    ]
    if setting[3] == 0:
        sentences.append("calls look free, so the smallest buckets are best.")
        return Answer(sentences, (), {}, runs_of([group]) if group else ())
    answers = bucket_answers(*setting)
    sentences += map(derived_sentence, answers)
    table = answers_table("formulas", "bucket sizes by the equation", answers)
    return Answer(sentences, [table], {}, runs_of([group]) if group else ())


DDP_BUCKETED_BENCHMARKING = Problem(
    "ddp_bucketed_benchmarking",
    "Benchmarking bucketed DDP",
    (
        Part("a", buckets, ddp_commands),
        Part("b", bucket_equation, lambda target: arithmetic("account", "buckets", "--size", "xl")),
    ),
)
