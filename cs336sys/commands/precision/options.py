"""``cs336sys precision``: what low precision does to sums, and which dtypes autocast chooses."""

from typing import Annotated

from cs336sys.command_line.options.output import OutputOptions, SaveOption
from cs336sys.command_line.options.reading import choice
from cs336sys.command_line.options.training import DeviceOption
from cs336sys.results.file import ResultsFile
from cs336sys.results.recording import command_line, record
from cs336sys.run.sweep import Sweep, unsaved

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

    from cs336sys.commands.precision.measure import precision_cells
    from cs336sys.machine.device import choose_device
    from cs336sys.machine.environment import new_run

    torch_device = choose_device(device)
    file = ResultsFile(save) if save is not None else None  # Refused before anything is measured.
    run = new_run(command_line())
    cells = precision_cells(precision, torch_device, run.run_id)
    record(run, *cells)  # For a caller in Python.
    if file is not None:
        file.append(run)
        for cell in cells:
            file.append(cell)
        file.close()
    Sweep(tuple(cells), run, runs={run.run_id: run}, faults=tuple(unsaved(file))).report(precision_tables, output)
