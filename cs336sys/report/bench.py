"""The tables of ``bench``, built from its cells; columns and formulas are described in ``docs/columns.md``."""

from collections.abc import Sequence
from typing import Any

from cs336sys.accounting.memory import predicted_peak
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.tables import Column, Table
from cs336sys.report.workloads import SETTING_COLUMNS, SIZE_COLUMNS, method_notes, shown_settings, title
from cs336sys.results import Cell, Run, configuration_key
from cs336sys.workload import PHASES, Workload

# A GPU that idles for more of the step than this is waiting for the CPU to launch its kernels.
LAUNCH_BOUND_IDLE_PERCENT = 20.0

_ALWAYS_SHOWN = ("context", "precision", "compile")

# What a speed-up is measured over: the first precision and compile mode of the sweep.
_SPEEDUP_AXES = ("precision", "compile", "attention", "optimizer")


def bench_tables(cells: Sequence[Cell], run: Run | None, percentiles: Sequence[float] = ()) -> list[Table]:
    """The step times, and a table of speed-ups when the sweep offers something to compare."""
    settings = shown_settings(cells, SETTING_COLUMNS, _ALWAYS_SHOWN)
    tables = [_times(cells, run, settings, percentiles)]
    speedups = _speedups(cells, settings)
    return [*tables, speedups] if speedups else tables


def plan_table(workloads: Sequence[Workload], command: str = "bench") -> Table:
    """What ``--dry-run`` prints: each cell with its predicted memory."""
    rows = []
    for workload in workloads:
        memory = predicted_peak(workload.size, workload.precision, workload.mode, workload.attention)
        rows.append(
            workload.configuration()
            | {
                "parameters": count_parameters(workload.size),
                "parameters_gib": memory.parameters_gib,
                "gradients_gib": memory.gradients_gib,
                "optimizer_state_gib": memory.optimizer_state_gib,
                "activations_gib": memory.activations_gib,
                "predicted_peak_gib": memory.total_gib,
                "moment": memory.moment,
            }
        )
    columns = (
        *SIZE_COLUMNS,
        *SETTING_COLUMNS.values(),
        Column("parameters_gib", "parameters", "gib"),
        Column("gradients_gib", "gradients", "gib"),
        Column("optimizer_state_gib", "optimizer state", "gib"),
        Column("activations_gib", "activations", "gib"),
        Column("predicted_peak_gib", "predicted peak", "gib"),
        Column("moment", "at"),
    )
    note = "Predicted for eager mode: what is alive at the moment when most is."
    return Table("plan", f"{command}: cells and predicted memory (nothing was run)", columns, rows, notes=(note,))


def _times(cells: Sequence[Cell], run: Run | None, settings: dict[str, Column], percentiles: Sequence[float]) -> Table:
    phases = list(dict.fromkeys(phase for cell in cells for phase in PHASES[cell.configuration["mode"]]))
    columns = [
        *SIZE_COLUMNS,
        *settings.values(),
        *(Column(f"{phase}_ms", phase, "ms") for phase in phases),
        Column("step_ms", "step", "ms"),
        *(Column(f"step_ms_p{percent:g}", f"step p{percent:g}", "ms") for percent in percentiles),
    ]
    if "warmup" in settings:
        columns.append(Column("first_measured_ms", "first measured step", "ms"))
    columns += [
        Column("wall_ms", "CPU wall", "ms"),
        Column("gpu_busy_ms", "GPU busy", "ms"),
        Column("launch_bound", "launch-bound"),
        Column("first_step_s", "first step ready", "s"),
        Column("tokens_per_s", "tokens/s", "tokens_per_s"),
        Column("tflops", "TFLOP/s", "tflops"),
        Column("mfu_percent", "MFU", "percent"),
        Column("peak_gib", "peak", "gib"),
        Column("status", "status"),
    ]
    rows = [_row(cell, percentiles) for cell in cells]
    heading = title("bench", cells, run, SETTING_COLUMNS, settings)
    return Table("bench", heading, tuple(columns), rows, notes=method_notes(cells))


def _row(cell: Cell, percentiles: Sequence[float]) -> dict[str, Any]:
    workload = Workload.from_configuration(cell.configuration)
    row = dict(cell.configuration) | {"parameters": count_parameters(workload.size), "status": cell.status}
    if cell.status != "ok":
        return row
    step = cell.samples["step"]
    row |= {f"{name}_ms": samples for name, samples in cell.samples.items()}
    row |= {f"step_ms_p{percent:g}": step.percentile(percent) for percent in percentiles}
    row |= cell.derived | {"first_measured_ms": step.measured[0]}
    busy_ms = cell.derived["gpu_busy_ms"]
    if busy_ms is not None:
        idle_percent = 100 * (1 - busy_ms / step.median)
        row["launch_bound"] = "yes" if idle_percent > LAUNCH_BOUND_IDLE_PERCENT else "no"
    return row


def _speedups(cells: Sequence[Cell], settings: dict[str, Column]) -> Table | None:
    """Ratios of medians to the first measured cell that differs in nothing but the compared settings."""
    axes = [name for name in _SPEEDUP_AXES if name in settings and len({c.configuration[name] for c in cells}) > 1]
    measured = [cell for cell in cells if cell.status == "ok"]
    if not axes or len(measured) < 2:
        return None
    baselines: dict[str, Cell] = {}
    for cell in cells:
        baselines.setdefault(configuration_key(cell.configuration, ignore=tuple(axes)), cell)
    series = list(dict.fromkeys(name for cell in measured for name in cell.samples if name != "wall"))
    rows = []
    for cell in measured:
        baseline = baselines[configuration_key(cell.configuration, ignore=tuple(axes))]
        if baseline is cell or baseline.status != "ok":
            continue
        row = dict(cell.configuration) | {"over": ", ".join(str(baseline.configuration[name]) for name in axes)}
        for name in series:
            if name in cell.samples and name in baseline.samples:
                row[f"{name}_speedup"] = baseline.samples[name].median / cell.samples[name].median
        rows.append(row)
    if not rows:
        return None
    columns = (
        Column("size", "size"),
        *settings.values(),
        Column("over", "over"),
        *(Column(f"{name}_speedup", name, "ratio") for name in series),
    )
    return Table("speedup", "speed-up: ratio of medians within this run", columns, rows)
