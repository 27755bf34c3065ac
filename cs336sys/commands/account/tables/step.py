"""The tables of ``account step``: a step's time by term, and how far predictions are off."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates, short_gpu_name
from cs336sys.accounting.step_time.work import TERMS
from cs336sys.tables.numbers import Value
from cs336sys.tables.predicted_step import PREDICTED_COLUMNS, configuration_words, error_notes, step_row
from cs336sys.tables.table import Column, Table, named_columns

# What each term counts, for a step of several phases: names as in the docstring of accounting/step_time/work.py.
FORMULAS = {
    "half_products": "2 T L (4 d^2 + 3 d f) + 2 T V d forward, twice that backward, and a part of idle tiles",
    "full_products": "2 T L (4 d^2 + 3 d f) + 2 T V d forward, twice that backward, in fp32",
    "full_scores": "Q K^T and P V in fp32: 4 L B H S^2 D forward, twice that backward",
    "flash_forward": "2 L B H S (S + 1,100) D: half of the square, and the start of each tile",
    "flash_backward": "5 L B H S (S + 1,100) D",
    "sdpa_forward": "2 L B H S (S + 1,100) D",
    "sdpa_backward": "5 L B H S (S + 1,100) D",
    "eager_bytes": "operations that are no products, each on its own: in half precision 608 T d + 56 T f a block",
    "fused_bytes": "fused operations: 26 T d + 6 T f a block forward, 58 T d + 10 T f backward, casts of weights",
    "score_bytes": "softmax and mask of reference attention, by bytes a score",
    "course_parameters": "parameters that the course's AdamW updates, an operation at a time",
    "state_bytes": "AdamW: parameter, gradient and moments read, all but the gradient written",
    "kernels": "kernels, each with a start and an end",
    "gaps": "gaps between kernels",
}

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
    notes = (
        *error_notes(rates),
        f"Launches: without a CUDA graph the CPU needs {cost_us:.1f} us for each (the fastest host measured needs "
        f"{1e6 * rates.launch_s:.1f} us; --launch-us sets it), so a step that waits for them takes the host's time.",
    )
    tables = [Table("steps", f"Predicted steps: {title}", (*swept, *_STEP_COLUMNS), rows, notes)]
    for setting, configuration, time in zip(settings, configurations, times, strict=True):
        if not time.unknown:
            name = ", ".join([*setting_words(swept, setting), configuration_words(configuration)])
            tables.append(_terms_table(name, configuration, time, rates))
    return tables


def _terms_table(name: str, configuration: StepConfiguration, time: StepTime, rates: Rates) -> Table:
    """Return the table of a step's terms, of its communication, and of the GPU's wait for launches."""
    rows: list[dict[str, Value]] = []

    def add(term: str, seconds: float, amount: float, unit: str, formula: str, rate: float | None = None) -> None:
        row: dict[str, Value] = {"term": term, "amount": amount, "rate": rate, "unit": unit, "formula": formula}
        rows.append(row | {"time_ms": 1e3 * seconds, "step_percent": 100 * seconds / time.step_s})

    for term, unit in TERMS.items():
        seconds = time.terms_s.get(term, 0.0)
        if seconds:
            unit_s = rates.seconds[term]
            add(term.replace("_", " "), seconds, seconds / unit_s, unit, FORMULAS[term], 1 / unit_s)
    if time.exposed_s:
        exposure = rates.exposures[configuration.exposure_name]
        share = time.exposed_s / time.communication_s
        sent_text = f"bytes that a rank sends: alone {1e3 * time.communication_s:.1f} ms"
        formula = f"{sent_text}, of which {share:.0%} makes the step longer"
        add("communication", time.exposed_s, configuration.sent_bytes, "bytes/s", formula, exposure.bytes_per_s)
    waiting_s = time.step_s - time.gpu_s - time.exposed_s
    if waiting_s > 1e-9:
        count = configuration.accumulation * sum(time.work.launches.values())
        formula = "by which launches, a CPU time each, take longer than the GPU's work"
        add("waiting for launches", waiting_s, count, "launches", formula)
    notes = (
        "T tokens of a rank, L blocks, d d_model, f d_ff, V vocabulary, B batch, H heads, S context, D head dimension.",
        *error_notes(rates),
    )
    return Table("terms", f"Terms of a step: {name}", _TERM_COLUMNS, rows, notes)
