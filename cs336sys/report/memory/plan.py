"""The tables of ``memprof --plan``: what each change would save, and the cheapest that fit."""

from collections.abc import Sequence
from typing import Any

from cs336sys.report.memory.tables import identity_columns
from cs336sys.report.memory.verdict import size_words
from cs336sys.report.table import Column, Table, with_rows
from cs336sys.report.titles import reasons
from cs336sys.results.model import Cell

_OFFLOAD = (
    "Not predicted: offloading optimizer state or activations to the CPU (torch.distributed.fsdp.CPUOffloadPolicy)"
)


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """The answer first, then the plan step by step, and each change by itself."""
    identity = identity_columns(cells)
    planned = [cell for cell in cells if cell.status == "ok"]
    answers = [cell.configuration | {"status": None if cell.status == "ok" else cell.status} for cell in cells]
    for row, cell in zip(answers, cells, strict=True):
        if cell.status == "ok":
            row["answer"] = _answer(cell.derived)
            row["command"] = cell.derived.get("command")
    columns = (*identity, Column("answer", "answer"), Column("command", "command"), Column("status", "status"))
    notes = [*_notes(planned), *reasons(cells)]
    answer = Table("answer", "what would fit", columns, answers, notes=notes)
    return [answer, *with_rows(_steps(planned, identity), _changes(planned, identity))]


def _answer(derived: dict[str, Any]) -> str:
    limit, base, plan = (derived[key] for key in ("limit_bytes", "base_bytes", "plan"))
    if plan is None:
        return (
            f"Nothing that is known fits into {size_words(limit)}: the step holds {size_words(base)}, and the least "
            f"of {derived['tried']} combinations {size_words(derived['least_bytes'])}."
        )
    if not plan:
        return f"It fits as it is: {size_words(base)} of {size_words(limit)}."
    names = " ".join(step["option"] for step in plan)
    return (
        f"{names}: {size_words(plan[-1]['peak_bytes'])} in place of {size_words(base)}, under {size_words(limit)}; "
        "without the last of them it does not fit."
    )


def _notes(cells: Sequence[Cell]) -> list[str]:
    by = "formulas" if all(cell.derived["by_formula"] for cell in cells) else "traces of fake tensors"
    notes = [
        f"Predicted by {by}: tensors alone. On a GPU leave some 2 GiB for the CUDA context, workspaces and rounding.",
        "The cheapest plan: the same numbers before recomputation, that before other rounding, more GPUs last.",
        f"{_OFFLOAD}.",
    ]
    if any("model" in cell.configuration for cell in cells):
        notes.append("Not predicted for a model of yours: fsdp (shard --model measures it).")
    return notes


def _steps(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    columns = (
        *identity,
        Column("option", "change"),
        Column("peak_bytes", "then holds", "bytes"),
        Column("cost", "cost"),
        Column("pytorch", "in PyTorch"),
    )
    rows = [_row(cell, step) for cell in cells for step in cell.derived["plan"] or ()]
    return Table("steps", "the plan, one change after another", columns, rows)


def _changes(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    columns = (
        *identity,
        Column("option", "change"),
        Column("saved_bytes", "saves", "bytes"),
        Column("peak_bytes", "then holds", "bytes"),
        Column("cost", "cost"),
    )
    rows = [_row(cell, change) for cell in cells for change in cell.derived["changes"]]
    return Table("changes", "what each change alone would save", columns, rows)


def _row(cell: Cell, values: dict[str, Any]) -> dict[str, Any]:
    """A row with the cell's settings and a change, whose own setting is told by its option."""
    return cell.configuration | {
        key: values.get(key) for key in ("option", "peak_bytes", "saved_bytes", "cost", "pytorch")
    }
