"""Tables of what accounting derives: values (``docs/account.md``), and a predicted step as a row."""

from collections.abc import Sequence

from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.memory import step_peak_bytes
from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, public_note
from cs336sys.accounting.step_time.rates import Rates
from cs336sys.tables.numbers import Value, format_operand, in_shown_unit
from cs336sys.tables.table import Column, Table, fill_row, named_columns

_COLUMNS = (
    Column("question", "question", value=lambda answer: answer.question or None),
    Column("quantity", "quantity", value=lambda answer: answer.quantity),
    Column("value", "value", "value", exact="exact"),
    Column("unit", "unit"),
    Column("derivation", "derivation", value=lambda answer: answer.derivation(format_operand)),
    Column("reason", "because", value=lambda answer: answer.reason or None),
    Column("source", "source", value=lambda answer: answer.source),
)


def answers_table(name: str, title: str, answers: Sequence[Derived], notes: Sequence[str] = ()) -> Table:
    """Build a table with a row for each derived value; ``notes`` say what is assumed."""
    rows: list[dict[str, Value]] = []
    for answer in answers:
        value, unit = in_shown_unit(answer.value, answer.unit)
        rows.append(fill_row(_COLUMNS, answer) | {"value": value, "unit": unit, "exact": answer.value})
    return Table(name, title, _COLUMNS, rows, notes)


PREDICTED_COLUMNS = named_columns(
    "step_ms", tokens_per_s="tokens/s", mfu_percent="MFU", peak_gib="memory of a rank", limit="set by"
)


def configuration_words(configuration: StepConfiguration) -> str:
    """Name the choices of a configuration: ``batch 4 x 2, compile block, flash, adamw bf16, checkpoint block``."""
    training, accumulation = configuration.training, configuration.accumulation
    choices = (
        f"batch {training.size.batch_size}" + (f" x {accumulation}" if accumulation > 1 else ""),
        f"compile {training.compile}" if training.is_compiled else "",
        training.attention,
        f"{training.kernels} kernels" if training.fused_kernels else "",
        training.optimizer + ("" if training.keeps_fp32_state else f" {training.state_dtype}"),
        "graph" if training.uses_graphs else "",
        f"checkpoint {configuration.checkpointing}" if configuration.checkpointing != "none" else "",
        configuration.strategy,
        "gradients bf16" if configuration.gradient_dtype == "bf16" else "",
    )
    return ", ".join(filter(None, choices))


def step_row(
    configuration: StepConfiguration, time: StepTime, rates: Rates, memory_bytes: float | None = None
) -> dict[str, Value]:
    """Return a configuration's row for ``tune`` and ``account step``; no time if it is unlike all that was measured.

    ``memory_bytes`` are a rank's; None stands for those that formulas predict for our model.
    """
    size = configuration.training.size
    row: dict[str, Value] = {"configuration": configuration_words(configuration)}
    row["peak_gib"] = (step_peak_bytes(configuration) if memory_bytes is None else memory_bytes) / GIB
    # The GPU's and the CPU's part are known unless more than communication is unlike what was measured.
    if time.only_ranks_unknown:
        row |= {"gpu_ms": 1e3 * time.gpu_s, "launches_ms": 1e3 * sum(time.launches_s.values()) or None}
    if time.unknown:
        return row | {"limit": f"not measured: {'; '.join(time.unknown)}"}
    limit = "launches (CPU)"
    if not time.waits_for_launches:  # The two largest terms of the step's time, with their shares.
        parts = {**time.terms_s, "communication": time.exposed_s}
        largest = sorted(parts, key=lambda name: -parts[name])[:2]
        limit = ", ".join(f"{name.replace('_', ' ')} {parts[name] / time.step_s:.0%}" for name in largest)
    peak = peak_tflops(rates.gpu, configuration.training.precision)  # None for a GPU without a datasheet
    # Of one rank and its GPU: ``size`` has the rank's micro-batch, and no strategy that is predicted splits layers.
    tflops = model_flops(size) * configuration.accumulation / time.step_s / 1e12
    return row | {
        "exposed_ms": 1e3 * time.exposed_s or None,  # No 0 is shown, of one rank, nor of launches in a CUDA graph.
        "step_ms": 1e3 * time.step_s,
        "tokens_per_s": configuration.tokens / time.step_s,
        "mfu_percent": None if peak is None or not configuration.training.is_ours else 100 * tflops / peak,
        "limit": limit,
    }


def error_notes(rates: Rates) -> tuple[str, ...]:
    """Say how far predictions are off, on steps of this project and of others."""
    return tuple(filter(None, (rates.error_note, public_note(rates))))
