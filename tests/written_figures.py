"""Figures that are written down: expressions in a text file, and below each, indented, what it gives.

The tests of a room evaluate them with the names of their own module. ``PYTHONPATH=tests python
tests/ROOM/test_ROOM_figures.py`` writes the values of today, whatever they are: read the difference before you commit
it. Numbers have nine digits, so that they are the same on every machine. A module ends in ``figures_test``.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336sys.accounting.derivation import Derived
from cs336sys.errors import UsageError

_ROW_CHARACTERS = 116
_INDENT = "    "


def outcome(function, *arguments, **settings):
    """Return the sentence of a refusal, or what the function returns."""
    try:
        return function(*arguments, **settings)
    except UsageError as error:
        return str(error)


def text_of(value: Any) -> str:
    """Write a value with nine digits, and records without the names of their fields."""
    if isinstance(value, Derived):
        numbers = value.derivation(lambda number: f"{number:.9g}")
        return f"{value.quantity}: {numbers} -> {text_of(value.value)} {value.unit} {value.question}".rstrip()
    if is_dataclass(value):
        return text_of(tuple(getattr(value, field.name) for field in fields(value)))
    if isinstance(value, np.ndarray):
        return text_of(value.tolist())
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    return f"{value:.9g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def rows_of(expression: str, names: dict[str, Any]) -> list[str]:
    """Return what is written below an expression: items of a list or of a mapping, as many in a row as fit."""
    value = eval(expression, names)
    items = [text_of(item) for item in value] if isinstance(value, list) else [text_of(value)]
    if isinstance(value, Mapping):
        items = [f"{key}: {text_of(item)}" for key, item in value.items()]
    rows = [""]
    for item in items:
        if rows[-1] and len(rows[-1]) + len(item) + 2 > _ROW_CHARACTERS:
            rows.append("")
        rows[-1] += f"; {item}" if rows[-1] else item
    return [row.replace("\n", "\\n") for row in rows]


def read_figures(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Return each expression with its rows."""
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        starts = [number for number, line in enumerate(lines) if not line.startswith(_INDENT)]
        for first, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield lines[first], [line.removeprefix(_INDENT) for line in lines[first + 1 : end]]


def write_figures(path: Path, names: dict[str, Any]) -> None:
    """Write the values of today, and say to stderr which expressions fail."""
    lines = []
    for line in path.read_text().splitlines():
        if line.startswith(_INDENT):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            try:
                lines += [_INDENT + row for row in rows_of(line, names)]
            except Exception as error:
                print(f"{line}\n{_INDENT}{type(error).__name__}: {error}", file=sys.stderr)
    path.write_text("\n".join(lines) + "\n")


def figures_test(names: dict[str, Any]) -> Callable[[str, list[str]], None]:
    """Return the test of the file next to a module with these names; run as a program, the module writes it."""
    path = Path(names["__file__"]).with_name("figures.txt")
    if names["__name__"] == "__main__":
        write_figures(path, names)

    @pytest.mark.parametrize(("expression", "rows"), list(read_figures(path)), ids=lambda value: str(value)[:60])
    def test_figures(expression: str, rows: list[str]) -> None:
        assert rows_of(expression, names) == rows

    return test_figures
