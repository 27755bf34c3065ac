"""The pictures of ``flash`` and of ``attn`` (matplotlib, written to a file)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cs336sys.accounting.memory import GIB
from cs336sys.report.attention import predicted_memory
from cs336sys.report.outputs import legend_columns, write_figure
from cs336sys.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the implementations of attn, in their order.
_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")

# The axes of attn: what they show, of a cell.
_ATTN_PARTS: dict[str, tuple[str, Callable[[Cell], float | None]]] = {
    "forward": ("forward pass, ms", lambda cell: cell.samples["forward"].mean),
    "backward": ("backward pass, ms", lambda cell: cell.samples["backward"].mean),
    "held": ("held for the backward pass, GiB", lambda cell: cell.derived.get("held_gib")),
    "peak": ("peak, GiB", lambda cell: cell.derived.get("peak_gib")),
}
_PREDICTED: dict[str, Callable[[Cell], float]] = {
    "held": lambda cell: predicted_memory(cell).held / GIB,
    "peak": lambda cell: predicted_memory(cell).peak / GIB,
}


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


def plot_attn(cells: Sequence[Cell], path: Path) -> None:
    """Time of both passes, memory held between them and its peak over the context, with what is predicted for eager.

    Colours are head dims (and dtypes), line styles implementations.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shapes = list(dict.fromkeys(_shape(cell) for cell in cells))
    implementations = list(dict.fromkeys(cell.configuration["implementation"] for cell in cells))
    contexts = sorted({cell.configuration["context"] for cell in cells})
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for drawing, (name, (label, value)) in zip(axes.flat, _ATTN_PARTS.items(), strict=True):
        for cell in cells:
            context, color = cell.configuration["context"], f"C{shapes.index(_shape(cell))}"
            predicted = _PREDICTED.get(name)
            if predicted is not None and cell.configuration["implementation"] == "eager":
                drawing.plot(context, predicted(cell), "+", color="black", markersize=9, zorder=3)
            if predicted is not None and cell.status == "oom":
                drawing.plot(context, predicted(cell), "x", color=color, markersize=9, markeredgewidth=2, zorder=3)
        for (shape, implementation), points in _series(cells, value).items():
            drawing.plot(
                *zip(*points, strict=True),
                _LINES[implementations.index(implementation) % len(_LINES)],
                color=f"C{shapes.index(shape)}",
                marker="o",
                markersize=4,
            )
        _draw_square_law(drawing, [point for points in _series(cells, value).values() for point in points])
        drawing.set_title(label, fontsize=10, loc="left")
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
    handles.append(Line2D([], [], color="0.6", linewidth=5, alpha=0.4, label="grows with\ncontext squared"))
    handles.append(Line2D([], [], linestyle="", marker="+", color="black", markersize=9, label="predicted\nfor eager"))
    if any(cell.status == "oom" for cell in cells):
        label = "out of memory,\nat its prediction"
        handles.append(Line2D([], [], linestyle="", marker="x", color="black", markersize=9, label=label))
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    write_figure(figure, path)


def _series(
    cells: Sequence[Cell], value: Callable[[Cell], float | None]
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Contexts with their values, by shape and implementation."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for cell in cells:
        # A logarithmic axis has no place for zero.
        if cell.status == "ok" and (measured := value(cell)):
            key = (_shape(cell), cell.configuration["implementation"])
            series.setdefault(key, []).append((cell.configuration["context"], measured))
    return {key: sorted(points) for key, points in series.items()}


def _draw_square_law(drawing: "Axes", points: Sequence[tuple[int, float]]) -> None:
    """A broad line through the least value at the longest context, as far down as the values go."""
    if not points:
        return
    longest = max(context for context, _ in points)
    least = min(value for context, value in points if context == longest)
    lowest = min(value for _, value in points)
    shortest = max(min(context for context, _ in points), longest * (lowest / least) ** 0.5)
    ends = [(context, least * (context / longest) ** 2) for context in (shortest, longest)]
    drawing.plot(*zip(*ends, strict=True), color="0.6", linewidth=7, alpha=0.4, zorder=1)


def _shape(cell: Cell) -> str:
    configuration = cell.configuration
    return f"head dim {configuration['head_dim']}, {configuration['dtype']}"
