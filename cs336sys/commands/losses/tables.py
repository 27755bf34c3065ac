"""The table and the picture of ``losses``, built from its cells; columns are described in ``docs/columns.md``."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from cs336sys.results.model import Cell, Run
from cs336sys.settings.profiling import LossWorkload
from cs336sys.tables import titles
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.saved import SavedCommand, of_run, picture_of_measured
from cs336sys.tables.table import Column, Table

# The loss of one step depends on its batch: means are of so many steps, where there are as many.
_AVERAGED = 20

_SETTINGS = titles.columns_of(LossWorkload)
_ALWAYS_SHOWN = ("precision", "compile", "kernels", "optimizer")


def loss_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the table of losses and of their distance from the first cell that was trained on the same batches."""
    shown = titles.shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    counts = [len(cell.samples["loss"].measured) for cell in cells if cell.status == "ok"]
    averaged = min([_AVERAGED, *counts])
    differs_in_steps = len(set(counts)) > 1
    columns = (
        *titles.SIZE_COLUMNS,
        *shown.values(),
        *([Column("steps", "steps")] if differs_in_steps else []),
        Column("first_loss", "first loss", "nats"),
        Column("last_loss", f"mean of the last {averaged}", "nats"),
        Column("largest_difference", "off the first row, at most", "nats"),
        Column("mean_difference", f"off in the last {averaged}", "nats"),
        Column("status", "status"),
    )
    firsts = _first_on_batches(cells)
    rows = [
        cell.configuration | cell.derived | _losses(cell, firsts, averaged) | {"status": cell.status} for cell in cells
    ]
    notes = ["off: the difference from the first row's loss of the same step, on the same batch"]
    if len(firsts) > 1:
        notes.append("first row: the first with the same text, context, batch size and seed; others have other batches")
    if differs_in_steps:
        notes.append(
            f"the mean of {averaged} comes later in rows of more steps; off compares the steps that both rows have"
        )
    notes += [*titles.found_in_user_code(cells), *titles.failure_notes(cells)]
    return [Table("losses", titles.title("losses", cells, run, _SETTINGS, shown), columns, rows, notes=notes)]


# What the batches of a cell are drawn by.
_Batches = tuple[object, ...]


def _batches_of(cell: Cell) -> _Batches:
    drawn_by = cell.configuration
    text = drawn_by.get("text_digest") or drawn_by.get("text")
    return text, *(drawn_by.get(name) for name in ("context", "batch_size", "seed"))


def _first_on_batches(cells: Sequence[Cell]) -> dict[_Batches, Cell]:
    """The first that was measured of all cells on the same batches."""
    firsts: dict[_Batches, Cell] = {}
    for cell in cells:
        if cell.status == "ok":
            firsts.setdefault(_batches_of(cell), cell)
    return firsts


def _losses(cell: Cell, firsts: Mapping[_Batches, Cell], averaged: int) -> dict[str, float]:
    if cell.status != "ok":
        return {}
    baseline = firsts[_batches_of(cell)]
    losses = cell.samples["loss"].measured
    columns = {"steps": len(losses), "first_loss": losses[0], "last_loss": statistics.fmean(losses[-averaged:])}
    if cell is not baseline:
        off = [loss - other for loss, other in zip(losses, baseline.samples["loss"].measured, strict=False)]
        columns |= {"largest_difference": max(map(abs, off)), "mean_difference": statistics.fmean(off[-averaged:])}
    return columns


def plot_losses(cells: Sequence[Cell], path: Path) -> None:
    """The loss over the steps, a line for each way of training; below, how far each is from the first."""
    measured = [cell for cell in cells if cell.status == "ok"]
    settings = titles.shown_settings(measured, _SETTINGS)
    firsts = _first_on_batches(measured)
    figure, axes = new_axes(8, 6, 2, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    curves, differences = axes.flat
    for number, cell in enumerate(measured):
        losses = cell.samples["loss"].measured
        name = ", ".join(f"{column.header} {cell.configuration.get(key)}" for key, column in settings.items()) or "loss"
        # Drawn one over the other where they are equal: later ones thinner, so that all are seen.
        width = max(1.0, 3.0 - number)
        curves.plot(range(1, len(losses) + 1), losses, label=name, color=f"C{number}", linewidth=width)
        if cell is not firsts[_batches_of(cell)]:
            first = firsts[_batches_of(cell)].samples["loss"].measured
            off = [loss - other for loss, other in zip(losses, first, strict=False)]
            differences.plot(range(1, len(off) + 1), off, color=f"C{number}", linewidth=1)
    curves.set_ylabel("loss, nats a token")
    curves.legend()
    differences.set_ylabel("off the first\non its batches" if len(firsts) > 1 else "off the first")
    differences.set_xlabel("step")
    for drawing in axes.flat:
        drawing.grid(alpha=0.3)
        drawing.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


SAVED = SavedCommand(of_run(loss_tables), picture_of_measured("losses", plot_losses))
