"""The tables of ``verify``, built from its cells; columns are described in ``docs/columns.md``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cs336sys.results.model import Cell, Run
from cs336sys.settings.verification import CASES, VerifiedWorkload
from cs336sys.tables.saved import SavedCommand, of_run
from cs336sys.tables.table import Column, Table, by_key, named_columns
from cs336sys.tables.titles import SETTING_COLUMNS, found_in_user_code, setting_columns, shown_settings, title

_SETTINGS = by_key(
    *named_columns("wrap", world_size="ranks", mesh="mesh", gradients="gradients", finish="finished by"),
    *(SETTING_COLUMNS[name] for name in ("model", "loss", "batch", "context", "batch_size", "seed")),
    Column("size", "size"),
)

_DEFAULTS = {"mesh": "data", "gradients": "mean", "seed": 0}  # Values that everybody assumes.

_CASE_COLUMNS = (
    *named_columns("case", "verdict", relative_difference="off, relative", farthest="what is farthest off"),
    *named_columns(not_compared="not compared", reason="why"),
)

_DIAGNOSIS_COLUMNS = (
    *named_columns("case", "cause", at_step="step", farthest="first off", relative_difference="off, relative"),
    *named_columns(allowed_difference="by rounding", ratio="ratio", collective="collective", line="line"),
    *named_columns(meaning="what it means"),
)


def verify_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build the table of cases, and that of what is wrong with what it means."""
    settings = {  # Those that a cell has, with another value than everybody assumes.
        name: column
        for name, column in _SETTINGS.items()
        if any(cell.configuration.get(name) not in (None, _DEFAULTS.get(name)) for cell in cells)
    }
    shown = shown_settings(cells, settings)
    rows = []
    for cell in cells:
        # The other table says more about a fault.
        reason = None if cell.status == "wrong" and "meaning" in cell.derived else cell.reason
        verdict = cell.status if cell.status in ("ok", "wrong") else str(cell.derived.get("verdict", cell.status))
        rows.append(cell.configuration | cell.derived | {"verdict": verdict, "reason": reason})
    wrong_rows = [row for row, cell in zip(rows, cells, strict=True) if cell.status == "wrong"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row["verdict"] for row in rows).items())
    dtypes = {cell.derived["reference_dtype"] for cell in cells if "reference_dtype" in cell.derived}
    notes = list(found_in_user_code(cells))
    if dtypes:  # Else nothing was compared with one process.
        compared = "losses, gradients, norms, weights, optimizer state"
        notes.insert(0, f"compared with one process in {', '.join(sorted(dtypes))}: {compared}")
    wrong_cases = dict.fromkeys(cell.configuration["case"] for cell in cells if cell.status == "wrong")
    meanings = [f"{case}: {CASES[case].meaning}" for case in wrong_cases if case in CASES]  # Saved cells may be older.
    heading = title("verify", cells, run, settings, shown, counts)
    tables = (
        Table("verify", heading, (*shown.values(), *_CASE_COLUMNS), rows, notes),
        Table("diagnosis", "What is wrong", (*shown.values(), *_DIAGNOSIS_COLUMNS), wrong_rows, meanings),
    )
    return [replace(table, settings=setting_columns(VerifiedWorkload.settings())) for table in tables]


SAVED = SavedCommand(of_run(verify_tables))
