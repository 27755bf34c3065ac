"""Derived values as a table; ``docs/account.md`` describes the columns."""

from collections.abc import Sequence

from cs336sys.accounting.derivation import Derived
from cs336sys.tables.numbers import Value, format_operand, in_shown_unit
from cs336sys.tables.table import Column, Table, fill_row

_COLUMNS = (
    Column("question", "question", value=lambda answer: answer.question or None),
    Column("quantity", "quantity", value=lambda answer: answer.quantity),
    Column("value", "value", "value", exact="exact", kind="kind"),
    Column("unit", "unit"),
    Column("derivation", "derivation", value=lambda answer: answer.derivation(format_operand)),
    Column("reason", "because", value=lambda answer: answer.reason or None),
    Column("source", "source", value=lambda answer: answer.source),
)

# Units that count the same.
_KINDS = {"decimal_bytes": "bytes"}


def answers_table(name: str, title: str, answers: Sequence[Derived], notes: Sequence[str] = ()) -> Table:
    """Build a table with a row for each derived value; ``notes`` say what is assumed."""
    rows: list[dict[str, Value]] = []
    for answer in answers:
        value, unit = in_shown_unit(answer.value, answer.unit)
        kind = _KINDS.get(answer.unit, answer.unit)
        rows.append(fill_row(_COLUMNS, answer) | {"value": value, "unit": unit, "exact": answer.value, "kind": kind})
    return Table(name, title, _COLUMNS, rows, notes)
