"""The tables of ``account memory``, ``activations``, ``flops``, ``attention`` and ``step``: what one model needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, product
from pathlib import Path
from typing import Any

from cs336sys.accounting.activations import AttentionMemory, attention_memory
from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.flops import SOFTMAX_FLOPS_PER_SCORE, count_parameters
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.one_device import attention_answers, block_answers, flops_answers, tensor_answers
from cs336sys.accounting.sharding.step import ShardedStep, fullest_state, rank_peak, state_answers
from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates, short_gpu_name
from cs336sys.accounting.step_time.work import TERMS
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.tables.numbers import Value
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.predictions import PREDICTED_COLUMNS, answers_table, configuration_words, error_notes, step_row
from cs336sys.tables.table import Column, Table, fill_row, named_columns, sentences

_COLUMNS = (
    Column("size", "size", value=lambda step: step.size.name),
    Column("parameters", "parameters", "parameters", lambda step: count_parameters(step.size)),
    Column("context", "context", value=lambda step: step.size.context),
    Column("precision", "precision", value=lambda step: step.precision),
    Column("mode", "mode", value=lambda step: step.mode),
    Column("world_size", "ranks", value=lambda step: step.world_size),
    Column("strategy", "strategy", value=lambda step: step.strategy),
    Column("parameters_gib", "parameters", "gib", lambda step: fullest_state(step).parameters / GIB),
    *named_columns("gradients_gib", "optimizer_state_gib", "master_parameters_gib", "after_initialization_gib"),
    *named_columns("before_first_step_gib", first_peak_gib="most until then", after_first_step_gib="after first step"),
    Column(
        "activations_gib", "activations and buffers at the peak", "gib", lambda step: rank_peak(step).activations / GIB
    ),
    Column("peak_gib", "peak of later steps", "gib", lambda step: rank_peak(step).total_gib),
    Column("moment", "moment of the peak", value=lambda step: rank_peak(step).moment),
)


def rank_memory_tables(steps: Sequence[ShardedStep]) -> list[Table]:
    """Return parts, the handout's three times and the peak; then the derivation for each size and number of ranks."""
    has_buffers = any(step.strategy_record.reduces_slices or step.strategy_record.gathers_ahead for step in steps)
    batches = dict.fromkeys(f"batch {step.size.batch_size}, {step.attention} attention" for step in steps)
    title, notes = f"Memory of a rank: {', '.join(batches)}", sentences(__name__, "memory", has_buffers=has_buffers)
    tables = [Table("memory", title, _COLUMNS, [_rank_row(step) for step in steps], notes)]
    answers_by_group: dict[str, dict[str, list[Derived]]] = {}
    for step in steps:
        if step.updates_parameters:
            # Activations, and so context, precision and attention, are no part of the state.
            group = f"{step.size.name}, {step.world_size} rank{'s' * (step.world_size != 1)}"
            element_bytes = {"element_bytes": step.parameter_bytes, "compute_bytes": ELEMENT_BYTES[step.precision]}
            answers = state_answers(step.size, step.world_size, step.strategy, **element_bytes)
            answers_by_group.setdefault(group, {}).setdefault(step.strategy, answers)
    for group, answers_by_strategy in answers_by_group.items():
        title, answers = f"Ideal shares of training state: {group}", list(chain(*answers_by_strategy.values()))
        tables.append(answers_table("state", title, answers, sentences(__name__, "state")))
    return tables


def _rank_row(step: ShardedStep) -> dict:
    """Return the row of a step: gradients and an optimizer where its mode has them."""
    state, row = fullest_state(step), fill_row(_COLUMNS, step)
    if state.master_parameters:
        row["master_parameters_gib"] = state.master_parameters / GIB
    if step.has_backward:
        row["gradients_gib"] = state.gradients / GIB
    if step.updates_parameters:
        # Optimizers make their state in the first step, but master parameters at once.
        model_bytes = state.parameters + state.master_parameters
        row |= {"optimizer_state_gib": state.optimizer_state / GIB, "after_initialization_gib": model_bytes / GIB}
        row |= {
            "before_first_step_gib": (model_bytes + state.gradients) / GIB,
            "after_first_step_gib": state.total / GIB,
        }
        # Until its first update a training step holds what one without an optimizer does.
        row["first_peak_gib"] = rank_peak(replace(step, mode="forward-backward")).total_gib
    return row


def plot_rank_memory(steps: Sequence[ShardedStep], path: Path) -> None:
    """Draw a bar for each way of training, stacked by component: what is there at the peak."""
    peaks = [rank_peak(step) for step in steps]
    # The strategy, and on lines below it what differs between the bars.
    settings = [
        (step.size.name, f"context {step.size.context}", step.precision, step.mode, f"{step.world_size} ranks")
        for step in steps
    ]
    varies = [len(set(values)) > 1 for values in zip(*settings, strict=True)]
    strategies = [step.strategy for step in steps]
    labels = ["\n".join([name, *compress(texts, varies)]) for name, texts in zip(strategies, settings, strict=True)]
    figure, ((drawing,),) = new_axes(width=2 + 1.1 * len(steps), height=5)
    bottoms = [0.0] * len(peaks)
    bar_names = {"optimizer_state": "optimizer state", "activations": "activations and buffers"}
    for component in ("parameters", "gradients", "optimizer_state", "activations"):
        heights = [getattr(peak, component) / GIB for peak in peaks]
        drawing.bar(range(len(peaks)), heights, bottom=bottoms, label=bar_names.get(component, component))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, total in enumerate(bottoms):
        drawing.annotate(f"{total:.1f}", (position, total), ha="center", va="bottom", fontsize=9)
    drawing.set_xticks(range(len(labels)), labels, fontsize=8)
    drawing.set_ylabel("memory of a rank at its peak, GiB")
    drawing.legend(fontsize=8)
    write_figure(figure, path)


def _describe_size(size: ModelSize) -> str:
    return f"{size.name}, batch {size.batch_size}, context {size.context}"


def activations_tables(sizes: Sequence[ModelSize], precision: str, attention: str) -> list[Table]:
    """Return single tensors, and what one block saves for backward, for each size."""
    tables = []
    notes = sentences(__name__, "block")
    for size in sizes:
        title = f"{_describe_size(size)}, {precision}"
        tables.append(answers_table("tensors", f"Activation tensors: {title}", tensor_answers(size, precision)))
        title = f"Saved for backward by one block: {title}, {attention} attention"
        tables.append(answers_table("block", title, block_answers(size, precision, attention), notes))
    return tables


def flops_tables(sizes: Sequence[ModelSize]) -> list[Table]:
    """Return FLOPs by component, for each size."""
    notes = sentences(__name__, "flops", softmax_flops=SOFTMAX_FLOPS_PER_SCORE)
    return [answers_table("flops", f"FLOPs: {_describe_size(size)}", flops_answers(size), notes) for size in sizes]


def attention_tables(
    batch: int,
    contexts: Sequence[int],
    head_dims: Sequence[int],
    dtype: str,
    implementations: Sequence[str],
    capacity_bytes: float,
    *,
    causal: bool,
) -> list[Table]:
    """Return memory of every shape, and for each implementation the smallest that does not fit, tensor by tensor."""

    def memory(implementation: str, context: int, head_dim: int) -> AttentionMemory:
        return attention_memory(batch, context, head_dim, dtype, causal=causal, implementation=implementation)

    rows: list[dict[str, Value]] = []
    tried = sorted(contexts)
    for implementation, head_dim in product(implementations, head_dims):
        # Each context next to the one before, over which its memory has grown.
        for shorter, context in zip([None, *tried], tried, strict=False):
            needs = memory(implementation, context, head_dim)
            row: dict[str, Value] = {"implementation": implementation, "head_dim": head_dim, "context": context}
            row |= {"held_gib": needs.held / GIB, "peak_gib": needs.peak / GIB, "fits": needs.peak <= capacity_bytes}
            if shorter is not None:
                held_ratio = needs.held / memory(implementation, shorter, head_dim).held
                row |= {"context_ratio": context / shorter, "held_ratio": held_ratio}
            rows.append(row)
    columns = (
        *named_columns("implementation", "head_dim", "context", held_gib="held before backward"),
        *named_columns(context_ratio="context grows", held_ratio="held memory grows", peak_gib="peak"),
        Column("fits", f"fits {capacity_bytes / GIB:g} GiB"),
    )
    title = f"Attention alone: batch {batch}, {dtype}, {'causal' if causal else 'full'}"
    tables = [Table("attention", title, columns, rows, sentences(__name__, "attention"))]
    # Doubled up to a length that no memory holds, so that each implementation has a shape that does not fit.
    longer = [*tried]
    while longer[-1] < 2**50:  # A query and a key of it have more bytes than --capacity-gib takes.
        longer.append(2 * longer[-1])
    for implementation in implementations:
        peaks = {
            (context, head_dim): memory(implementation, context, head_dim).peak
            for context, head_dim in product(longer, head_dims)
        }
        # The shape with the least memory over the capacity.
        _, context, head_dim = min((peak, *shape) for shape, peak in peaks.items() if peak > capacity_bytes)
        where = "in the grid" if context <= max(contexts) else "beyond the grid"
        answers = attention_answers(batch, context, head_dim, dtype, causal=causal, implementation=implementation)
        shape = f"context {context}, head dim {head_dim}, {where}"
        title = f"Smallest shape that does not fit with {implementation} attention: {shape}"
        tables.append(answers_table(f"{implementation}_out_of_memory", title, answers))
    return tables


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
