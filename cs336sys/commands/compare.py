"""``cs336sys compare``: did it get faster between two results files, and is that more than noise."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.commands.options import FormatOption, OutputOption, split_list
from cs336sys.errors import UsageError
from cs336sys.measure.comparison import (
    FEW_SAMPLES,
    Compared,
    Matched,
    Pair,
    compare_pairs,
    machine_differences,
    match_cells,
    shared_metrics,
    significance_level,
    smallest_p,
)
from cs336sys.results import Results, read_results


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="A.jsonl", help="The results to compare with.")],
    candidate: Annotated[Path, typer.Argument(metavar="B.jsonl", help="The results that should be faster.")],
    metric: Annotated[
        list[str],
        typer.Option(help="Series to compare: step_ms,forward_ms. Default: step_ms, or else every time."),
    ] = [],
    confidence: Annotated[float, typer.Option(help="Percent; sets the interval and the significance.")] = 95.0,
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 when a cell is significantly slower by more than this (5% or 5), or no longer runs.",
            show_default=False,
        ),
    ] = None,
    format: FormatOption = None,
    output: OutputOption = None,
) -> None:
    """Compare the cells of two --save files that have the same configuration, by their raw samples.

    cs336sys compare main.jsonl branch.jsonl --fail-above 5%
    """
    from cs336sys.report.comparison import comparison_tables
    from cs336sys.report.tables import check_output, emit

    limit_percent = None if fail_above is None else _percent(fail_above)
    if not 0 < confidence < 100:
        raise UsageError(f"--confidence {confidence:g}: must be a percentage between 0 and 100")
    asked = split_list(metric, "--metric", str) if metric else []
    check_output(output, format)
    a, b = read_results(baseline), read_results(candidate)
    matched = match_cells(a, b)
    if not matched.pairs:
        raise UsageError(f"{baseline} and {candidate} have no configuration in common")
    compared = compare_pairs(matched.pairs, asked, confidence_percent=confidence)
    for warning in _warnings(matched, compared, asked, confidence, a, b):
        typer.echo(f"warning: {warning}", err=True)
    emit(comparison_tables(matched.pairs, compared, confidence), format=format, output=output)
    if limit_percent is not None:
        regressions = list(_regressions(matched.pairs, compared, limit_percent))
        for regression in regressions:
            typer.echo(f"regression: {regression}", err=True)
        if regressions:
            raise typer.Exit(1)


def _percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 <= percent < math.inf:
        raise UsageError(f"--fail-above '{text}': must be a percentage of at least 0, such as 5%")
    return percent


def _warnings(
    matched: Matched, compared: Compared, asked: Sequence[str], confidence: float, a: Results, b: Results
) -> Iterator[str]:
    from cs336sys.report.numbers import format_number

    for name, repeated in (("A", matched.repeated_a), ("B", matched.repeated_b)):
        if repeated:
            yield f"{name} holds several runs of one configuration: the last is used, {repeated} earlier left out"
    for name, alone in (("A", matched.only_a), ("B", matched.only_b)):
        if alone:
            yield f"not compared, because only {name} has them: {_count(alone, 'cell')}"
    differences = machine_differences(matched.pairs, a, b)
    if differences:
        listed = ", ".join(f"{field} ({of_a} / {of_b})" for field, (of_a, of_b) in differences.items())
        yield f"A and B were not measured under the same conditions, so the ratios are not the code's alone: {listed}"
    without = sum(pair.is_measured and not shared_metrics(pair, asked) for pair in matched.pairs)
    if without:
        yield f"not compared, because A or B lacks the series: {_count(without, 'cell')}"
    comparisons = [comparison for rows in compared.values() for _, comparison in rows]
    methods = {(comparison.a.method, comparison.b.method) for comparison in comparisons}
    for of_a, of_b in sorted(method for method in methods if method[0] != method[1]):
        yield f"samples were taken by {of_a} in A and by {of_b} in B"
    counts = [(len(comparison.a.measured), len(comparison.b.measured)) for comparison in comparisons]
    few = [count for count in counts if min(count) < FEW_SAMPLES]
    if few:
        yield f"fewer than {FEW_SAMPLES} samples, use more --steps: {_count(len(few), 'comparison')} of {len(counts)}"
        count_a, count_b = min(few, key=lambda count: math.comb(sum(count), count[0]))
        least = smallest_p(count_a, count_b)
        if least >= significance_level(confidence):
            p = format_number(least, "p_value")
            yield f"{count_a} against {count_b} samples cannot be significant: the smallest p they can reach is {p}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _regressions(pairs: Sequence[Pair], compared: Compared, limit_percent: float) -> Iterator[str]:
    from cs336sys.report.comparison import cell_settings, identifying_settings
    from cs336sys.report.numbers import format_quantity

    names = identifying_settings(pairs)

    def cell(pair: Pair) -> str:
        values = cell_settings(pair.a)
        return ", ".join(f"{name} {values.get(name)}" for name in names) or "the cell"

    for metric, rows in compared.items():
        for pair, comparison in rows:
            if comparison.verdict == "slower" and comparison.slower_percent > limit_percent:
                by = format_quantity(comparison.slower_percent, "percent")
                yield f"{cell(pair)}: {metric} is {by} slower"
    for pair in pairs:
        if pair.is_broken:
            yield f"{cell(pair)}: ok in A, {pair.b.status} in B"
