"""The tables of ``flash`` and ``attn``, built from their cells; columns and formulas are in ``docs/columns.md``."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cs336sys.accounting.activations import AttentionMemory, attention_memory
from cs336sys.accounting.hardware import peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.one_device import attention_answers
from cs336sys.machine.system import Capacity
from cs336sys.results.model import Cell, Run, configuration_key
from cs336sys.results.statistics import ratio
from cs336sys.settings.operations import PLAIN_ATTENTION, AttentionWorkload
from cs336sys.tables import titles
from cs336sys.tables.outputs import legend_columns, new_axes, write_figure
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.saved import SavedCommand, of_run, picture_of_measured
from cs336sys.tables.table import Column, Table, named_columns, sentences

_SHAPE_COLUMNS = titles.columns_of(AttentionWorkload) | {"rounds": titles.ROUNDS_COLUMN}
# The parts of a call that are timed, with their headers.
_PARTS = {"forward": "forward", "backward": "backward", "end_to_end": "end-to-end"}
_KEPT_SETTINGS_NOTE = "our Triton kernels had settings kept by --keep-settings (where: cs336sys doctor)"


def _combine_derived(rounds: Sequence[Cell], pooled: Cell) -> dict[str, Any]:
    """Return the derived columns of pooled rounds: TFLOP/s of the medians of all samples, largest errors and peak."""
    names = dict.fromkeys(name for cell in rounds for name in cell.derived if not name.endswith("_tflops"))
    derived: dict[str, Any] = {name: titles.largest_known(rounds, name) for name in names if name != "notes"}
    derived["notes"] = list(titles.found_in_user_code(rounds))
    if clocks_mhz := titles.known_values(rounds, "sm_clock_mhz"):
        derived["sm_clock_mhz"] = statistics.median(clocks_mhz)
    workload = AttentionWorkload.from_configuration(pooled.configuration)
    return derived | workload.tflops(pooled.samples) if pooled.samples else derived


pool_flash_rounds = partial(titles.pool_cells, combine_derived=_combine_derived)


def flash_tables(cells: Sequence[Cell], run: Run | None, baseline: str) -> list[Table]:
    """Build the table of every implementation's times, errors and speed-up over ``baseline`` on every shape."""
    varying = titles.shown_settings(cells, _SHAPE_COLUMNS)
    baselines, without_baseline = titles.find_baselines(cells, "implementation", baseline, titles.OF_IMPLEMENTATION)
    gpu = (run.machine.get("gpu") if run is not None else None) or ""
    rows = [_flash_row(cell, baseline_cell, gpu) for cell, baseline_cell in zip(cells, baselines, strict=True)]
    columns = [
        *varying.values(),
        Column("implementation", "implementation"),
        *(Column(f"{part}_ms", header, "ms") for part, header in _PARTS.items()),
        *named_columns(end_to_end_p20_ms="p20", end_to_end_p80_ms="p80"),
        *(Column(f"{part}_tflops", header, "tflops") for part, header in _PARTS.items()),
        *named_columns(limit_tflops="limit at this clock"),
        Column("sm_clock_mhz", "SM clock", "mhz"),
        *(
            Column(f"{part}_speedup", f"{header} over {baseline}", "ratio", spread="interval")
            for part, header in _PARTS.items()
        ),
        *(Column(f"{name}_error", f"{name} error") for name in ("out", "dq", "dk", "dv")),
        *named_columns("peak_gib", "status"),
    ]
    notes = (
        titles.ERROR_NOTE,
        *titles.interpreted_notes(cells, run),
        *([_KEPT_SETTINGS_NOTE] if run is not None and "attention_settings" in run.environment else []),
        *titles.found_in_user_code(cells),
        *titles.failure_notes(cells, "implementation"),
        *without_baseline,
    )
    heading = titles.title("flash", cells, run, _SHAPE_COLUMNS, varying)
    return [Table("flash", heading, columns, rows, notes, steadier="--rounds 5 or more --repetition-ms")]


def _flash_row(cell: Cell, baseline: Cell | None, gpu: str) -> dict[str, Any]:
    """Return a row of ``flash``; of an implementation that was not timed, its errors alone."""
    row = dict(cell.configuration) | {"status": cell.status}
    row |= {name: f"{value:.1e}" for name, value in cell.derived.items() if name.endswith("_error")}
    if cell.status != "ok":
        return row
    row |= {name: value for name, value in cell.derived.items() if not name.endswith("_error")}
    if (clock_mhz := row.get("sm_clock_mhz")) is not None and row["dtype"] != "fp32":  # Which may run as TF32.
        row["limit_tflops"] = peak_tflops(gpu, row["dtype"], clock_mhz=clock_mhz)
    for part, samples in cell.samples.items():
        row[f"{part}_ms"] = samples.median
        if baseline is not None and part in baseline.samples:
            row[f"{part}_speedup"] = ratio(baseline.samples[part], samples)
    if "end_to_end" in cell.samples:
        for percent in (20, 80):
            row[f"end_to_end_p{percent}_ms"] = cell.samples["end_to_end"].percentile(percent)
    return row


def attention_plan(command: str, configurations: Sequence[Mapping[str, Any]], capacity: Capacity | None) -> Table:
    """Build the table of ``--dry-run``: the cells, those of plain attention with the memory that they will need."""
    cells = [Cell(command, dict(configuration), status="ok") for configuration in configurations]  # For titles.
    predicted = [cell for cell in cells if cell.configuration["implementation"] in PLAIN_ATTENTION]
    # The formulas are of a square.
    predicted = [cell for cell in predicted if cell.configuration["queries"] in (None, cell.configuration["context"])]
    rows = [cell.configuration | (_predicted_memory(cell) if cell in predicted else {}) for cell in cells]
    too_large = sum(row.get("predicted_peak_gib", 0) > capacity.memory_gib for row in rows) if capacity else 0
    notes = sentences(__name__, "plan", capacity=capacity, too_large=too_large, cells=len(rows))
    varying = titles.shown_settings(cells, _SHAPE_COLUMNS)
    columns = (*varying.values(), *named_columns("implementation", "predicted_held_gib", "predicted_peak_gib"))
    subject = f"{command}: cells and predicted memory (nothing was run)"
    heading = titles.title(subject, cells, run=None, settings=_SHAPE_COLUMNS, shown=varying)
    return Table("plan", heading, columns, rows, notes)


def attn_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the tables of plain attention: times and memory, the smallest shape that does not fit, and its growth."""
    varying = titles.shown_settings(cells, _SHAPE_COLUMNS)
    columns = (
        *varying.values(),
        Column("implementation", "implementation"),
        *named_columns("forward_ms", "backward_ms", spread="samples"),
        Column("held_gib", "held before backward", "gib"),
        *named_columns("predicted_held_gib", "peak_gib", "predicted_peak_gib", "status"),
    )
    rows = [_attn_row(cell) for cell in cells]
    notes = [f"{titles.steps_words(cells)}; predictions are for eager execution with torch.softmax"] if cells else []
    heading = titles.title("attn", cells, run, _SHAPE_COLUMNS, varying)
    notes += titles.failure_notes(cells, "implementation")
    times = Table("attn", heading, columns, rows, notes, steadier="more --steps")
    out_of_memory = [cell for cell in cells if cell.status == "oom"]
    return [times, _smallest_misfit_table(out_of_memory), _growth_table(cells)]


def _attn_row(cell: Cell) -> dict[str, Any]:
    row = cell.configuration | {"status": cell.status}
    if cell.configuration["implementation"] != "model":  # Its softmax may keep other tensors than torch's.
        row |= _predicted_memory(cell)
    return row | cell.derived | {f"{name}_ms": samples for name, samples in cell.samples.items()}


def _predicted_memory(cell: Cell) -> dict[str, float]:
    memory = predicted_eager_memory(cell)
    return {"predicted_held_gib": memory.held / GIB, "predicted_peak_gib": memory.peak / GIB}


def predicted_eager_memory(cell: Cell) -> AttentionMemory:
    """Predict what eager attention of a cell's shape holds, on paper."""
    return attention_memory(*_sequences(cell), causal=cell.configuration["causal"], implementation="eager")


def _sequences(cell: Cell) -> tuple[int, int, int, str]:
    """Return the number of sequences of all heads, their length, the head dimension, and the dtype."""
    shape = cell.configuration
    return shape["batch_size"] * shape["heads"], shape["context"], shape["head_dim"], shape["dtype"]


def _smallest_misfit_table(out_of_memory: Sequence[Cell]) -> Table:
    """Derive the memory of the smallest shape that did not fit, tensor by tensor, as ``account attention`` does."""
    if not out_of_memory:
        return answers_table("accounting", "attn: no shape out of memory", ())
    cell = min(out_of_memory, key=lambda cell: predicted_eager_memory(cell).peak)
    answers = attention_answers(*_sequences(cell), causal=cell.configuration["causal"], implementation="eager")
    sequences, context, head_dim, dtype = _sequences(cell)
    heading = f"attn: the smallest shape out of memory, {sequences} x {context} x {head_dim} {dtype}"
    return answers_table("accounting", heading, answers)


def _growth_table(cells: Sequence[Cell]) -> Table:
    """Build the table of the growth of memory held for the backward pass from each context to the next."""
    measured = [cell for cell in cells if cell.status == "ok" and cell.derived.get("held_gib") is not None]
    cells_of_shape = titles.by_configuration(measured, ignore=("context",))
    rows = []
    for cell in measured:
        context = cell.configuration["context"]
        same_shape = cells_of_shape[configuration_key(cell.configuration, ignore=("context",))]
        shorter = [other for other in same_shape if other.configuration["context"] < context]
        if shorter:
            previous = max(shorter, key=lambda other: other.configuration["context"])
            length = previous.configuration["context"]
            growth = {"contexts": f"{length} to {context}", "context_ratio": context / length}
            growth["held_ratio"] = cell.derived["held_gib"] / previous.derived["held_gib"]
            rows.append(cell.configuration | growth)
    columns = (
        *named_columns("implementation", "head_dim", contexts="context", context_ratio="context grows"),
        *named_columns(held_ratio="held memory grows"),
    )
    notes = sentences(__name__, "growth")
    return Table("growth", "attn: memory held before backward, against the context", columns, rows, notes)


# The line styles of attn's implementations, in their order.
_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")

# Axes of attn: their title, a cell's measured value, and its key in _predicted_memory(), if predicted.
_ATTN_AXES: tuple[tuple[str, Callable[[Cell], float | None], str], ...] = (
    ("forward pass, ms", lambda cell: cell.samples["forward"].median, ""),
    ("backward pass, ms", lambda cell: cell.samples["backward"].median, ""),
    ("held for the backward pass, GiB", lambda cell: cell.derived.get("held_gib"), "predicted_held_gib"),
    ("peak, GiB", lambda cell: cell.derived.get("peak_gib"), "predicted_peak_gib"),
)


def plot_flash(cells: Sequence[Cell], path: Path) -> None:
    """Draw TFLOP/s over the context: a row of axes for each part, a column for each shape, dtype and mask."""
    measured = [cell for cell in cells if cell.status == "ok"]
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in measured:
        lines.setdefault((_shape_label(cell), cell.configuration["implementation"]), []).append(cell)
    groups = list(dict.fromkeys(group for group, _ in lines))
    implementations = list(dict.fromkeys(cell.configuration["implementation"] for cell in measured))
    columns = max(1, len(groups))  # Without cells the axes stay empty.
    figure, axes = new_axes(1 + 3.4 * columns, 8.5, len(_PARTS), columns, sharex="col")
    handles: dict[str, Any] = {}
    for column, group in enumerate(groups):
        for row, (part, header) in enumerate(_PARTS.items()):
            drawing = axes[row][column]
            for number, implementation in enumerate(implementations):
                rated = [cell for cell in lines.get((group, implementation), ()) if f"{part}_tflops" in cell.derived]
                points = sorted((cell.configuration["context"], cell.derived[f"{part}_tflops"]) for cell in rated)
                if points:
                    # Our own kernels stand out; the others differ by colour and marker.
                    width = 2.5 if implementation in ("auto", "triton", "hopper") else 1.2
                    style = {"color": f"C{number}", "marker": "osD^vPX*h<"[number % 10], "markersize": 4}
                    (handles[implementation],) = drawing.plot(*zip(*points, strict=True), linewidth=width, **style)
            drawing.set_xscale("log", base=2)
            drawing.set_ylim(bottom=0)
            drawing.grid(alpha=0.3)
            axes[row][0].set_ylabel(f"{header}, TFLOP/s")
        axes[0][column].set_title(group, fontsize=10)
        axes[-1][column].set_xlabel("context")
    if handles:
        ncols = min(len(handles), legend_columns(figure))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=ncols, fontsize=9)
    write_figure(figure, path)


def _shape_label(cell: Cell) -> str:
    shape = cell.configuration
    mask = "causal" if shape["causal"] else "full"
    label = f"{shape['batch_size']} x {shape['heads']} x S x {shape['head_dim']}, {shape['dtype']}, {mask}"
    names = {"queries": "queries", "kv_heads": "KV heads", "window": "window"}
    more = ", ".join(f"{name} {shape[field]}" for field, name in names.items() if shape.get(field) is not None)
    return f"{label}\n{more}" if more else label


def plot_attn(cells: Sequence[Cell], path: Path) -> None:
    """Draw the time of both passes, memory held between them and its peak over the context, and eager's prediction.

    Colours are head dims (and dtypes), line styles implementations.
    """
    from matplotlib.lines import Line2D

    shapes = list(dict.fromkeys(_shape_in_words(cell) for cell in cells))
    implementations = list(dict.fromkeys(cell.configuration["implementation"] for cell in cells))
    contexts = sorted({cell.configuration["context"] for cell in cells})
    figure, axes = new_axes(11, 7.5, 2, 2, sharex=True)
    for drawing, (title, measured, predicted) in zip(axes.flat, _ATTN_AXES, strict=True):
        for cell in cells if predicted else ():
            point = cell.configuration["context"], _predicted_memory(cell)[predicted]
            if cell.configuration["implementation"] == "eager":
                drawing.plot(*point, "+", color="black", markersize=9, zorder=3)
            if cell.status == "oom":
                color = f"C{shapes.index(_shape_in_words(cell))}"
                drawing.plot(*point, "x", color=color, markersize=9, markeredgewidth=2, zorder=3)
        for (shape, implementation), points in _points_by_line(cells, measured).items():
            style = _LINES[implementations.index(implementation) % len(_LINES)]
            color = f"C{shapes.index(shape)}"
            drawing.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=4)
        drawing.set_title(title, fontsize=10, loc="left")
        drawing.set_xscale("log", base=2)
        drawing.set_yscale("log")
        drawing.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
        drawing.yaxis.set_major_formatter("{x:g}")
        drawing.grid(alpha=0.3)
    for drawing in axes[-1]:
        drawing.set_xlabel("context")
    handles = [Line2D([], [], color=f"C{number}", linewidth=3, label=shape) for number, shape in enumerate(shapes)]
    handles += [
        Line2D([], [], linestyle=_LINES[number % len(_LINES)], color="black", marker="o", markersize=4, label=name)
        for number, name in enumerate(implementations)
    ]
    handles.append(Line2D([], [], linestyle="", marker="+", color="black", markersize=9, label="predicted\nfor eager"))
    if any(cell.status == "oom" for cell in cells):
        label = "out of memory,\nat its prediction"
        handles.append(Line2D([], [], linestyle="", marker="x", color="black", markersize=9, label=label))
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    write_figure(figure, path)


def _points_by_line(
    cells: Sequence[Cell], value: Callable[[Cell], float | None]
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return contexts with their values, sorted, by shape and implementation."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for cell in cells:
        y = value(cell) if cell.status == "ok" else None  # A logarithmic axis has no place for zero.
        if y:
            key = (_shape_in_words(cell), cell.configuration["implementation"])
            series.setdefault(key, []).append((cell.configuration["context"], y))
    return {key: sorted(points) for key, points in series.items()}


def _shape_in_words(cell: Cell) -> str:
    return f"head dim {cell.configuration['head_dim']}, {cell.configuration['dtype']}"


SAVED_ATTN = SavedCommand(of_run(attn_tables), picture_of_measured("attn", plot_attn))
SAVED_FLASH = SavedCommand(
    lambda cells, run, options: flash_tables(cells, run, options.baseline or "eager"),
    picture_of_measured("flash", plot_flash),
    pool_flash_rounds,
)
