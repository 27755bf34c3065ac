"""The tables of ``flash`` and ``attn``, built from their cells; columns and formulas are in ``docs/columns.md``."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.accounting.activations import AttentionMemory, attention_memory
from cs336sys.accounting.answers.model import attention_answers
from cs336sys.accounting.memory import GIB
from cs336sys.report.account.answers import answers_table
from cs336sys.report.noise import ratio
from cs336sys.report.rounds import ROUNDS_COLUMN, largest_known, pool_cells
from cs336sys.report.tables import Column, Table
from cs336sys.report.titles import SETTING_COLUMNS, interpreted_notes, reasons, shown_settings, steps_words, title
from cs336sys.results import Cell, Run, Samples, configuration_key
from cs336sys.workload import AttentionWorkload

_SHAPE_COLUMNS = {
    "batch_size": Column("batch_size", "batch"),
    "heads": Column("heads", "heads"),
    "kv_heads": Column("kv_heads", "KV heads"),
    "context": Column("context", "context"),
    "head_dim": Column("head_dim", "head dim"),
    "dtype": Column("dtype", "dtype"),
    "causal": Column("causal", "causal"),
    "window": Column("window", "window"),
    "seed": SETTING_COLUMNS["seed"],
    "rounds": ROUNDS_COLUMN,
}
_PARTS = ("forward", "backward", "end_to_end")


def pool_flash_rounds(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of ``flash`` with their rounds pooled (:func:`pool_cells`).

    TFLOP/s are of the medians of all samples, errors and peak the largest.
    """
    return pool_cells(cells, _derived_of_rounds)


def _derived_of_rounds(
    rounds: Sequence[Cell], configuration: Mapping[str, Any], samples: Mapping[str, Samples]
) -> dict[str, Any]:
    names = dict.fromkeys(name for cell in rounds for name in cell.derived if not name.endswith("_tflops"))
    derived = {name: largest_known(rounds, name) for name in names}
    return derived | AttentionWorkload(**configuration).tflops(samples) if samples else derived


def flash_tables(cells: Sequence[Cell], run: Run | None, baseline: str) -> list[Table]:
    """Times of every implementation on every shape, with its errors, and its speed-up over ``baseline``."""
    varying = shown_settings(cells, _SHAPE_COLUMNS)
    baselines = {
        _shape(cell): cell for cell in cells if cell.configuration["implementation"] == baseline and cell.status == "ok"
    }
    rows = [_flash_row(cell, baselines.get(_shape(cell))) for cell in cells]
    columns = [
        *varying.values(),
        Column("implementation", "implementation"),
        *(Column(f"{part}_ms", part.replace("_", "-"), "ms") for part in _PARTS),
        Column("end_to_end_p20_ms", "p20", "ms"),
        Column("end_to_end_p80_ms", "p80", "ms"),
        *(Column(f"{part}_tflops", part.replace("_", "-"), "tflops") for part in _PARTS),
        *(Column(f"{part}_speedup", f"{part.replace('_', '-')} over {baseline}", "ratio") for part in _PARTS),
        *(Column(f"{name}_error", f"{name} error") for name in ("out", "dq", "dk", "dv")),
        Column("peak_gib", "peak", "gib"),
        Column("status", "status"),
    ]
    note = "medians; error is the relative difference from a float64 reference, ||x - reference|| / ||reference||"
    notes = [note, *interpreted_notes(cells, run), *reasons(cells, "implementation")]
    if not baselines and any(cell.status == "ok" for cell in cells):
        notes.append(f"no speed-ups: {baseline} has no time to compare with; see --baseline")
    heading = title("flash", cells, run, _SHAPE_COLUMNS, varying)
    return [Table("flash", heading, columns, rows, tuple(notes), "--rounds 5 or more --repetition-ms")]


def _flash_row(cell: Cell, baseline: Cell | None) -> dict[str, Any]:
    row = dict(cell.configuration) | {"status": cell.status}
    row |= {name: f"{value:.1e}" for name, value in cell.derived.items() if name.endswith("_error")}
    if cell.status != "ok":
        return row
    row |= {name: value for name, value in cell.derived.items() if not name.endswith("_error")}
    for part in _PARTS:
        row[f"{part}_ms"] = cell.samples[part].median
        if baseline is not None:
            row[f"{part}_speedup"] = ratio(baseline.samples[part], cell.samples[part])
    for percent in (20, 80):
        row[f"end_to_end_p{percent}_ms"] = cell.samples["end_to_end"].percentile(percent)
    return row


def attn_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Times and memory of plain attention, and the memory of the smallest shape that does not fit, worked through."""
    varying = shown_settings(cells, _SHAPE_COLUMNS)
    columns = (
        *varying.values(),
        Column("implementation", "implementation"),
        Column("forward_ms", "forward", "ms"),
        Column("backward_ms", "backward", "ms"),
        Column("held_gib", "held before backward", "gib"),
        Column("predicted_held_gib", "predicted held", "gib"),
        Column("peak_gib", "peak", "gib"),
        Column("predicted_peak_gib", "predicted peak", "gib"),
        Column("status", "status"),
    )
    rows = [_attn_row(cell) for cell in cells]
    notes = [f"{steps_words(cells)}; predictions are for eager execution with torch.softmax"] if cells else []
    heading = title("attn", cells, run, _SHAPE_COLUMNS, varying)
    tables = [Table("attn", heading, columns, rows, (*notes, *reasons(cells, "implementation")), "more --steps")]
    out_of_memory = [cell for cell in cells if cell.status == "oom"]
    if out_of_memory:
        tables.append(_worked_through(min(out_of_memory, key=lambda cell: predicted_memory(cell).peak)))
    growth = _growth(cells)
    return [*tables, growth] if growth else tables


def _attn_row(cell: Cell) -> dict[str, Any]:
    memory = predicted_memory(cell)
    row = dict(cell.configuration) | {"status": cell.status}
    if cell.configuration["implementation"] != "model":
        row |= {"predicted_held_gib": memory.held / GIB, "predicted_peak_gib": memory.peak / GIB}
    return row | cell.derived | {f"{name}_ms": samples for name, samples in cell.samples.items()}


def predicted_memory(cell: Cell) -> AttentionMemory:
    """What eager attention of a cell's shape holds, on paper."""
    return attention_memory(*_sequences(cell), causal=cell.configuration["causal"], implementation="eager")


def _sequences(cell: Cell) -> tuple[int, int, int, str]:
    """Sequences of all heads, their length, the head dimension, and the dtype."""
    shape = cell.configuration
    return shape["batch_size"] * shape["heads"], shape["context"], shape["head_dim"], shape["dtype"]


def _worked_through(cell: Cell) -> Table:
    """Where the memory of one shape goes, tensor by tensor, as ``account attention`` derives it."""
    answers = attention_answers(*_sequences(cell), causal=cell.configuration["causal"], implementation="eager")
    sequences, context, head_dim, dtype = _sequences(cell)
    heading = f"attn: the smallest shape out of memory, {sequences} x {context} x {head_dim} {dtype}"
    return answers_table("accounting", heading, answers)


def _growth(cells: Sequence[Cell]) -> Table | None:
    """How the memory held for the backward pass grows from each context to the next."""
    measured = [cell for cell in cells if cell.status == "ok" and cell.derived.get("held_gib") is not None]
    rows = []
    for cell in measured:
        shape = cell.configuration
        shorter = [
            other
            for other in measured
            if configuration_key(other.configuration, ("context",)) == configuration_key(shape, ("context",))
            and other.configuration["context"] < shape["context"]
        ]
        if shorter:
            before = max(shorter, key=lambda other: other.configuration["context"])
            rows.append(
                {
                    "implementation": shape["implementation"],
                    "head_dim": shape["head_dim"],
                    "contexts": f"{before.configuration['context']} to {shape['context']}",
                    "context_ratio": shape["context"] / before.configuration["context"],
                    "held_ratio": cell.derived["held_gib"] / before.derived["held_gib"],
                }
            )
    if not rows:
        return None
    columns = (
        Column("implementation", "implementation"),
        Column("head_dim", "head dim"),
        Column("contexts", "context"),
        Column("context_ratio", "context grows", "ratio"),
        Column("held_ratio", "held memory grows", "ratio"),
    )
    note = "Near the square of the context's growth the probabilities dominate; FlashAttention holds none of them."
    return Table("growth", "attn: memory held before backward, against the context", columns, rows, notes=(note,))


def _shape(cell: Cell) -> str:
    return configuration_key(cell.configuration, ignore=("implementation", "rounds"))
