"""Tables on a terminal, drawn by rich, so that every column and every digit is seen, however narrow it is."""

import sys
import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from cs336sys.tables.table import Grid, Table, grid_of, one_line

# Down to this width a text column is wrapped before anything else is done about a table too wide.
_NARROWEST_TEXT = 20


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Draw each table as wide as the terminal, with its title and notes.

    One too wide gets its headers stacked and its text columns wrapped; then what all rows have in common goes into the
    title; then it is turned, so that rows become columns; then it is split into tables of some of the columns each,
    with the keys in all of them. Where not even one column fits next to these, each row is a record.
    """
    for number, table in enumerate(tables):
        if number:
            console.print()
        title, drawings = _drawings(table, console)
        console.print(Text(title))
        for part, drawing in enumerate(drawings):
            if part:
                console.print()
            console.print(drawing)
        for note in table.all_notes:
            console.print(Text(one_line(note)))


def _drawings(table: Table, console: Console) -> tuple[str, list[RichTable]]:
    """Return the title, and the table in as many drawings as it takes."""
    grid = grid_of(table)
    whole = _fitting_table(grid, console)
    if whole is not None:
        return one_line(table.title), [whole]
    grid, common = _without_common(grid)
    title = ", ".join([one_line(table.title), *common])
    # Turned: rows as columns, each headed by its first value; the first column has the old headers. As numbers, so that
    # values are aligned to the right and not wrapped.
    (headers, *rows) = zip(grid.headers, *grid.rows, strict=True)
    turned = Grid(list(headers), list(map(list, rows)), is_number=[False] + [True] * len(grid.rows))
    fitting = _fitting_table(grid, console) or _fitting_table(turned, console)
    return title, [fitting] if fitting else list(_split(grid, console)) or [_records(grid)]


def _fitting_table(grid: Grid, console: Console) -> RichTable | None:
    """Draw the table in one piece, with stacked headers where it must be; None if it is too wide even then."""
    unlimited = console.options.update(width=sys.maxsize)  # Else its width would limit the minimum.
    for headers in (grid.headers, _stacked_headers(grid)):
        drawing = _drawing(headers, grid)
        if Measurement.get(console, unlimited, drawing).minimum <= console.width:
            return drawing
    return None


def _stacked_headers(grid: Grid) -> list[str]:
    stacked = []
    for index, header in enumerate(grid.headers):
        width = max((len(row[index]) for row in grid.rows), default=1)
        if not grid.is_number[index]:
            width = min(width, _NARROWEST_TEXT)
        stacked.append("\n".join(textwrap.wrap(header, width, break_long_words=False, break_on_hyphens=False)))
    return stacked


def _chosen_columns(grid: Grid, chosen: Sequence[int]) -> Grid:
    return Grid(
        headers=[grid.headers[index] for index in chosen],
        rows=[[row[index] for index in chosen] for row in grid.rows],
        is_number=[grid.is_number[index] for index in chosen],
        key_columns=sum(index < grid.key_columns for index in chosen),
    )


def _without_common(grid: Grid) -> tuple[Grid, list[str]]:
    """Return the table without keys and words (``status ok``) that are the same in all rows, and these as text."""
    common = []
    for index, is_number in enumerate(grid.is_number):
        # In a single row every value is the same: its results stay, in words, too.
        may_leave = index < grid.key_columns or (not is_number and len(grid.rows) > 1)
        if may_leave and len({row[index] for row in grid.rows}) == 1:
            common.append(index)
    chosen = [index for index in range(len(grid.headers)) if index not in common]
    if not chosen:
        return grid, []
    return _chosen_columns(grid, chosen), [f"{grid.headers[index]} {grid.rows[0][index]}" for index in common]


def _split(grid: Grid, console: Console) -> Iterator[RichTable]:
    """Yield tables of the keys and as many other columns as fit; nothing where not even one fits."""
    keys, others = list(range(grid.key_columns)), list(range(grid.key_columns, len(grid.headers)))
    while others:
        fitting: list[RichTable] = []
        for count in range(1, len(others) + 1):
            wider = _fitting_table(_chosen_columns(grid, keys + others[:count]), console)
            if wider is None:
                break
            fitting.append(wider)
        if not fitting:
            return
        yield fitting[-1]
        others = others[len(fitting) :]


def _drawing(headers: Sequence[str], grid: Grid) -> RichTable:
    """Draw a table whose numbers are never wrapped, and its texts not below :data:`_NARROWEST_TEXT` characters."""
    drawing = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, (header, is_number) in enumerate(zip(headers, grid.is_number, strict=True)):
        lines = [*header.split("\n"), *(row[index] for row in grid.rows)]
        width = max(Text(line).cell_len for line in lines)
        drawing.add_column(
            Text(header),  # Brackets of a plain str would be rich's markup.
            justify="right" if is_number else "left",
            no_wrap=is_number,
            min_width=width if is_number else min(width, _NARROWEST_TEXT),
            overflow="fold",
        )
    for row in grid.rows:
        drawing.add_row(*map(Text, row))
    return drawing


def _records(grid: Grid) -> RichTable:
    drawing = RichTable(box=box.ROUNDED, show_header=False)
    drawing.add_column(overflow="fold")
    drawing.add_column(overflow="fold")
    for row in grid.rows:
        for header, value in zip(grid.headers, row, strict=True):
            drawing.add_row(Text(header), Text(value))
        drawing.add_section()
    return drawing
