"""Records of the functions that show a command's saved cells again, as tables and pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cs336sys.results.model import Cell, Run
from cs336sys.tables.table import Table


@dataclass(frozen=True)
class Presentation:
    """The options of commands about how cells are shown, with their names and defaults.

    Without a ``baseline``, ``bench`` compares with the defaults of settings, other commands with eager.
    """

    baseline: str = ""
    percentiles: Sequence[float] = ()
    top: int = 5
    full_names: bool = False
    compare_precision: bool = False


# The pictures of some cells by name, each drawn to a file.
Pictures = Mapping[str, Callable[[Path], None]]
RunTableBuilder = Callable[[Sequence[Cell], Run | None], list[Table]]
TableBuilder = Callable[[Sequence[Cell], Run | None, Presentation], list[Table]]
PictureBuilder = Callable[[Sequence[Cell], Run | None, Presentation], Pictures]


@dataclass(frozen=True)
class SavedCommand:
    """The functions that show a command's cells again; ``pooled`` joins rounds (``--rounds``) for the others."""

    tables: TableBuilder
    pictures: PictureBuilder = lambda cells, run, options: {}
    pooled: Callable[[Sequence[Cell]], list[Cell]] = list


def of_run(build: RunTableBuilder) -> TableBuilder:
    """Return the builder of tables that no option changes."""
    return lambda cells, run, options: build(cells, run)


def picture_of_measured(name: str, draw: Callable[[Sequence[Cell], Path], None]) -> PictureBuilder:
    """Return a function that offers the picture ``name`` of all cells, if any was measured."""
    return lambda cells, run, options: {name: partial(draw, cells)} if measured_cells(cells) else {}


def measured_cells(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status == "ok"]
