"""``cs336sys precision``: what low precision does to sums, and which dtypes autocast chooses."""

from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated

from cs336sys.command_line.options.output import OutputOptions, SaveOption
from cs336sys.command_line.options.reading import choice
from cs336sys.command_line.options.training import DeviceOption
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell
from cs336sys.results.recording import command_line, record
from cs336sys.run.sweep import Sweep, unsaved

if TYPE_CHECKING:
    import torch

AUTOCAST_PRECISIONS = ("fp16", "bf16")


def precision(
    precision: Annotated[
        list[str], choice(AUTOCAST_PRECISIONS, f"What autocast casts to: {', '.join(AUTOCAST_PRECISIONS)}.")
    ] = ["fp16", "bf16"],
    device: DeviceOption = "auto",
    save: SaveOption = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Add 1000 times 0.01 in four ways, and show the dtype of each part of the handout's toy model under autocast.

    cs336sys precision --precision bf16 --device cpu
    """
    from cs336sys.commands.precision.tables import precision_tables

    output.check()
    output.check_selection("precision", precision_tables)

    from cs336sys.machine.device import choose_device
    from cs336sys.machine.environment import new_run

    torch_device = choose_device(device)
    file = ResultsFile(save) if save is not None else None
    run = new_run(command_line())
    cells = _precision_cells(precision, torch_device, run.run_id)
    record(run, *cells)
    if file is not None:
        file.append(run)
        for cell in cells:
            file.append(cell)
        file.close()
    Sweep(tuple(cells), run, runs={run.run_id: run}, faults=tuple(unsaved(file))).report(precision_tables, output)


def _precision_cells(precisions: list[str], device: "torch.device", run_id: str) -> list[Cell]:
    from cs336sys.commands.precision.measure import LOSSES, accumulate, autocast_dtypes

    where = {"device": device.type}
    cells = []
    for sum in accumulate(device):
        errors = {"absolute_error": sum.absolute_error, "relative_error_percent": 100 * sum.relative_error}
        configuration = {"accumulation": sum.name} | where
        cells.append(Cell("precision", configuration, "ok", derived={"sum": sum.total} | errors, run_id=run_id))
    for precision, loss in product(precisions, LOSSES):
        columns = asdict(autocast_dtypes(precision, loss, device))
        configuration = {name: columns.pop(name) for name in ("precision", "loss_function")} | where
        status, reason = columns.pop("status"), columns.pop("reason")
        cells.append(Cell("precision", configuration, status, derived=columns, reason=reason, run_id=run_id))
    return cells
