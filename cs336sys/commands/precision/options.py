"""``cs336sys precision``: what low precision does to sums, and which dtypes autocast chooses."""

from collections.abc import Sequence
from typing import Annotated

from cs336sys.command_line.options.output import OutputOptions, SaveOption
from cs336sys.command_line.options.reading import choice
from cs336sys.command_line.options.training import DeviceOption
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run
from cs336sys.results.recording import command_line, record
from cs336sys.run.sweep import Sweep
from cs336sys.tables.saved import SavedCommand, of_run
from cs336sys.tables.table import Table, named_columns, sentences


def precision_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the table of sums in each choice of dtypes, and that of the dtypes of the toy model under autocast."""
    sums = [cell.configuration | cell.derived for cell in cells if "accumulation" in cell.configuration]
    steps = [cell for cell in cells if "loss_function" in cell.configuration]
    dtypes = [cell.configuration | cell.derived | {"status": cell.status, "reason": cell.reason} for cell in steps]
    columns = named_columns("accumulation", "sum", "absolute_error", "relative_error_percent")
    autocast_columns = (
        *named_columns(precision="autocast", loss_function="loss function", parameters="parameters", fc1="fc1 output"),
        *named_columns(layer_norm="layer norm output", rms_norm="RMSNorm in its place", logits="logits", loss="loss"),
        *named_columns(loss_outside="loss outside autocast", gradients="gradients", status="status", reason="reason"),
    )
    parts = ["Dtypes of the toy model's parts under autocast"]
    if steps:
        device = steps[0].configuration["device"]
        parts.append(f"on {device}")
        if run is not None:
            parts.append(f"({run.machine['gpu' if device == 'cuda' else 'cpu']}) with torch {run.machine['torch']}")
    return [
        Table("accumulation", "1000 times 0.01, which is 10", columns, sums, sentences(__name__, "accumulation")),
        Table("autocast", " ".join(parts), autocast_columns, dtypes, sentences(__name__, "autocast")),
    ]


def precision(
    precision: Annotated[list[str], choice(("fp16", "bf16"), "What autocast casts to: fp16, bf16.")] = ["fp16", "bf16"],
    device: DeviceOption = "auto",
    save: SaveOption = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Add 1000 times 0.01 in four ways, and show the dtype of each part of the handout's toy model under autocast.

    cs336sys precision --precision bf16 --device cpu
    """
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
    faults = () if file is None or file.fault is None else (file.fault,)
    Sweep(tuple(cells), run, runs={run.run_id: run}, faults=faults).report(precision_tables, output)


SAVED = SavedCommand(of_run(precision_tables))
