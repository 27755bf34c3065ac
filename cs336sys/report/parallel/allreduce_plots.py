"""The picture of ``allreduce``: time and bus bandwidth over the size, and time over the ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336sys.report.numbers import format_number
from cs336sys.report.outputs import write_figure
from cs336sys.report.parallel.allreduce import Group, fit_of, groups_of
from cs336sys.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of more sizes than this, time over the ranks is drawn for some: more lines cannot be told apart.
_MOST_SIZES = 8

_STYLE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2}


def plot_collectives(cells: Sequence[Cell], path: Path) -> None:
    """Rows of axes over a column for each collective, dtype and backend, so that backends stand side by side.

    Times are medians, bandwidths those of the table, of calls back to back; dashed lines are the fitted latency and
    bandwidth. Time over the ranks is drawn where several world sizes were measured.
    """
    from matplotlib.figure import Figure

    groups = groups_of(cells)
    columns = sorted({(group.collective, group.dtype, group.backend) for group in groups}) or [("", "", "")]
    rows: list[Callable[[Axes, dict[Group, list[Cell]]], None]] = [_draw_time_over_size, _draw_bus_bandwidth]
    if len({group.world_size for group in groups}) > 1:
        rows.append(_draw_time_over_ranks)
    figure = Figure(figsize=(1.5 + 4 * len(columns), 0.5 + 3.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for number, column in enumerate(columns):
        of_column = {
            group: found for group, found in groups.items() if (group.collective, group.dtype, group.backend) == column
        }
        axes[0][number].set_title(" ".join(column), fontsize=10)
        for row, draw in enumerate(rows):
            drawing = axes[row][number]
            draw(drawing, of_column)
            drawing.set_yscale("log")
            drawing.grid(alpha=0.3)
            if drawing.get_legend_handles_labels()[1]:
                drawing.legend(fontsize=7)
            if number:
                drawing.set_ylabel("")
    write_figure(figure, path)


def _draw_time_over_size(drawing: "Axes", groups: dict[Group, list[Cell]]) -> None:
    for number, (group, cells) in enumerate(groups.items()):
        sizes = [cell.derived["size_bytes"] for cell in cells]
        medians = [cell.samples["back_to_back"].median for cell in cells]
        drawing.plot(sizes, medians, label=_ranks(group), color=f"C{number}", **_STYLE)
        line = fit_of(cells, "back_to_back")
        if line is not None:
            fitted = [1e6 * line.time_s(size) for size in sizes]
            drawing.plot(sizes, fitted, color=f"C{number}", linestyle="--", linewidth=0.8)
    drawing.set_xscale("log")
    drawing.set_xlabel("size, bytes")
    drawing.set_ylabel("time, us (dashed: fit)")


def _draw_bus_bandwidth(drawing: "Axes", groups: dict[Group, list[Cell]]) -> None:
    for number, (group, cells) in enumerate(groups.items()):
        # One rank alone has none.
        if group.world_size > 1:
            points = [(cell.derived["size_bytes"], cell.derived["back_to_back_busbw_gbps"]) for cell in cells]
            drawing.plot(*zip(*points, strict=True), label=_ranks(group), color=f"C{number}", **_STYLE)
    drawing.set_xscale("log")
    drawing.set_xlabel("size, bytes")
    drawing.set_ylabel("bus bandwidth, GB/s")


def _draw_time_over_ranks(drawing: "Axes", groups: dict[Group, list[Cell]]) -> None:
    by_message: dict[int, list[tuple[int, float]]] = {}
    for group, cells in groups.items():
        for cell in cells:
            points = by_message.setdefault(cell.configuration["message_bytes"], [])
            points.append((group.world_size, cell.samples["back_to_back"].median))
    messages = sorted(by_message)
    step = -(-len(messages) // _MOST_SIZES)
    # From the largest down, which are the ones that matter.
    for number, message_bytes in enumerate(messages[::-1][::step]):
        label = format_number(float(message_bytes), "decimal_bytes")
        drawing.plot(*zip(*sorted(by_message[message_bytes]), strict=True), label=label, color=f"C{number}", **_STYLE)
    drawing.set_xticks(sorted({group.world_size for group in groups}))
    drawing.set_xlabel("ranks")
    drawing.set_ylabel("time, us")


def _ranks(group: Group) -> str:
    return f"{group.world_size} ranks"
