"""The tables of ``precision``, built from its cells; columns are described in ``docs/columns.md``."""

from collections.abc import Sequence

from cs336sys.results.model import Cell, Run
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
    return [
        Table("accumulation", "1000 times 0.01, which is 10", columns, sums, sentences(__name__, "accumulation")),
        Table("autocast", _autocast_title(steps, run), autocast_columns, dtypes, sentences(__name__, "autocast")),
    ]


def _autocast_title(cells: Sequence[Cell], run: Run | None) -> str:
    parts = ["Dtypes of the toy model's parts under autocast"]
    if cells:
        device = cells[0].configuration["device"]
        parts.append(f"on {device}")
        if run is not None:
            parts.append(f"({run.machine['gpu' if device == 'cuda' else 'cpu']}) with torch {run.machine['torch']}")
    return " ".join(parts)


SAVED = SavedCommand(of_run(precision_tables))
