"""Tables as text for people (terminal, Markdown, LaTeX, Typst) and for programs (csv, json), from the same rows."""

import contextlib
import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from cs336sys.errors import OutputError, UsageError, require_known
from cs336sys.report.numbers import Value
from cs336sys.report.outputs import (
    FORMAT_OF_ENDING,
    FORMATS,
    check_writable,
    require_folder,
    write_file,
    writing_stdout,
)
from cs336sys.report.table import Grid, Table, grid_of, one_line
from cs336sys.results.foreign import printable
from cs336sys.results.model import Samples
from cs336sys.results.schema import TABLES_SCHEMA_VERSION
from cs336sys.results.statistics import Interval

# What --output calls standard output, as everywhere.
STDOUT = Path("-")


def render(tables: Sequence[Table], format: str) -> str:
    """All tables as one text that ends with a newline.

    - ``table``, ``markdown``, ``latex`` (booktabs), ``typst``: for people. Samples are mean ± std, columns without a
      value in any row are left out, titles and notes are shown, and nothing is cut to a width.
    - ``json``: ``{"schema_version": 1, "tables": [{"name", "title", "rows", "notes"}]}``. A column that holds samples,
      ``forward_ms``, becomes ``forward_ms_mean``, ``forward_ms_std`` and ``forward_ms_median`` in every row; a plain
      number among them stands under ``_mean``. A column of intervals keeps its estimate under its own name, next to
      ``_low`` and ``_high``. NaN and infinity are null, which is all that JSON has for them.
    - ``csv``: likewise with mean and std, without notes. The first column names the table, and a second has the titles
      where those of one name differ; tables are separated by an empty line, each under its own header.

    Numbers for programs are not rounded.

    Raises:
        UsageError: the format is unknown.
    """
    require_known("format", format, FORMATS)
    return _RENDERERS[format](tables)


_collected: ContextVar[list[Table] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Table]]:
    """Collect the tables that :func:`emit` would print, for callers that want data; files are still written."""
    tables: list[Table] = []
    token = _collected.set(tables)
    try:
        yield tables
    finally:
        _collected.reset(token)


def emit(tables: Sequence[Table], *, format: str | None = None, output: Path | None = None, wide: bool = False) -> None:
    """Write the tables to the file ``output``, or else (None, ``-``) to stdout.

    Without a format a file gets that of its name's ending, a terminal ``table`` drawn by rich, and everything else
    ``markdown``. With ``wide`` stdout gets ``table`` as files have it, whatever a terminal's width.

    Raises:
        UsageError: the format is unknown.
        OutputError: ``output`` cannot be written, and stdout got the tables instead; or that cannot be written.
    """
    collected = _collected.get()
    if collected is not None:
        collected.extend(tables)
    if output is None or output == STDOUT:
        if collected is None:
            _print(tables, format, wide)
        return
    text = render(tables, format or FORMAT_OF_ENDING.get(output.suffix.lower(), "markdown"))
    try:
        write_file(output, text.encode(), "--output")
    except OutputError:
        if collected is None:
            _print(tables, format, wide)
        raise


def _print(tables: Sequence[Table], format: str | None, wide: bool) -> None:
    if sys.stdout is None:
        raise OutputError("cannot write the result: standard output is closed; give a file with --output")
    with writing_stdout():
        if format in (None, "table") and sys.stdout.isatty() and not wide:
            from rich.console import Console

            from cs336sys.report.terminal import print_tables

            print_tables(tables, Console())
            return
        sys.stdout.write(render(tables, format or ("table" if wide else "markdown")))


# Names of files that no table can be written as: it would have been Markdown.
_NO_TABLES = (".pdf", ".png", ".svg", ".html", ".docx", ".xlsx", ".jsonl", ".gz")


def check_output(output: Path | None, format: str | None = None) -> None:
    """Find out before anything is measured whether :func:`emit` will be able to write; a file there keeps its content.

    Raises:
        UsageError: the format is unknown, ``output`` cannot be written, or its name ends as a picture's or a page's.
    """
    if format is not None:
        require_known("format", format, FORMATS)
    elif output is not None and output.suffix.lower() in _NO_TABLES:
        raise UsageError(
            f"--output {output}: holds tables, whose names end in {', '.join(FORMAT_OF_ENDING)}; give one of these, or "
            "--format (pictures are asked for by --plot)"
        )
    if output is not None and output != STDOUT:
        require_folder(output, "--output")
        check_writable(output, "--output")


def _tabulate(grid: Grid, style: str) -> str:
    from tabulate import tabulate

    # disable_numparse: the numbers are formatted already, and 1,024 must not become 1024.
    alignment = grid.alignment if grid.rows else None
    return tabulate(grid.rows, grid.headers, tablefmt=style, disable_numparse=True, colalign=alignment)


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain_text(tables: Sequence[Table]) -> str:
    grids = [_tabulate(grid_of(table), "rounded_outline") for table in tables]
    return _join(
        [
            "\n".join([one_line(t.title), grid, *map(one_line, t.all_notes)])
            for t, grid in zip(tables, grids, strict=True)
        ]
    )


def _markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        grid = _tabulate(grid_of(table).map(escape_markdown), "pipe")
        notes = "\n".join(f"- {escape_markdown(one_line(note))}" for note in table.all_notes)
        parts += [f"### {escape_markdown(one_line(table.title))}", grid, notes]
    return _join(parts)


def escape_markdown(text: str) -> str:
    """The text without Markdown: no image, link, HTML, code or emphasis."""
    # An underscore inside a word (forward_ms) is plain text already.
    return re.sub(r"[\\|<*`\[\]]|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def _latex(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        grid = grid_of(table)
        # tabulate escapes the cells itself, and forgets the columns of a table without rows.
        body = _tabulate(grid, "latex_booktabs").replace("{tabular}{}", f"{{tabular}}{{{'l' * len(grid.headers)}}}")
        # LaTeX would take a [ or * at a row's start for the option of the \\ before it.
        body = re.sub(r"(?m)^ *([\[*])", r" {\1}", body)
        notes = [rf"\par\footnotesize {_escape_latex(one_line(note))}" for note in table.all_notes]
        caption = rf"\caption{{{_escape_latex(one_line(table.title))}}}"
        lines = [r"\begin{table}", r"\centering", caption, body, *notes, r"\end{table}"]
        parts.append("\n".join(lines).replace("±", r"$\pm$"))
    return _join(parts)


def _escape_latex(text: str) -> str:
    from tabulate import LATEX_ESCAPE_RULES

    return "".join(LATEX_ESCAPE_RULES.get(character, character) for character in text)


def _typst(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        grid = grid_of(table).map(typst_string)
        lines = [
            "#figure(",
            f"  caption: {typst_string(one_line(table.title))},",
            "  table(",
            f"    columns: {len(grid.headers)},",
            f"    align: ({', '.join(grid.alignment)},),",
            f"    table.header({', '.join(grid.headers)}),",
            *(f"    {', '.join(row)}," for row in grid.rows),
            "  ),",
            ")",
        ]
        parts += ["\n".join(lines), *(f"#{typst_string(one_line(note))}" for note in table.all_notes)]
    return _join(parts)


def typst_string(text: str) -> str:
    """A string literal is content too, and needs none of markup's escapes."""
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _flat_rows(
    table: Table, statistics: Sequence[str]
) -> tuple[list[str], list[list[str | bool | int | float | None]]]:
    """Keys and rows for programs: a column of samples or intervals becomes one column for each of their statistics."""
    keys: list[str] = []
    rows: list[list] = [[] for _ in table.rows]
    flat: list[list[Any]]
    for column in table.columns:
        values = [row.get(column.key) for row in table.rows]
        if any(isinstance(value, Interval) for value in values):
            keys += [column.key, f"{column.key}_low", f"{column.key}_high"]
            flat = [[v.estimate, v.low, v.high] if isinstance(v, Interval) else [v, None, None] for v in values]
        elif any(isinstance(value, Samples) for value in values):
            keys += [f"{column.key}_{statistic}" for statistic in statistics]
            flat = [[_statistic_of(value, statistic) for statistic in statistics] for value in values]
        else:
            keys.append(column.key)
            flat = [[value] for value in values]
        for row, cells in zip(rows, flat, strict=True):
            row += cells
    return keys, rows


def _statistic_of(value: Value, statistic: str) -> Value:
    if isinstance(value, Samples):
        return getattr(value, statistic) if value.measured else None
    return value if statistic == "mean" else None


def _csv(tables: Sequence[Table]) -> str:
    parts = []
    have_titles = len({(table.name, table.title) for table in tables}) > len({table.name for table in tables})
    for table in tables:
        keys, rows = _flat_rows(table, ("mean", "std"))
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(map(_csv_word, ["table", *(["title"] if have_titles else []), *keys]))
        for row in rows:
            writer.writerow(map(_csv_word, [table.name, *([table.title] if have_titles else []), *row]))
        parts.append(stream.getvalue())
    return "\n".join(parts)


def _csv_word(value: str | float | None) -> str | float | None:
    """A cell; text that a spreadsheet would compute, such as ``=HYPERLINK(...)``, begins with an apostrophe."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _json(tables: Sequence[Table]) -> str:
    documents = []
    for table in tables:
        keys, rows = _flat_rows(table, ("mean", "std", "median"))
        objects = [dict(zip(keys, map(_finite_or_none, row), strict=True)) for row in rows]
        documents.append({"name": table.name, "title": table.title, "rows": objects, "notes": table.all_notes})
    return json.dumps({"schema_version": TABLES_SCHEMA_VERSION, "tables": documents}, indent=2, allow_nan=False) + "\n"


def _finite_or_none(value: str | float | None) -> str | float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_RENDERERS: dict[str, Callable[[Sequence[Table]], str]] = {
    "table": _plain_text,
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
    "latex": _latex,
    "typst": _typst,
}
