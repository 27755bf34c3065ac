"""The picture of ``flash`` (matplotlib, written to a file)."""

from collections.abc import Sequence
from pathlib import Path

from cs336sys.report.outputs import legend_columns, write_figure
from cs336sys.results import Cell


def plot_flash(cells: Sequence[Cell], path: Path) -> None:
    """TFLOP/s over the context, forward above backward, a column of axes for each head dim and dtype."""
    from matplotlib.figure import Figure

    measured = [cell for cell in cells if cell.status == "ok"]
    groups = list(dict.fromkeys(_group(cell) for cell in measured))
    implementations = list(dict.fromkeys(cell.configuration["implementation"] for cell in measured))
    parts = {"forward_tflops": "forward", "backward_tflops": "backward", "end_to_end_tflops": "end-to-end"}
    figure = Figure(figsize=(1 + 3.4 * max(1, len(groups)), 8.5), layout="constrained")
    axes = figure.subplots(len(parts), max(1, len(groups)), squeeze=False, sharex="col")
    for column, group in enumerate(groups):
        for row, (name, part) in enumerate(parts.items()):
            drawing = axes[row][column]
            for number, implementation in enumerate(implementations):
                points = sorted(
                    (cell.configuration["context"], cell.derived[name])
                    for cell in measured
                    if _group(cell) == group and cell.configuration["implementation"] == implementation
                )
                if points:
                    # Our own kernels stand out; the others differ by colour and marker.
                    ours = implementation in ("auto", "triton", "hopper")
                    drawing.plot(
                        *zip(*points, strict=True),
                        label=implementation,
                        color=f"C{number}",
                        marker="osD^vPX*h<"[number % 10],
                        markersize=4,
                        linewidth=2.5 if ours else 1.2,
                    )
            drawing.set_xscale("log", base=2)
            drawing.set_ylim(bottom=0)
            drawing.grid(alpha=0.3)
            if row == 0:
                drawing.set_title(group, fontsize=10)
            if column == 0:
                drawing.set_ylabel(f"{part}, TFLOP/s")
            if row == len(parts) - 1:
                drawing.set_xlabel("context")
    handles = {
        label: handle
        for drawing in axes.flat
        for handle, label in zip(*drawing.get_legend_handles_labels(), strict=True)
    }
    if handles:
        ncols = min(len(handles), legend_columns(figure))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=ncols, fontsize=9)
    write_figure(figure, path)


def _group(cell: Cell) -> str:
    shape = cell.configuration
    mask = "causal" if shape["causal"] else "full"
    return f"{shape['batch_size']} x {shape['heads']} x S x {shape['head_dim']}, {shape['dtype']}, {mask}"
