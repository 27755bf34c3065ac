"""The tables of ``account step``: a step's time by term, and how far predictions are off."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates, short_gpu_name
from cs336sys.accounting.step_time.work import TERMS
from cs336sys.tables.numbers import Value
from cs336sys.tables.predictions import PREDICTED_COLUMNS, configuration_words, error_notes, step_row
from cs336sys.tables.table import Column, Table, named_columns, sentences

_TERM_COLUMNS = (
    *named_columns("term"),
    Column("amount", "amount", "value"),
    Column("rate", "rate", "value"),
    *named_columns("unit", "time_ms", step_percent="of the step", formula="counted"),
)

_STEP_COLUMNS = (
    *named_columns("configuration", gpu_ms="GPU", launches_ms="launches", exposed_ms="exposed communication"),
    *PREDICTED_COLUMNS,
)

# What a sweep may vary: a column then, or else named in the title.
_SWEPT_COLUMNS = (Column("size", "size"), Column("context", "context"), Column("precision", "precision"))


def step_tables(configurations: Sequence[StepConfiguration], rates: Rates, launch_s: float | None) -> list[Table]:
    """Return a table of all configurations, and one with the terms of each that has a time."""
    times = [predict_step(configuration, rates, launch_s=launch_s) for configuration in configurations]
    trainings = [configuration.training for configuration in configurations]
    settings = [{"size": t.size.name, "context": t.size.context, "precision": t.precision} for t in trainings]
    swept = [column for column in _SWEPT_COLUMNS if len({setting[column.key] for setting in settings}) > 1]
    rows: list[dict[str, Any]] = [
        setting | step_row(configuration, time, rates)
        for setting, configuration, time in zip(settings, configurations, times, strict=True)
    ]

    def setting_words(columns: Iterable[Column], setting: Mapping[str, Any]) -> list[str]:
        # A size or a precision needs no name: xl, bf16; but context 2048.
        return [
            f"{column.key} {setting[column.key]}".removeprefix("size ").removeprefix("precision ") for column in columns
        ]

    constant = [column for column in _SWEPT_COLUMNS if column not in swept]
    title = ", ".join([*setting_words(constant, settings[0]), short_gpu_name(rates.gpu)])
    cost_us = 1e6 * (rates.usual_launch_s if launch_s is None else launch_s)
    launches = sentences(__name__, "steps", cost_us=cost_us, fastest_us=1e6 * rates.launch_s)
    tables = [
        Table("steps", f"Predicted steps: {title}", (*swept, *_STEP_COLUMNS), rows, [*error_notes(rates), *launches])
    ]
    for setting, configuration, time in zip(settings, configurations, times, strict=True):
        if not time.unknown:
            name = ", ".join([*setting_words(swept, setting), configuration_words(configuration)])
            tables.append(_terms_table(name, configuration, time, rates))
    return tables


def _terms_table(name: str, configuration: StepConfiguration, time: StepTime, rates: Rates) -> Table:
    """Return the table of a step's terms, of its communication, and of the GPU's wait for launches."""
    rows: list[dict[str, Value]] = []

    def add(term: str, seconds: float, amount: float, unit: str, rate: float | None = None, **facts: float) -> None:
        (formula,) = sentences(__name__, "formula", term=term, **facts)
        row: dict[str, Value] = {"term": term.replace("_", " "), "amount": amount, "rate": rate, "unit": unit}
        rows.append(row | {"formula": formula, "time_ms": 1e3 * seconds, "step_percent": 100 * seconds / time.step_s})

    for term, unit in TERMS.items():
        seconds = time.terms_s.get(term, 0.0)
        if seconds:
            unit_s = rates.seconds[term]
            add(term, seconds, seconds / unit_s, unit, 1 / unit_s)
    if time.exposed_s:
        bytes_per_s = rates.exposures[configuration.exposure_name].bytes_per_s
        facts = {"communication_ms": 1e3 * time.communication_s, "share": time.exposed_s / time.communication_s}
        add("communication", time.exposed_s, configuration.sent_bytes, "bytes/s", bytes_per_s, **facts)
    waiting_s = time.step_s - time.gpu_s - time.exposed_s
    if waiting_s > 1e-9:  # Less is rounding.
        count = configuration.accumulation * sum(time.work.launches.values())
        add("waiting for launches", waiting_s, count, "launches")
    notes = [*sentences(__name__, "terms"), *error_notes(rates)]
    return Table("terms", f"Terms of a step: {name}", _TERM_COLUMNS, rows, notes)
