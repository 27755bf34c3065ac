"""The tables of ``allreduce``, built from its cells; columns and formulas are described in ``docs/columns.md``."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cs336sys.accounting.communication import AlphaBeta, buffer_bytes, bus_factor, fit_alpha_beta
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Run
from cs336sys.settings.operations import CollectiveWorkload
from cs336sys.tables.numbers import format_number
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.saved import SavedCommand, of_run, picture_of_measured
from cs336sys.tables.table import Column, Table, by_key, fill_row, named_columns, sentences
from cs336sys.tables.titles import failure_notes, shown_settings, title


class MessageSweep(NamedTuple):
    """Settings that the cells of one sweep over message sizes share."""

    backend: str
    world_size: int
    dtype: str
    collective: str


_GROUP_COLUMNS = by_key(*named_columns("backend", world_size="ranks", dtype="type", collective="collective"))
_SIZE_COLUMNS = (Column("size_bytes", "size", "decimal_bytes"), Column("elements", "count", "count"))


def allreduce_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the tables of calls back to back, of calls that are each waited for, and of the fit to both."""
    varying = shown_settings(cells, _GROUP_COLUMNS)
    message_columns = (*(varying | {"dtype": _GROUP_COLUMNS["dtype"]}).values(), *_SIZE_COLUMNS)
    measured = [cell for cell in cells if cell.status == "ok"]
    rounding_notes = _rounding_notes([cell.configuration | cell.derived for cell in measured])
    back_to_back = Table(
        "allreduce",
        title("allreduce", cells, run, _GROUP_COLUMNS, varying, "calls back to back"),
        (
            *(*message_columns, *_time_columns("back_to_back"), Column("in_place", "in place")),
            *(Column("wrong_elements", "wrong", "count"), Column("status", "status")),
        ),
        _collective_rows(cells, "back_to_back"),
        notes=(*_collective_notes(cells), *failure_notes(cells), *rounding_notes),
    )
    synchronized = Table(
        "latency",
        "the same calls, each waited for",
        (*message_columns, *_time_columns("synchronized")),
        _collective_rows(measured, "synchronized"),
        notes=sentences(__name__, "synchronized"),
    )
    return [back_to_back, synchronized, _fit_table(measured, varying)]


def groups_of(cells: Sequence[Cell]) -> dict[MessageSweep, list[Cell]]:
    """Group the measured cells by backend, world size, dtype and collective, each group in rising order of size."""
    groups: dict[MessageSweep, list[Cell]] = {}
    for cell in cells:
        if cell.status == "ok":
            sweep = MessageSweep(*(cell.configuration[name] for name in MessageSweep._fields))
            groups.setdefault(sweep, []).append(cell)
    return {sweep: sorted(group, key=lambda cell: cell.derived["size_bytes"]) for sweep, group in groups.items()}


def fit_of(cells: Sequence[Cell], timing: str) -> AlphaBeta | None:
    """Fit latency and bandwidth to the medians of one group's cells; None with fewer than two sizes."""
    try:
        return fit_alpha_beta(*_points(cells, timing))
    except UsageError:
        return None


def _points(cells: Sequence[Cell], timing: str) -> tuple[list[float], list[float]]:
    """Return the cells' sizes in bytes and median times in s."""
    return [cell.derived["size_bytes"] for cell in cells], [cell.samples[timing].median / 1e6 for cell in cells]


def allreduce_plan(workloads: Sequence[CollectiveWorkload]) -> Table:
    """Build the table of ``--dry-run``: each cell with the memory of its tensors."""
    rows = []
    for workload in workloads:
        # The size that was asked for, kept where it is too small: then ``size_bytes`` below raises a UsageError.
        row = workload.configuration() | {"size_bytes": workload.message_bytes}
        try:
            rank_bytes = buffer_bytes(workload.collective, workload.size_bytes, workload.world_size)
            row |= {"size_bytes": workload.size_bytes, "elements": workload.elements}
            row |= {"tensors_bytes": rank_bytes, "all_ranks_bytes": rank_bytes * workload.world_size}
        except UsageError as error:
            row["reason"] = str(error)
        rows.append(row)
    columns = (
        *_GROUP_COLUMNS.values(),
        *_SIZE_COLUMNS,
        *named_columns(tensors_bytes="tensors of a rank", all_ranks_bytes="of all ranks", reason="reason"),
    )
    title = "allreduce: cells and the memory of their tensors (nothing was run)"
    return Table("plan", title, columns, rows, tuple(_rounding_notes(rows)))


def _rounding_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Note messages that are no whole number of elements, or that ranks cannot share equally."""
    rounded = dict.fromkeys(
        f"{row['size_bytes']} of {row['message_bytes']} bytes ({row['dtype']}, {row['world_size']} ranks)"
        for row in rows
        if "elements" in row and row["size_bytes"] != row["message_bytes"]
    )
    reason = "less than asked for, to have whole elements that all ranks share equally"
    return [f"{reason}: {', '.join(rounded)}"] if rounded else []


def _time_columns(timing: str) -> tuple[Column, ...]:
    """Return the columns of measured cells by one timing; not all cells have a distance from the fit."""
    return (
        Column("time_us", "time", "us", lambda cell: cell.samples[timing], spread="samples"),
        Column("min_us", "min", "us", lambda cell: min(cell.samples[timing].measured)),
        Column("max_us", "max", "us", lambda cell: max(cell.samples[timing].measured)),
        Column("p99_us", "p99", "us", lambda cell: cell.samples[timing].percentile(99)),
        Column("algbw_gbps", "algbw", "gbps", lambda cell: cell.derived[f"{timing}_algbw_gbps"]),
        Column("busbw_gbps", "busbw", "gbps", lambda cell: cell.derived[f"{timing}_busbw_gbps"]),
        Column("misfit_percent", "off the fit", "percent"),
    )


def _collective_rows(cells: Sequence[Cell], timing: str) -> list[dict[str, Any]]:
    """Return a row for each cell, with its times by one timing if it was measured, else with the requested size."""
    misfits = {}  # By the cell's id, a column with its distance from its group's line; two sizes always fit.
    for group in groups_of(cells).values():
        line = fit_of(group, timing)
        if line is not None and len(group) > 2:
            for cell, size, time_s in zip(group, *_points(group, timing), strict=True):
                # Rounded: where the line goes through a point, the last bits of floating-point numbers remain.
                misfits[id(cell)] = {"misfit_percent": round(100 * (time_s / line.time_s(size) - 1), 9)}
    return [
        cell.configuration
        | {"size_bytes": cell.configuration["message_bytes"], **cell.derived, "status": cell.status}
        | (fill_row(_time_columns(timing), cell) if cell.status == "ok" else {})
        | misfits.get(id(cell), {})
        for cell in cells
    ]


def _collective_notes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Name the links, say how calls were counted, and give the average bus bandwidth of a single group."""
    ranks_by_link: dict[str, list[str]] = {}
    for cell in cells:
        if "link" in cell.derived:
            ranks = f"{cell.configuration['world_size']} ranks of {cell.configuration['backend']}"
            ranks_by_link.setdefault(cell.derived["link"], []).append(ranks)
    counts = {(cell.configuration["iterations"], cell.configuration["warmup"]) for cell in cells if cell.status == "ok"}
    groups = groups_of(cells)
    average_gbps = _average_busbw(*groups.values()) if len(groups) == 1 else None
    facts = {"ranks_by_link": ranks_by_link, "counts": sorted(counts), "average_gbps": average_gbps}
    return sentences(__name__, "calls", **facts)


def _average_busbw(cells: Sequence[Cell]) -> float | None:
    """Return the mean GB/s over all sizes, as nccl-tests prints it; None for one rank, which has no bus."""
    busbw = [cell.derived["back_to_back_busbw_gbps"] for cell in cells]
    return None if None in busbw else sum(busbw) / len(busbw)


def _fit_table(cells: Sequence[Cell], varying: dict[str, Column]) -> Table:
    """Build the table of latency and bandwidth of each group and timing, with the columns of settings that vary."""
    rows = []
    for sweep, group in groups_of(cells).items():
        factor = bus_factor(sweep.collective, sweep.world_size)  # 0 of a single rank, which sends nothing.
        for timing in ("back_to_back", "synchronized"):
            line = fit_of(group, timing)
            if line is None:
                continue
            is_finite = math.isfinite(line.bytes_per_s)  # Else larger messages took no longer.
            row = sweep._asdict() | {"timing": timing.replace("_", " "), "latency_us": 1e6 * line.latency_s}
            row["bandwidth_gbps"] = line.bytes_per_s / 1e9 if is_finite else None
            row["bus_bandwidth_gbps"] = factor * line.bytes_per_s / 1e9 if factor and is_finite else None
            row["half_bandwidth_bytes"] = line.half_bandwidth_bytes if is_finite else None
            row["average_busbw_gbps"] = _average_busbw(group) if timing == "back_to_back" else None
            deviation = line.largest_deviation(*_points(group, timing)) if len(group) > 2 else None  # Two always fit.
            row["deviation_percent"] = None if deviation is None else 100 * deviation
            rows.append(row)
    columns = (
        *varying.values(),
        *named_columns(timing="calls", latency_us="latency", bandwidth_gbps="bandwidth"),
        *named_columns(bus_bandwidth_gbps="bus bandwidth"),
        Column("half_bandwidth_bytes", "half bandwidth at", "decimal_bytes"),
        *named_columns("average_busbw_gbps", deviation_percent="largest deviation"),
    )
    return Table("fit", "latency and bandwidth of a message", columns, rows, sentences(__name__, "fit"))


_STYLE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2}


def plot_collectives(cells: Sequence[Cell], path: Path) -> None:
    """Draw a column of axes for each collective, dtype and backend, so that backends stand side by side.

    Times are medians of calls back to back, bandwidths those of these medians; dashed lines are the fitted latency and
    bandwidth. Time over the ranks is drawn where several world sizes were measured.
    """
    groups = groups_of(cells)
    # Without a measured cell, a column of empty axes.
    columns = sorted({(group.collective, group.dtype, group.backend) for group in groups}) or [("", "", "")]
    rows: list[Callable[[Axes, dict[MessageSweep, list[Cell]]], None]] = [_draw_time_over_size, _draw_bus_bandwidth]
    if len({group.world_size for group in groups}) > 1:
        rows.append(_draw_time_over_ranks)
    width, height = 1.5 + 4 * len(columns), 0.5 + 3.6 * len(rows)
    figure, axes = new_axes(width, height, len(rows), len(columns), sharey="row")
    for number, column in enumerate(columns):
        groups_of_column = {
            sweep: group for sweep, group in groups.items() if (sweep.collective, sweep.dtype, sweep.backend) == column
        }
        axes[0][number].set_title(" ".join(column), fontsize=10)
        for row, draw in enumerate(rows):
            drawing = axes[row][number]
            draw(drawing, groups_of_column)
            drawing.set_yscale("log")
            drawing.grid(alpha=0.3)
            if drawing.get_legend_handles_labels()[1]:  # There are lines with labels.
                drawing.legend(fontsize=7)
            if number:
                drawing.set_ylabel("")  # That of the first column is for the row.
    write_figure(figure, path)


def _draw_time_over_size(drawing: Axes, groups: dict[MessageSweep, list[Cell]]) -> None:
    for number, (group, cells) in enumerate(groups.items()):
        sizes = [cell.derived["size_bytes"] for cell in cells]
        medians_us = [cell.samples["back_to_back"].median for cell in cells]
        drawing.plot(sizes, medians_us, label=f"{group.world_size} ranks", color=f"C{number}", **_STYLE)
        line = fit_of(cells, "back_to_back")
        if line is not None:
            fitted_us = [1e6 * line.time_s(size) for size in sizes]
            drawing.plot(sizes, fitted_us, color=f"C{number}", linestyle="--", linewidth=0.8)
    drawing.set(xscale="log", xlabel="size, bytes", ylabel="time, us (dashed: fit)")


def _draw_bus_bandwidth(drawing: Axes, groups: dict[MessageSweep, list[Cell]]) -> None:
    for number, (group, cells) in enumerate(groups.items()):
        if group.world_size > 1:  # One rank alone has no bus.
            sizes = [cell.derived["size_bytes"] for cell in cells]
            calls = [cell.samples["back_to_back"] for cell in cells]
            # The derived bandwidth is that of the mean call, and the picture's that of the median one.
            means_gbps = [cell.derived["back_to_back_busbw_gbps"] for cell in cells]
            medians_gbps = [busbw * call.mean / call.median for busbw, call in zip(means_gbps, calls, strict=True)]
            drawing.plot(sizes, medians_gbps, label=f"{group.world_size} ranks", color=f"C{number}", **_STYLE)
    drawing.set(xscale="log", xlabel="size, bytes", ylabel="bus bandwidth, GB/s")


def _draw_time_over_ranks(drawing: Axes, groups: dict[MessageSweep, list[Cell]]) -> None:
    """Draw a line for each size of message, or for evenly spaced ones of many, the largest among them."""
    points_by_message: dict[int, list[tuple[int, float]]] = {}
    for group, cells in groups.items():
        for cell in cells:
            points = points_by_message.setdefault(cell.configuration["message_bytes"], [])
            points.append((group.world_size, cell.samples["back_to_back"].median))
    messages = sorted(points_by_message, reverse=True)
    # Of eight sizes at most: more lines cannot be told apart.
    for number, message_bytes in enumerate(messages[:: math.ceil(len(messages) / 8)]):
        label = format_number(float(message_bytes), "decimal_bytes")
        ranks, times_us = zip(*sorted(points_by_message[message_bytes]), strict=True)
        drawing.plot(ranks, times_us, label=label, color=f"C{number}", **_STYLE)
    drawing.set_xticks(sorted({group.world_size for group in groups}))
    drawing.set(xlabel="ranks", ylabel="time, us")


SAVED = SavedCommand(of_run(allreduce_tables), picture_of_measured("allreduce", plot_collectives))
