"""Tables that compare strategies of activation checkpointing: measured beside predicted, and predicted alone."""

from collections.abc import Sequence
from typing import Any

from cs336sys.accounting.checkpointing import (
    SUBLAYERS,
    best_group_size,
    predicted_peak,
    recomputed_flops,
)
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.memory import GIB, PeakMemory
from cs336sys.report.numbers import format_quantity
from cs336sys.report.tables import Column, Table
from cs336sys.results import Cell, configuration_key
from cs336sys.workload import MemoryWorkload, Workload

_PREDICTED = (
    Column("predicted_gib", "predicted peak", "gib"),
    Column("predicted_moment", "moment of the peak"),
    Column("predicted_activations_gib", "most activations", "gib"),
    Column("recomputed_percent", "recomputed", "percent"),
)


def strategies_table(cells: Sequence[Cell], identity: Sequence[Column]) -> Table | None:
    """What each strategy holds and costs, in time over the first that was measured; None if there is only one."""
    cells = [cell for cell in cells if cell.configuration["mode"] != "forward"]
    if len({cell.configuration["checkpointing"] for cell in cells}) < 2:
        return None
    firsts: dict[str, Cell] = {}
    rows = []
    notes: dict[str, None] = {}
    for cell in cells:
        workload = MemoryWorkload.from_configuration(cell.configuration)
        row = cell.configuration | _predicted(workload) | {"status": cell.status}
        if cell.status == "ok":
            first = firsts.setdefault(configuration_key(cell.configuration, ignore=("checkpointing",)), cell)
            row |= {"peak_gib": cell.derived["peak_gib"], "step_ms": cell.samples["step"]}
            row["step_ratio"] = cell.samples["step"].median / first.samples["step"].median
        rows.append(row)
        if workload.training.is_ours:
            notes[best_strategy(workload.training)] = None
    columns = (
        *identity,
        Column("peak_gib", "peak", "gib"),
        *_PREDICTED,
        Column("step_ms", "step", "ms"),
        Column("step_ratio", "step over the first", "ratio"),
        Column("status", "status"),
    )
    return Table("checkpointing", "what checkpointing holds and costs", columns, rows, notes=tuple(notes))


def predicted_strategies_table(workloads: Sequence[MemoryWorkload]) -> Table | None:
    """Every group size that divides the blocks, the best one and its neighbours, and every other strategy.

    None where no workload has checkpoints: nobody asked.
    """
    asked = {workload.training: None for workload in workloads if workload.checkpointing != "none"}
    rows = []
    notes: dict[str, None] = {}
    for training in asked:
        if training.mode == "forward" or not training.is_ours:
            continue
        layers = training.size.num_layers
        best = best_group_size(training.size, training.precision, training.mode, training.attention).best
        sizes = {k for k in range(1, layers + 1) if layers % k == 0 or abs(k - best) <= 1}
        inside = [] if training.kernels == "fused" or training.compile != "off" else SUBLAYERS
        for strategy in ["none", *(f"every={k}" for k in sorted(sizes)), *inside, "nested"]:
            workload = MemoryWorkload(training, strategy)
            rows.append(workload.configuration() | _predicted(workload))
        notes[best_strategy(training)] = None
    columns = (
        Column("size", "size"),
        Column("context", "context"),
        Column("batch_size", "batch"),
        Column("mode", "mode"),
        Column("precision", "precision"),
        Column("attention", "attention"),
        Column("checkpointing", "checkpointing"),
        *_PREDICTED,
    )
    return Table("strategies", "checkpointing strategies on paper", columns, rows, notes=tuple(notes)) if rows else None


def workload_moments(workload: MemoryWorkload) -> list[PeakMemory]:
    """The moments of the workload's step that can be its peak, on paper."""
    return workload.training.widest_moments(workload.checkpointing)


def workload_peak(workload: MemoryWorkload) -> PeakMemory:
    """The widest of them."""
    return max(workload_moments(workload), key=lambda moment: moment.total)


def _predicted(workload: MemoryWorkload) -> dict[str, Any]:
    training = workload.training
    if not training.is_ours:
        return {}
    moments, peak = workload_moments(workload), workload_peak(workload)
    flops = model_flops(training.size, causal=training.attention != "reference")
    recomputed = recomputed_flops(training.size, workload.checkpointing, causal=training.attention != "reference")
    return {
        "predicted_gib": peak.total_gib,
        "predicted_moment": peak.moment,
        "predicted_activations_gib": max(moment.activations for moment in moments) / GIB,
        "recomputed_percent": 100 * recomputed / flops,
    }


def best_strategy(training: Workload) -> str:
    """The answer to which strategy without nesting holds the least, by trying all and by the formula."""
    size = training.size
    found = best_group_size(size, training.precision, training.mode, training.attention)
    strategy = "block" if found.best == 1 else f"every={found.best}"
    settings = (size, training.precision, training.mode, training.attention)
    peak, smaller = (predicted_peak(*settings, one).total_gib for one in (strategy, "sublayer"))
    if smaller < peak:
        strategy = "sublayer"
    return (
        f"{size.name}, context {size.context}, {training.precision}, {training.attention} attention, {training.mode}: "
        f"without nesting {strategy} is predicted to hold the least. Checkpoints of K blocks hold about N s / K + K b "
        f"bytes, least at sqrt(N s / b) = {found.rule:.2g} with N = {size.num_layers} blocks, a block's input "
        f"s = {format_quantity(found.block_input, 'bytes')} and its activations "
        f"b = {format_quantity(found.block_activations, 'bytes')}. Groups of {found.best} peak at "
        f"{format_quantity(peak, 'gib')}, checkpoints around attention and feed-forward layers each at "
        f"{format_quantity(smaller, 'gib')}"
    )
