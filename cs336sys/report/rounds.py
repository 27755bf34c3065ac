"""Pools the rounds of a sweep that goes through its configurations several times (``--rounds``)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from cs336sys.report.table import Column
from cs336sys.results.model import Cell, Samples, configuration_key

ROUNDS_COLUMN = Column("rounds", "rounds")

# Combines the derived columns of the rounds: takes their cells, their configuration without ``round``, and their joined
# samples, which are empty unless all rounds are ok.
CombineDerived = Callable[[Sequence[Cell], Mapping[str, Any], Mapping[str, Samples]], dict[str, Any]]


def pool_cells(cells: Sequence[Cell], combine_derived: CombineDerived) -> list[Cell]:
    """One cell for those that differ in nothing but ``round``, which the number of ``rounds`` replaces.

    Samples are joined, measured and warm-up ones apart, in the order of ``cells``. Unless all rounds are ``ok``, there
    are none, and status and reason are those of the first round that is not. Cells without a round stay as they are.
    """
    return [
        _pooled(rounds, combine_derived) if "round" in rounds[0].configuration else rounds[0]
        for rounds in by_configuration(cells).values()
    ]


def by_configuration(cells: Sequence[Cell], ignore: tuple[str, ...] = ("round",)) -> dict[str, list[Cell]]:
    """Return the rounds of each configuration; or the cells that differ in nothing but what to ``ignore``."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(configuration_key(cell.configuration, ignore=ignore), []).append(cell)
    return groups


def largest_known(rounds: Sequence[Cell], name: str) -> float | None:
    """The largest of a derived column's values, NaN before all others; None where no round knows any."""
    # max alone would find NaN or not by its place.
    return max(known_values(rounds, name), key=lambda value: (math.isnan(value), value), default=None)


def known_values(rounds: Sequence[Cell], name: str) -> list[float]:
    """A derived column's values in the rounds that know one."""
    return [cell.derived[name] for cell in rounds if cell.derived.get(name) is not None]


def _pooled(rounds: Sequence[Cell], combine_derived: CombineDerived) -> Cell:
    shown = next((cell for cell in rounds if cell.status != "ok"), rounds[0])
    configuration = {name: value for name, value in shown.configuration.items() if name != "round"}
    samples: dict[str, Samples] = {}
    if shown.status == "ok":
        samples = {name: _joined([cell.samples[name] for cell in rounds]) for name in shown.samples}
    derived = combine_derived(rounds, configuration, samples)
    return replace(shown, configuration=configuration | {"rounds": len(rounds)}, samples=samples, derived=derived)


def _joined(series: Sequence[Samples]) -> Samples:
    return replace(
        series[0],
        measured=tuple(chain.from_iterable(samples.measured for samples in series)),
        warmup=tuple(chain.from_iterable(samples.warmup for samples in series)),
    )
