"""Tables as text for people (terminal, Markdown, LaTeX, Typst) and for programs (csv, json), from the same rows."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336sys.errors import OutputError, UsageError, require_known
from cs336sys.results.foreign import printable
from cs336sys.results.model import TABLES_SCHEMA_VERSION, Samples
from cs336sys.results.recording import current_recording
from cs336sys.results.statistics import Interval
from cs336sys.tables import outputs
from cs336sys.tables.numbers import Value
from cs336sys.tables.table import Grid, Table, grid_of, one_line, package_templates

# What --output calls standard output, as everywhere.
STDOUT = Path("-")


def render(tables: Sequence[Table], format: str) -> str:
    """Return all tables as one text that ends with a newline, or raise a UsageError for an unknown format.

    ``table``, ``markdown``, ``latex`` (booktabs) and ``typst`` are for people: samples are mean ± std, columns without
    a value in any row are left out, nothing is cut to a width. ``json`` (all tables) and ``csv`` (those with the name
    of the first, after a column ``table``) are for programs: all settings, the machine, and a column for each
    statistic, not rounded (docs/columns.md). NaN and infinity are null in JSON, which has no more for them.
    """
    require_known("format", format, outputs.FORMATS)
    if format in _FOR_PROGRAMS:
        return _FOR_PROGRAMS[format](tables)
    return "\n\n".join(filter(None, map(_FOR_PEOPLE[format], tables))) + "\n"


def emit(tables: Sequence[Table], *, format: str | None = None, output: Path | None = None, wide: bool = False) -> None:
    """Write the tables to the file ``output``, or else (None, ``-``) to stdout; record them for a Python caller.

    Without a format a file gets that of its name's ending or Markdown, a folder a csv file for each name of tables, a
    terminal ``table`` drawn by rich, other stdout Markdown. With ``wide`` stdout gets ``table`` as files have it.

    Raise a UsageError for an unknown format, an OutputError where ``output`` (stdout gets its tables) or stdout fails.
    """
    recording = current_recording()
    if recording is not None:
        recording.tables += tables
    if output is None or output == STDOUT:
        if recording is None:
            _print(tables, format, wide)
        return
    format = format or outputs.FORMAT_OF_ENDING.get(output.suffix.lower(), "csv" if output.is_dir() else "markdown")
    try:
        if output.is_dir():
            # Markdown has two: the first, .md, is the usual one.
            ending = next(ending for ending, name in outputs.FORMAT_OF_ENDING.items() if name == format)
            for name in dict.fromkeys(table.name for table in tables):
                text = render([table for table in tables if table.name == name], format)
                outputs.write_file(output / f"{name.replace(' ', '_')}{ending}", text.encode(), "--output")
        else:
            outputs.write_file(output, render(tables, format).encode(), "--output")
    except OutputError:
        if recording is None:
            _print(tables, format, wide)
        raise


def _print(tables: Sequence[Table], format: str | None, wide: bool) -> None:
    """Write the tables to standard output: drawn to a terminal's width unless ``wide`` or another format is chosen."""
    if sys.stdout is None:
        raise OutputError("cannot write the result: standard output is closed; give a file with --output")
    with outputs.writing_stdout():
        if format in (None, "table") and sys.stdout.isatty() and not wide:
            from rich.console import Console

            from cs336sys.tables.terminal import print_tables

            print_tables(tables, Console())
            return
        sys.stdout.write(render(tables, format or ("table" if wide else "markdown")))


# Files with these names are not for tables, which would be written to them as Markdown.
_NO_TABLES = (".pdf", ".png", ".svg", ".html", ".docx", ".xlsx", ".jsonl", ".gz")


def check_output(output: Path | None, format: str | None = None) -> None:
    """Raise a UsageError, before anything is measured, for an unknown format or a file that cannot be written."""
    if format is not None:
        require_known("format", format, outputs.FORMATS)
    elif output is not None and not output.is_dir() and output.suffix.lower() in _NO_TABLES:
        raise UsageError(
            f"--output {output}: holds tables, whose names end in {', '.join(outputs.FORMAT_OF_ENDING)}; give one of "
            "these, or --format (pictures are asked for by --plot)"
        )
    if output is not None and output != STDOUT:
        outputs.require_folder(output, "--output")
        outputs.check_writable(output / "tables.csv" if output.is_dir() else output, "--output")


def _tabulate(grid: Grid, style: str) -> str:
    from tabulate import tabulate

    # disable_numparse: the numbers are formatted already, and 1,024 must not become 1024.
    alignment = grid.alignment if grid.rows else None  # tabulate 0.9 aligns no columns without rows.
    return tabulate(grid.rows, grid.headers, tablefmt=style, disable_numparse=True, colalign=alignment)


def _plain_text(table: Table) -> str:
    grid = _tabulate(grid_of(table), "rounded_outline")
    return "\n".join([one_line(table.title), grid, *map(one_line, table.all_notes)])


def _markdown(table: Table) -> str:
    grid = _tabulate(grid_of(table).map(escape_markdown), "pipe")
    notes = "\n".join(f"- {escape_markdown(one_line(note))}" for note in table.all_notes)
    return "\n\n".join(filter(None, [f"### {escape_markdown(one_line(table.title))}", grid, notes]))


def escape_markdown(text: str) -> str:
    """Return the text without Markdown: no image, link, HTML, code or emphasis."""
    # An underscore inside a word (forward_ms) is plain text already.
    return re.sub(r"[\\|<*`\[\]]|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def _latex(table: Table) -> str:
    grid = grid_of(table)
    # tabulate escapes the cells itself, and forgets the columns of a table without rows.
    body = _tabulate(grid, "latex_booktabs").replace("{tabular}{}", f"{{tabular}}{{{'l' * len(grid.headers)}}}")
    # LaTeX would take a [ or * at a row's start for the option of the \\ before it.
    body = re.sub(r"(?m)^ *([\[*])", r" {\1}", body)
    notes = [rf"\par\footnotesize {escape_latex(one_line(note))}" for note in table.all_notes]
    caption = rf"\caption{{{escape_latex(one_line(table.title))}}}"
    lines = [r"\begin{table}", r"\centering", caption, body, *notes, r"\end{table}"]
    return "\n".join(lines).replace("±", r"$\pm$")


def escape_latex(text: str) -> str:
    """Return the text without LaTeX's commands."""
    from tabulate import LATEX_ESCAPE_RULES

    return "".join(LATEX_ESCAPE_RULES.get(character, character) for character in text).replace("±", r"$\pm$")


def _typst(table: Table) -> str:
    caption, *notes = (typst_string(one_line(text)) for text in (table.title, *table.all_notes))
    facts = {"grid": grid_of(table).map(typst_string), "caption": caption, "notes": notes}
    return package_templates().get_template("tables/typst.jinja").render(facts)


def typst_string(text: str) -> str:
    """Return a string literal, which Typst takes as content, so that markup needs no escapes."""
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


_STATISTICS = ("mean", "std", "median")


def flat_rows(table: Table) -> tuple[list[str], list[dict[str, Value]]]:
    """Return keys and rows for programs: a column of samples or intervals becomes one for each of their statistics."""
    keys: list[str] = []
    rows: list[dict[str, Value]] = [{} for _ in table.rows]
    flat: list[list[Any]]  # for each row the values of the columns that one column becomes
    for column in table.all_columns:
        values = [row.get(column.key) for row in table.rows]
        # By declaration, so that a file has the same columns where no row has a value, or by what the rows have.
        if column.spread == "interval" or any(isinstance(value, Interval) for value in values):
            names = [column.key, f"{column.key}_low", f"{column.key}_high"]
            flat = [
                [value.estimate, value.low, value.high] if isinstance(value, Interval) else [value, None, None]
                for value in values
            ]
        elif column.spread == "samples" or any(isinstance(value, Samples) for value in values):
            names = [f"{column.key}_{statistic}" for statistic in _STATISTICS]
            flat = [[_statistic_of(value, statistic) for statistic in _STATISTICS] for value in values]
        else:
            names, flat = [column.key], [[value] for value in values]
        keys += names
        for row, cells in zip(rows, flat, strict=True):
            row |= dict(zip(names, cells, strict=True))
    return keys, rows


def _statistic_of(value: Value, statistic: str) -> Value:
    if isinstance(value, Samples):
        return getattr(value, statistic) if value.measured else None
    return value if statistic == "mean" else None


def _csv(tables: Sequence[Table]) -> str:
    # Rows of other tables have other columns: the output options' note says how to get them.
    flat = [(table.name, *flat_rows(table)) for table in tables if table.name == tables[0].name]
    keys = list(dict.fromkeys(key for _, table_keys, _ in flat for key in table_keys))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_csv_word, ["table", *keys]))
    for name, _, rows in flat:
        writer.writerows(map(_csv_word, [name, *(row.get(key) for key in keys)]) for row in rows)
    return stream.getvalue()


def _csv_word(value: Any) -> str | float | None:
    """Return a cell; text that a spreadsheet would compute, as ``=HYPERLINK(...)``, begins with an apostrophe."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _json(tables: Sequence[Table]) -> str:
    documents: list[dict[str, Any]] = []
    for table in tables:
        _, rows = flat_rows(table)
        for row in rows:  # JSON has neither NaN nor infinity.
            row |= {key: None for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        documents.append({"name": table.name, "title": table.title, "rows": rows, "notes": table.all_notes})
    return json.dumps({"schema_version": TABLES_SCHEMA_VERSION, "tables": documents}, indent=2, allow_nan=False) + "\n"


# For people each table by itself, for programs all together.
_FOR_PEOPLE: dict[str, Callable[[Table], str]] = {
    "table": _plain_text, "markdown": _markdown, "latex": _latex, "typst": _typst,
}  # fmt: skip
_FOR_PROGRAMS: dict[str, Callable[[Sequence[Table]], str]] = {"csv": _csv, "json": _json}
