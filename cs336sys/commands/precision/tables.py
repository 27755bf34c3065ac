"""The tables of ``precision``, built from its cells; columns are described in ``docs/columns.md``."""

from collections.abc import Sequence

from cs336sys.results.model import Cell, Run
from cs336sys.tables.saved import SavedCommand, of_run
from cs336sys.tables.table import Table, named_columns

_ACCUMULATION_NOTES = (
    "fp16 += fp16: with 10 mantissa bits the fp16 numbers from 8 to 16 are 2^-7 = 0.0078 apart, so adding 0.01 there "
    "adds 0.0078; a sum rounded like this at every step drifts.",
    "fp32 += fp16: 0.01 is no binary fraction, and the nearest fp16 number is 0.01000214. The fp32 sum keeps that "
    "error, 0.02 %, and adds almost none of its own; casting the terms up first changes nothing: += does it anyway.",
)

_AUTOCAST_NOTES = (
    "Parameters and gradients stay fp32: autocast casts copies of what goes into matrix products, and their outputs "
    "are low precision. Which operations it keeps in fp32 differs by device and torch version.",
    "Layer norm averages and squares many numbers: in fp16 the square of 256 overflows and small terms vanish, so "
    "autocast runs it in fp32 on CUDA. bf16 has the range of fp32, so nothing overflows, but with 7 mantissa bits its "
    "sums are coarser still: the statistics need fp32 all the same, and the kernels of torch compute them in fp32 "
    "inside, whatever dtype goes in and out.",
    "Loss: inside autocast both losses run in fp32. After the context is left, cross-entropy takes the dtype of the "
    "logits, and MSE that of its fp32 targets: answers that disagree have computed it in different places.",
)

_AUTOCAST_COLUMNS = (
    *named_columns(precision="autocast", loss_function="loss function", parameters="parameters", fc1="fc1 output"),
    *named_columns(layer_norm="layer norm output", rms_norm="RMSNorm in its place", logits="logits", loss="loss"),
    *named_columns(loss_outside="loss outside autocast", gradients="gradients", status="status", reason="reason"),
)


def precision_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the table of sums in each choice of dtypes, and that of the dtypes of the toy model under autocast."""
    sums = [cell.configuration | cell.derived for cell in cells if "accumulation" in cell.configuration]
    steps = [cell for cell in cells if "loss_function" in cell.configuration]
    dtypes = [cell.configuration | cell.derived | {"status": cell.status, "reason": cell.reason} for cell in steps]
    columns = named_columns("accumulation", "sum", "absolute_error", "relative_error_percent")
    return [
        Table("accumulation", "1000 times 0.01, which is 10", columns, sums, _ACCUMULATION_NOTES),
        Table("autocast", _autocast_title(steps, run), _AUTOCAST_COLUMNS, dtypes, _AUTOCAST_NOTES),
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
