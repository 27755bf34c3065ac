"""The table and the picture of ``kernels``, built from its cells; columns and formulas are in ``docs/columns.md``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336sys.results.model import Cell, Run
from cs336sys.results.statistics import ratio
from cs336sys.settings.operations import KernelWorkload
from cs336sys.tables import titles
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.saved import SavedCommand, picture_of_measured
from cs336sys.tables.table import Column, Table, named_columns

PARTS = ("forward", "backward", "end_to_end")


def kernel_tables(cells: Sequence[Cell], run: Run | None, baseline: str) -> list[Table]:
    """Build the table of every implementation's times, rates, largest error and speed-up over ``baseline``."""
    settings = titles.columns_of(KernelWorkload)
    varying = titles.shown_settings(cells, settings)
    baselines, without_baseline = titles.find_baselines(cells, "implementation", baseline, titles.OF_IMPLEMENTATION)
    columns = [
        *varying.values(),
        Column("implementation", "implementation"),
        *(Column(f"{part}_ms", _words(part), "ms") for part in PARTS),
        *(Column(f"{part}_gbps", _words(part), "gbps") for part in PARTS),
        *(Column(f"{part}_copy_percent", f"{_words(part)} of a copy", "percent") for part in PARTS),
        Column("end_to_end_tflops", _words("end_to_end"), "tflops"),
        Column("end_to_end_speedup", f"end-to-end over {baseline}", "ratio", spread="interval"),
        *named_columns("over_inputs_gib", error="largest error", status="status"),
    ]
    rows = list(map(_kernel_row, cells, baselines))
    rates = titles.known_values(cells, "copy_gbps")
    notes = [titles.ERROR_NOTE]
    if rates:
        slowest, fastest = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
        notes.append(f"a copy: {slowest if slowest == fastest else f'{slowest} to {fastest}'} GB/s read and written")
    notes += titles.interpreted_notes(cells, run)
    notes += [*without_baseline, *titles.found_in_user_code(cells), *titles.failure_notes(cells, "implementation")]
    heading = titles.title("kernels", cells, run, settings, varying)
    return [Table("kernels", heading, columns, rows, notes, steadier="more --repetition-ms")]


def _words(part: str) -> str:
    return part.replace("_", "-")


def _kernel_row(cell: Cell, baseline: Cell | None) -> dict[str, Any]:
    row = dict(cell.configuration) | cell.derived | {"status": cell.status}
    errors = {name.removesuffix("_error"): value for name, value in cell.derived.items() if name.endswith("_error")}
    if errors:
        # NaN counts as the largest; max alone would find it or not by its place.
        worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
        row["error"] = f"{errors[worst]:.1e} ({worst})"
    row |= {f"{part}_ms": samples.median for part, samples in cell.samples.items()}
    if baseline is not None and cell.status == "ok":
        row["end_to_end_speedup"] = ratio(baseline.samples["end_to_end"], cell.samples["end_to_end"])
    return row


def plot_kernels(cells: Sequence[Cell], path: Path) -> None:
    """Draw shares of the copy rate: a row of axes for each part, a group of bars for each op and shape."""
    from matplotlib.patches import Patch

    measured = [cell for cell in cells if cell.status == "ok" and "end_to_end_copy_percent" in cell.derived]
    groups = list(dict.fromkeys(_label(cell) for cell in measured))
    implementations = list(dict.fromkeys(cell.configuration["implementation"] for cell in measured))
    figure, axes = new_axes(2 + 1.6 * max(2, len(groups)), 8.5, len(PARTS), sharex=True)
    width = 0.8 / max(1, len(implementations))  # Groups, which are 1 apart, have a gap between them.
    for drawing, part in zip(axes.flat, PARTS, strict=True):
        rated = [cell for cell in measured if f"{part}_copy_percent" in cell.derived]
        for number, implementation in enumerate(implementations):
            offset = (number - (len(implementations) - 1) / 2) * width
            drawn = [cell for cell in rated if cell.configuration["implementation"] == implementation]
            bars = {groups.index(_label(cell)) + offset: cell.derived[f"{part}_copy_percent"] for cell in drawn}
            drawing.bar(list(bars), list(bars.values()), width, color=f"C{number}")
        drawing.axhline(100, color="black", linewidth=0.8)
        drawing.set_ylabel(f"{_words(part)}, % of a copy")
        drawing.grid(axis="y", alpha=0.3)
    axes[-1, 0].set_xticks(range(len(groups)), groups, fontsize=8)
    if measured:
        handles = [Patch(color=f"C{number}", label=name) for number, name in enumerate(implementations)]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    write_figure(figure, path)


def _label(cell: Cell) -> str:
    shape = cell.configuration
    return f"{shape['op']}\n{shape['tokens']} x {shape['width']}\n{shape['dtype']}"


SAVED = SavedCommand(
    lambda cells, run, options: kernel_tables(cells, run, options.baseline or "eager"),
    picture_of_measured("kernels", plot_kernels),
)
