"""The tables of ``account``: derived values with their derivations; ``docs/account.md`` describes the columns."""

from collections.abc import Sequence

from cs336sys.accounting.derivation import Derived
from cs336sys.report.numbers import Value, format_operand, in_shown_unit
from cs336sys.report.tables import Column, Table

_COLUMNS = (
    Column("question", "question"),
    Column("quantity", "quantity"),
    Column("value", "value", "value", exact="exact", kind="kind"),
    Column("unit", "unit"),
    Column("derivation", "derivation"),
    Column("reason", "because"),
    Column("source", "source"),
)

# Units that count the same.
_KINDS = {"decimal_bytes": "bytes"}


def answers_table(name: str, title: str, answers: Sequence[Derived], notes: Sequence[str] = ()) -> Table:
    """One row for each derived value; ``notes`` say what is assumed."""
    rows: list[dict[str, Value]] = []
    for answer in answers:
        value, unit = in_shown_unit(answer.value, answer.unit)
        row: dict[str, Value] = {"quantity": answer.quantity, "value": value, "unit": unit, "source": answer.source}
        row |= {"exact": answer.value, "kind": _KINDS.get(answer.unit, answer.unit)}
        row |= {"question": answer.question or None, "reason": answer.reason or None}
        rows.append(row | {"derivation": answer.derivation(format_operand)})
    return Table(name, title, _COLUMNS, rows, notes)
