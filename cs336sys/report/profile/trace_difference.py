"""The tables of ``trace --against``: what changed, what of it is noise, and what the changes add up to."""

import math

from cs336sys.measure.profile.difference import CaptureDifference, TimeChange
from cs336sys.measure.profile.taxonomy import short_name
from cs336sys.report.numbers import format_number
from cs336sys.report.profile.trace import DisplayOptions, shape_words, verdict_table
from cs336sys.report.table import Column, Table, with_rows

_NAMED = 3


def difference_sentences(found: CaptureDifference) -> list[str]:
    """Say in two or three sentences what changed."""
    what = "The kernels of a step take" if found.of_kernels else "A step takes"
    way = "longer" if found.delta_ms >= 0 else "less"
    told = [change for change in found.changes if change.is_told]
    sentences = [
        f"{what} {_ms(abs(found.delta_ms))} {way}: {_ms(found.before_ms)} before, {_ms(found.after_ms)} after; "
        f"{_ms(found.explained_ms)} of {_ms(found.delta_ms)} explained."
    ]
    if told:
        sentences.append(
            "Most: " + ", ".join(f"{_name(one)} ({one.verdict}, {_signed(one)})" for one in told[:_NAMED]) + "."
        )
    elif all(change.verdict == "undecided" for change in found.changes):
        sentences.append("The captures hold too few steps to tell a change from noise: record at least 5 in each.")
    else:
        sentences.append("No kernel and no cause of idling changed by more than noise.")
    return sentences


def _ms(value: float) -> str:
    return f"{format_number(value, 'ms')} ms"


def _signed(change: TimeChange) -> str:
    return f"{'+' if change.delta_ms > 0 else ''}{format_number(change.delta_ms, 'ms')} ms"


def _name(change: TimeChange) -> str:
    return short_name(change.what) if change.is_kernel and " -> " not in change.what else change.what


def difference_tables(found: CaptureDifference, title: str, shown: DisplayOptions) -> list[Table]:
    """The verdict, the waterfall and the changes."""
    # The largest, and of those that are no noise some more.
    chosen = [one for number, one in enumerate(found.changes) if number < shown.top or one.is_told][: 3 * shown.top]
    rows = [
        {
            "verdict": one.verdict,
            "before_ms": one.before_ms,
            "after_ms": one.after_ms,
            "delta_ms": one.delta_ms,
            "low_ms": one.low_ms if math.isfinite(one.low_ms) else None,
            "high_ms": one.high_ms if math.isfinite(one.high_ms) else None,
            "before_count": one.before_count if one.is_kernel else None,
            "after_count": one.after_count if one.is_kernel else None,
            "before_us": one.before_us,
            "after_us": one.after_us,
            "change": one.what if shown.full_names else _name(one),
            "module": one.module or None,
            "operator": one.operator or None,
            "shapes": shape_words(one.shape) or None,
        }
        for one in chosen
    ]
    columns = (
        Column("verdict", "change is"),
        Column("before_ms", "before, of a step", "ms"),
        Column("after_ms", "after", "ms"),
        Column("delta_ms", "change", "ms"),
        Column("low_ms", "at least", "ms"),
        Column("high_ms", "at most", "ms"),
        Column("before_count", "times before"),
        Column("after_count", "times after"),
        Column("before_us", "one run before", "us"),
        Column("after_us", "one run after", "us"),
        Column("change", "kernel or part"),
        Column("module", "module"),
        Column("operator", "operator"),
        Column("shapes", "shapes of inputs"),
    )
    notes = [
        "~: within the noise of the steps, by the rank test at 99 %; undecided: too few steps to say; ends at 95 %"
    ]
    if len(chosen) < len(found.changes):
        notes.append(f"{len(chosen)} of {len(found.changes)} shown: --top shows more")
    return [
        verdict_table(difference_sentences(found), title),
        *with_rows(_waterfall(found), Table("changes", "trace: what changed", columns, rows, notes=notes)),
    ]


def waterfall(found: CaptureDifference) -> list[tuple[str, float]]:
    """Return the changes from one step to the other: the largest by name, sums of the others, noise."""
    told = [change for change in found.changes if change.is_told]
    rows = [(f"{_name(one)} ({one.verdict})", one.delta_ms) for one in told[:8]]
    if len(told) > 8:
        rows.append((f"{len(told) - 8} other changes", sum(one.delta_ms for one in told[8:])))
    noise = found.delta_ms - sum(ms for _, ms in rows)
    return [*rows, ("noise, or undecided", noise)]


def _waterfall(found: CaptureDifference) -> Table:
    reached = found.before_ms
    rows: list[dict[str, str | float | None]] = [{"change": "before", "delta_ms": None, "after_ms": reached}]
    for name, ms in waterfall(found):
        reached += ms
        rows.append({"change": name, "delta_ms": ms, "after_ms": reached})
    columns = (Column("change", "from"), Column("delta_ms", "change", "ms"), Column("after_ms", "reaches", "ms"))
    return Table("waterfall", "trace: from before to after", columns, rows)
