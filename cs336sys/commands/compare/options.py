"""``cs336sys compare``: did it get faster between two results files, and is that more than noise."""

import math
from typing import Annotated

import typer

from cs336sys.command_line.faults import say
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import setting, split_list
from cs336sys.errors import UsageError
from cs336sys.results.comparison import Matched, compare_pairs, match_cells, nearest_difference
from cs336sys.results.model import read_several


def compare(
    baseline: Annotated[str, typer.Argument(metavar="A.jsonl[,...]", help="The results to compare with.")],
    candidate: Annotated[str, typer.Argument(metavar="B.jsonl[,...]", help="The results that should be faster.")],
    metric: Annotated[
        list[str], setting(help="Series to compare: step_ms,forward_ms. Default: step_ms, or else every time.")
    ] = [],
    confidence: Annotated[float, setting(help="Percent; sets the interval and the significance.")] = 95.0,
    fail_above: Annotated[
        str | None,
        setting(
            metavar="PERCENT",
            help="Exit with 1 when a cell is significantly slower by more than this (5% or 5), no longer runs, is "
            "missing, or the samples cannot tell.",
        ),
    ] = None,
    allow_undecided: Annotated[
        bool, setting("--allow-undecided", help="With --fail-above: missing or undecided rows do not fail.")
    ] = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Compare the cells of --save files that have the same configuration, by their raw samples.

    cs336sys compare main.jsonl branch.jsonl --fail-above 5%

    cs336sys compare main-1.jsonl,main-2.jsonl,main-3.jsonl branch-1.jsonl,branch-2.jsonl,branch-3.jsonl
    """
    from cs336sys.commands.compare.tables import comparison_tables, comparison_warnings, regressions, undecided

    limit_percent = None if fail_above is None else _read_percent(fail_above)
    if allow_undecided and limit_percent is None:
        raise UsageError("--allow-undecided needs --fail-above: nothing else fails")
    if not 50 <= confidence < 100:  # Someone who types 0.95 means 95 percent.
        raise UsageError(f"--confidence {confidence:g}: must be a percentage from 50 to less than 100, such as 95")
    metrics = split_list(metric, "--metric", str) if metric else []
    output.check()
    a, b = read_several(baseline), read_several(candidate)
    matched = match_cells(a, b)
    _require_pairs(matched, f"{baseline} and {candidate}")
    significance = (100 - confidence) / 100  # The largest p of a significant difference: 0.05 for 95 %.
    compared = compare_pairs(matched.pairs, metrics, significance)
    for warning in comparison_warnings(matched, compared, metrics, a, b):
        say(f"warning: {warning}")
    fault = None
    try:
        output.emit(comparison_tables(matched.pairs, compared, significance))
    except UsageError as error:
        fault = error  # Raised last: a column that is missing because the cells of B failed must not hide a regression.
    slower, unknown = [], []
    if limit_percent is not None:
        slower = [f"regression: {sentence}" for sentence in regressions(matched.pairs, compared, limit_percent)]
        unknown = [f"undecided: {text}" for text in undecided(matched, compared, metrics, limit_percent)]
    for sentence in (*slower, *unknown):
        say(sentence)
    if slower or (unknown and not allow_undecided):
        if fault is not None:
            say(f"error: {fault}")
        raise typer.Exit(1)
    if fault is not None:
        raise fault


def _require_pairs(matched: Matched, files: str) -> None:
    if not matched.pairs:
        differences = nearest_difference(matched).items()
        nearest = ", ".join(f"{name} ({first} and {second})" for name, (first, second) in differences)
        hint = f"; those nearest to each other differ in {nearest}" if nearest else ""
        raise UsageError(f"{files} have no configuration in common{hint}")


def _read_percent(text: str) -> float:
    """Read a percentage of at least 0: ``5%`` or ``5``."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 <= percent < math.inf:
        raise UsageError(f"--fail-above '{text}': must be a percentage of at least 0, such as 5%")
    return percent
