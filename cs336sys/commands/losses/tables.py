"""The table and the picture of ``losses``, built from its cells; columns are described in ``docs/columns.md``."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336sys.results.model import Cell, Run
from cs336sys.settings.profiling import LossWorkload
from cs336sys.tables import titles
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.saved import SavedCommand, of_run, picture_of_measured
from cs336sys.tables.table import Column, Table, sentences

_SETTINGS = titles.columns_of(LossWorkload)
_ALWAYS_SHOWN = ("precision", "compile", "kernels", "optimizer")


def loss_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the table of losses and of their distance from the first cell that was trained on the same batches."""
    shown = titles.shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    counts = [len(cell.samples["loss"].measured) for cell in cells if cell.status == "ok"]
    averaged = min([20, *counts])  # A step's loss depends on its batch: means are of so many, or of all if fewer.
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
    rows = [cell.configuration | cell.derived | _losses(cell, firsts, averaged) for cell in cells]
    facts = {"has_other_batches": len(firsts) > 1, "differs_in_steps": differs_in_steps, "averaged": averaged}
    notes = sentences(__name__, "losses", **facts)
    notes += titles.found_in_user_code(cells) + titles.failure_notes(cells)
    return [Table("losses", titles.title("losses", cells, run, _SETTINGS, shown), columns, rows, notes=notes)]


def _batches_of(cell: Cell) -> tuple[object, ...]:
    """Return what decides which batches are drawn: the text's digest or files, context, batch size and seed."""
    settings = cell.configuration
    text = settings.get("text_digest") or settings.get("text")
    return text, *(settings.get(name) for name in ("context", "batch_size", "seed"))


def _first_on_batches(cells: Sequence[Cell]) -> dict[tuple[object, ...], Cell]:
    """Return the first measured cell on the same batches, by :func:`_batches_of`."""
    return {_batches_of(cell): cell for cell in reversed(cells) if cell.status == "ok"}  # The last entry stays.


def _losses_off(cell: Cell, first: Cell) -> list[float]:
    """Return how far a cell's losses are above those of the same steps of another."""
    pairs = zip(cell.samples["loss"].measured, first.samples["loss"].measured, strict=False)
    return [loss - first_loss for loss, first_loss in pairs]


def _losses(cell: Cell, firsts: Mapping[tuple[object, ...], Cell], averaged: int) -> dict[str, Any]:
    """Return a cell's status and, if it was measured, its columns of losses; ``averaged``: the last so many steps."""
    if cell.status != "ok":
        return {"status": cell.status}
    first, losses = firsts[_batches_of(cell)], cell.samples["loss"].measured
    row = {"status": "ok", "steps": len(losses), "first_loss": losses[0]}
    row["last_loss"] = statistics.fmean(losses[-averaged:])
    if cell is not first:
        off = _losses_off(cell, first)
        row |= {"largest_difference": max(map(abs, off)), "mean_difference": statistics.fmean(off[-averaged:])}
    return row


def plot_losses(cells: Sequence[Cell], path: Path) -> None:
    """Draw the loss over the steps, a line for each way of training; below, how far each is from the first."""
    measured = [cell for cell in cells if cell.status == "ok"]
    settings = titles.shown_settings(measured, _SETTINGS)
    firsts = _first_on_batches(measured)
    figure, axes = new_axes(8, 6, 2, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    curves, differences = axes.flat
    for number, cell in enumerate(measured):
        losses = cell.samples["loss"].measured
        name = ", ".join(f"{column.header} {cell.configuration.get(key)}" for key, column in settings.items()) or "loss"
        width = max(1.0, 3.0 - number)  # Later lines are thinner, so that all are seen where they are equal.
        curves.plot(range(1, len(losses) + 1), losses, label=name, color=f"C{number}", linewidth=width)
        first = firsts[_batches_of(cell)]
        if cell is not first:
            off = _losses_off(cell, first)
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
