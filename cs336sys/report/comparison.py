"""The tables of ``compare``, built from its pairs of cells."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cs336sys.measure.comparison import (
    HIGHER_IS_BETTER,
    SAMPLING_SETTINGS,
    Compared,
    Comparison,
    Pair,
    significance_level,
)
from cs336sys.report.tables import Column, Table, Value
from cs336sys.results import Cell, configuration_key


def comparison_tables(pairs: Sequence[Pair], compared: Compared, confidence_percent: float) -> list[Table]:
    """One table for each metric, one for the pairs that could not be compared, and a summary.

    Settings that tell the pairs apart are columns, those that all pairs share stand in a note of the first table.
    """
    identity = [Column(name, name.replace("_", " ")) for name in identifying_settings(pairs)]
    first, *others = [
        *(_metric_table(metric, rows, identity, confidence_percent) for metric, rows in compared.items()),
        *_not_compared(pairs, identity),
        *_summary(compared),
    ]
    return [replace(first, notes=(*first.notes, _shared_settings(pairs))), *others]


def identifying_settings(pairs: Sequence[Pair]) -> list[str]:
    """The fewest leading settings that tell the pairs apart: ``size``, without the ``d_model`` that follows from it."""
    configurations = [cell_settings(pair.a) for pair in pairs]
    identifying: list[str] = []
    told_apart = 1
    for name in dict.fromkeys(name for configuration in configurations for name in configuration):
        shown = [*identifying, name]
        keys = {configuration_key({name: values.get(name) for name in shown}) for values in configurations}
        if len(keys) > told_apart:
            identifying, told_apart = shown, len(keys)
    return identifying


def cell_settings(cell: Cell) -> dict[str, Any]:
    """Command and configuration of a cell, but for what only decides how it was sampled."""
    configuration = {name: value for name, value in cell.configuration.items() if name not in SAMPLING_SETTINGS}
    return {"command": cell.command} | configuration


def _shared_settings(pairs: Sequence[Pair]) -> str:
    configurations = [cell_settings(pair.a) for pair in pairs]
    shared = [
        f"{name} {value}"
        for name, value in configurations[0].items()
        if all(name in other and other[name] == value for other in configurations)
    ]
    return f"every cell: {', '.join(shared)}"


def _metric_table(
    metric: str, rows: Sequence[tuple[Pair, Comparison]], identity: Sequence[Column], confidence_percent: float
) -> Table:
    unit = rows[0][1].a.unit
    interval = f"{confidence_percent:g} %"
    columns = (
        *identity,
        Column(f"a_median_{unit}", "A median", unit),
        Column(f"b_median_{unit}", "B median", unit),
        Column("ratio", "B/A", "ratio"),
        Column("ratio_low", f"{interval} from", "ratio"),
        Column("ratio_high", "to", "ratio"),
        Column("p_value", "p", "p_value"),
        Column("verdict", "B is"),
    )
    legend = (
        f"B/A: ratio of the medians with its {interval} bootstrap interval, "
        f"{'higher' if unit in HIGHER_IS_BETTER else 'lower'} is better; p: Mann-Whitney U; "
        f"~: not significant, p >= {significance_level(confidence_percent):.3g}"
    )
    return Table(
        metric,
        f"compare: {metric} of B against A",
        columns,
        rows=[
            cell_settings(pair.a)
            | {
                f"a_median_{unit}": comparison.a.median,
                f"b_median_{unit}": comparison.b.median,
                "ratio": comparison.ratio,
                "ratio_low": comparison.ratio_low,
                "ratio_high": comparison.ratio_high,
                "p_value": comparison.p_value,
                "verdict": comparison.verdict,
            }
            for pair, comparison in rows
        ],
        notes=(legend,),
    )


def _not_compared(pairs: Sequence[Pair], identity: Sequence[Column]) -> list[Table]:
    columns = (*identity, Column("a_status", "A"), Column("b_status", "B"), Column("reason", "reason"))
    rows = [
        cell_settings(pair.a)
        | {"a_status": pair.a.status, "b_status": pair.b.status, "reason": pair.b.reason or pair.a.reason}
        for pair in pairs
        if not pair.is_measured
    ]
    return [Table("not_compared", "compare: cells that are not ok in both files", columns, rows)] if rows else []


def _summary(compared: Compared) -> list[Table]:
    columns = (
        Column("metric", "metric"),
        Column("cells", "cells", "count"),
        Column("faster", "faster", "count"),
        Column("slower", "slower", "count"),
        Column("not_significant", "~", "count"),
        Column("geometric_mean_ratio", "geometric mean of B/A", "ratio"),
    )
    rows: list[dict[str, Value]] = []
    for metric, pairs in compared.items():
        verdicts = [comparison.verdict for _, comparison in pairs]
        ratios = [comparison.ratio for _, comparison in pairs if comparison.ratio is not None]
        rows.append(
            {
                "metric": metric,
                "cells": len(pairs),
                "faster": verdicts.count("faster"),
                "slower": verdicts.count("slower"),
                "not_significant": verdicts.count("~"),
                "geometric_mean_ratio": statistics.geometric_mean(ratios) if ratios else None,
            }
        )
    return [Table("summary", "compare: summary", columns, rows)] if rows else []
