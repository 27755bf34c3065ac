"""The answers that ``AGENTS.md`` promises: for each question the tables of its command, and their fields."""

import json
import re
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "AGENTS.md"
_ROW = re.compile(r"^\| (.+\?) \| `cs336sys (.+)` \| (.+) \|$", re.M)
COMMANDS = {question: command for question, command, _ in _ROW.findall(_PAGE.read_text(encoding="utf-8"))}
FIELDS = {
    question: {
        table.strip("`"): re.findall(r"`(\w+)`", names)
        for table, names in (answer.split(": ") for answer in answers.split("; "))
    }
    for question, _, answers in _ROW.findall(_PAGE.read_text(encoding="utf-8"))
}


def missing_fields(question: str, printed: str) -> list[str]:
    """The fields of a question's answer that what ``--format json`` printed lacks; of samples there are medians."""
    rows = {table["name"]: table["rows"] for table in json.loads(printed)["tables"]}
    return [
        f"{table}: {field}"
        for table, fields in FIELDS[question].items()
        for field in fields
        if not any({field, f"{field}_median"} & row.keys() for row in rows.get(table, ()))
    ]
