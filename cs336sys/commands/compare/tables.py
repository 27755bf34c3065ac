"""The tables of ``compare``, built from its pairs of cells, and what it warns of and fails for."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

from cs336sys.results.comparison import (
    HIGHER_IS_BETTER,
    Compared,
    Comparison,
    Matched,
    Pair,
    Side,
    cell_settings,
    machine_differences,
    shared_series,
)
from cs336sys.results.model import Results, distinguishing_settings, passed_over_words
from cs336sys.results.statistics import SAME_PERCENT
from cs336sys.tables.numbers import Value, format_quantity
from cs336sys.tables.table import Column, Table, fill_row, sentences, with_rows


def comparison_tables(pairs: Sequence[Pair], compared: Compared, significance: float) -> list[Table]:
    """Build a table for each metric, one for the pairs that could not be compared, and a summary.

    Settings that tell the pairs apart are columns, those that all pairs share stand in a note of the first table.
    """
    identifying = distinguishing_settings([cell_settings(pair.a.representative) for pair in pairs])
    identity = [Column(name, name.replace("_", " ")) for name in identifying]
    metric_tables = [_metric_table(metric, rows, identity, significance) for metric, rows in compared.items()]
    status_columns = (
        *identity,
        Column("a_status", "A", value=lambda pair: pair.a.status),
        Column("b_status", "B", value=lambda pair: pair.b.status),
        Column("reason", "reason", value=lambda pair: pair.b.representative.reason or pair.a.representative.reason),
    )
    unmeasured = [pair for pair in pairs if not pair.is_measured]
    rows = [cell_settings(pair.a.representative) | fill_row(status_columns, pair) for pair in unmeasured]
    not_compared = Table("not_compared", "compare: cells that are not ok in both files", status_columns, rows)
    first, *others = with_rows(*metric_tables, not_compared, _summary(compared))
    settings_of_first, *settings_of_others = (cell_settings(pair.a.representative).items() for pair in pairs)
    shared = [item for item in settings_of_first if all(item in other for other in settings_of_others)]
    shared_settings = f"every cell: {', '.join(f'{name} {value}' for name, value in shared)}"
    return [replace(first, notes=(*first.notes, shared_settings)), *others]


def _names(pairs: Sequence[Pair], unpaired_sides: Sequence[Side] = ()) -> Callable[[Side], str]:
    """Return a function that names a side by the settings that tell it from the others."""
    sides = (*(pair.a for pair in pairs), *unpaired_sides)
    identifying = distinguishing_settings([cell_settings(side.representative) for side in sides])

    def name(side: Side) -> str:
        values = cell_settings(side.representative)
        return ", ".join(f"{setting} {values.get(setting)}" for setting in identifying) or "the cell"

    return name


def _metric_table(
    metric: str, rows: Sequence[tuple[Pair, Comparison]], identity: Sequence[Column], significance: float
) -> Table:
    unit = rows[0][1].a.unit  # All comparisons of a metric have the same.
    interval = f"{100 * (1 - significance):g} %"
    columns = (
        *identity,
        Column(f"a_median_{unit}", "A median", unit, _of_difference("median_a")),
        Column(f"b_median_{unit}", "B median", unit, _of_difference("median_b")),
        Column("ratio", "B/A", "ratio", _of_difference("ratio")),
        Column("ratio_low", f"{interval} from", "ratio", _of_difference("ratio_low")),
        Column("ratio_high", "to", "ratio", _of_difference("ratio_high")),
        Column("p_value", "p", "p_value", _of_difference("p_value")),
        Column("verdict", "verdict", value=lambda comparison: comparison.verdict_text),
        Column("to_decide", "would decide", value=_to_decide),
        Column("a_runs", "A runs", "count", lambda comparison: len(comparison.a.rounds)),  # Each round builds anew.
        Column("b_runs", "B runs", "count", lambda comparison: len(comparison.b.rounds)),
        Column("a_autocorrelation", "A lag 1", "correlation", lambda comparison: comparison.autocorrelation_a),
        Column("b_autocorrelation", "B lag 1", "correlation", lambda comparison: comparison.autocorrelation_b),
    )
    comparisons = [comparison for _, comparison in rows]
    rules = {"higher_is_better": unit in HIGHER_IS_BETTER, "same_percent": SAME_PERCENT, "significance": significance}
    levels = dict.fromkeys(comparison.difference.level for comparison in comparisons if comparison.difference)
    return Table(
        metric,
        f"compare: {metric} of B against A",
        columns,
        rows=[cell_settings(pair.a.representative) | fill_row(columns, comparison) for pair, comparison in rows],
        notes=sentences(__name__, "metric", interval=interval, levels=levels, **rules, **_sample_facts(comparisons)),
    )


def _of_difference(name: str) -> Callable[[Comparison], Any]:
    """Return a column's function: this attribute of the difference, None where there is no difference."""
    return lambda comparison: comparison.difference and getattr(comparison.difference, name)


def _to_decide(comparison: Comparison) -> str | None:
    """Say about how many samples, rounds or runs a side would decide the comparison; None where that is not known."""
    difference = comparison.difference
    if difference is None or comparison.verdict != "undecided" or difference.to_decide is None:
        return None
    return f"{difference.to_decide} {difference.level}"


def _sample_facts(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return how few independent samples A's are worth (``worth`` of ``count``), and how far stalls set means off."""
    compared = [(comparison, comparison.difference) for comparison in comparisons if comparison.difference is not None]
    counts = [
        (difference.independent[0], len(comparison.a.all_values))  # ``independent`` are A's and B's.
        for comparison, difference in compared
        if difference.level == "samples"
    ]
    worth, count = min(counts, default=(0, 0))
    # Stalled steps move means and hardly medians. By logarithms, so that half and twice the ratio are as far off.
    logs = [abs(math.log(comparison.stalls)) for comparison, _ in compared if comparison.stalls is not None]
    farthest = max(logs, default=0.0)
    stalled_percent = 100 * math.expm1(farthest) if farthest > 0.02 else None  # Less is not worth a note.
    return {"worth": worth, "count": count, "stalled_percent": stalled_percent}


def _summary(compared: Compared) -> Table:
    columns = (
        Column("metric", "metric"),
        Column("cells", "cells", "count", len),
        Column("faster", "faster", "count", methodcaller("count", "faster")),
        Column("slower", "slower", "count", methodcaller("count", "slower")),
        Column("same", "same", "count", methodcaller("count", "same")),
        Column("undecided", "undecided", "count", methodcaller("count", "undecided")),
        Column("geometric_mean_ratio", "geometric mean of B/A", "ratio"),
    )
    rows: list[dict[str, Value]] = []
    for metric, pairs in compared.items():
        differences = [comparison.difference for _, comparison in pairs]
        ratios = [difference.ratio for difference in differences if difference and difference.ratio is not None]
        mean = statistics.geometric_mean(ratios) if ratios else None
        verdicts = [comparison.verdict for _, comparison in pairs]
        rows.append({"metric": metric, "geometric_mean_ratio": mean} | fill_row(columns, verdicts))
    return Table("summary", "compare: summary", columns, rows)


def comparison_warnings(
    matched: Matched, compared: Compared, metrics: Sequence[str], a: Results, b: Results
) -> Iterator[str]:
    """List what a reader of the tables must know."""
    for results in (a, b):
        yield from passed_over_words(results)
    unpaired_sides = {"A": matched.only_a, "B": matched.only_b}
    paired_sides = {"A": [pair.a for pair in matched.pairs], "B": [pair.b for pair in matched.pairs]}
    comparisons = [comparison for rows in compared.values() for _, comparison in rows]
    methods = {(comparison.a.method, comparison.b.method) for comparison in comparisons}
    yield from sentences(
        __name__,
        "warnings",
        left_out={
            name: sum(side.left_out for side in (*paired_sides[name], *sides)) for name, sides in unpaired_sides.items()
        },
        unpaired_sides=unpaired_sides,
        differences=machine_differences(matched.pairs, a, b),
        lacking=sum(pair.is_measured and not shared_series(pair, metrics) for pair in matched.pairs),
        methods=sorted(method for method in methods if method[0] != method[1]),
        comparisons=len(comparisons),
        reasons=Counter(comparison.reason for comparison in comparisons if comparison.reason),
    )


def regressions(pairs: Sequence[Pair], compared: Compared, limit_percent: float) -> Iterator[str]:
    """List comparisons that are slower by more than the limit, and cells that only A could measure.

    Where neither side measured anything, that is one sentence, too.
    """
    name = _names(pairs)
    for metric, rows in compared.items():
        for pair, comparison in rows:
            if comparison.verdict == "slower" and comparison.slower_percent > limit_percent:
                yield f"{name(pair.a)}: {metric} is {format_quantity(comparison.slower_percent, 'percent')} slower"
    for pair in pairs:
        if pair.is_broken:
            yield f"{name(pair.a)}: ok in A, {pair.b.status} in B"
    if all("ok" not in (pair.a.status, pair.b.status) for pair in pairs):  # B is judged: its statuses are shown.
        yield f"nothing was measured, in A or in B: {', '.join(sorted({pair.b.status for pair in pairs}))}"


def undecided(matched: Matched, compared: Compared, metrics: Sequence[str], limit_percent: float) -> Iterator[str]:
    """List what may be slower by more than the limit: too noisy, not finite, or not there."""
    name = _names(matched.pairs, matched.only_a)
    for metric, rows in compared.items():
        for pair, comparison in rows:
            if comparison.reason is not None:
                yield f"{name(pair.a)}: {metric}: {comparison.reason}"
            elif comparison.verdict in ("same", "undecided") and comparison.slower_percent_at_most > limit_percent:
                at_most = format_quantity(comparison.slower_percent_at_most, "percent")
                yield f"{name(pair.a)}: {metric} may be slower by up to {at_most}: take more --steps or --rounds"
    for pair in matched.pairs:
        if pair.is_measured and not shared_series(pair, metrics):
            yield f"{name(pair.a)}: A or B lacks the series"
    for side in matched.only_a:
        if side.status == "ok":
            yield f"{name(side)}: only A has it"
