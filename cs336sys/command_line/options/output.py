"""Options for showing and keeping results: groups that every command with a table, or with cells, takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from cs336sys.command_line.faults import say
from cs336sys.command_line.options.reading import among, choice, connects, setting, writes_file
from cs336sys.errors import OutputError, UsageError
from cs336sys.results.file import check_name
from cs336sys.results.model import Cell
from cs336sys.settings.fields import LONGEST_S, MEASURING, OUTPUT
from cs336sys.tables.outputs import FORMAT_OF_ENDING, FORMATS, check_plot, read_output
from cs336sys.tables.table import Table, select_in_groups

# Of :mod:`cs336sys.run.tracking`.
TRACKERS = ("mlflow", "wandb")

_seconds = partial(setting, metavar="<s>", max=LONGEST_S, rich_help_panel=MEASURING)
SaveOption = Annotated[Path | None, writes_file(help="Append cells to this .jsonl or .jsonl.gz.")]


@dataclass(frozen=True)
class OutputOptions:
    """Options for the tables and columns that are written, their format and place."""

    panel: ClassVar = OUTPUT
    format: Annotated[str | None, setting(help=f"{', '.join(FORMATS)}.", autocompletion=among(FORMATS))] = None
    output: Annotated[
        Path | None,
        writes_file("--output", "-o", help="Write to this file (.csv, .md) or folder/.", parser=read_output),
    ] = None
    table: Annotated[Sequence[str], setting(help="Print only the tables of these names.", parser=str)] = ()
    columns: Annotated[Sequence[str], setting(help="Print only these columns: size,step_ms.", parser=str)] = ()
    sort: Annotated[str | None, setting(help="Sort by this column; -step_ms: largest first.")] = None
    wide: Annotated[bool, setting("--wide", help="Do not fold wide rows; page with less -S.")] = False

    def check(self, **plots: Path | None) -> None:
        """Raise a UsageError, before anything is measured, if tables or pictures cannot be written.

        ``plots`` are picture files by the names of their options, ``plot_buckets`` for ``--plot-buckets``.
        """
        from cs336sys.tables.render import check_output

        check_output(self.output, self.format)
        for name, path in plots.items():
            check_plot(path, f"--{name.replace('_', '-')}")

    def check_selection(self, command: str, tables: Callable[[Sequence[Cell], None], Sequence[Table]]) -> None:
        """Raise a UsageError before anything is measured if a command has no table or column of the chosen names."""
        from cs336sys.tables.saved import tidy

        if self.table or self.columns or self.sort:
            self.select([tidy(command, tables([], None))])  # Tables of no cells have all columns.

    def select(self, groups: Sequence[Sequence[Table]]) -> list[list[Table]]:
        """Select the tables and columns of these names, in their groups, or raise a UsageError where there are none."""
        return select_in_groups(groups, self.table, self.columns, self.sort)

    def write(self, tables: Sequence[Table]) -> None:
        """Write all of these tables, or raise an OutputError."""
        from cs336sys.tables.render import emit

        emit(tables, format=self.format, output=self.output, wide=self.wide)
        names = list(dict.fromkeys(table.name for table in tables))
        file = self.output or Path("-")
        format = self.format or FORMAT_OF_ENDING.get(file.suffix.lower())
        if format == "csv" and len(names) > 1 and not file.is_dir():
            say(f"note: csv holds the table {names[0]}; for {', '.join(names[1:])}: --table, or --output FOLDER/")

    def emit(self, tables: Sequence[Table]) -> None:
        """Write the selected tables; a UsageError names an unknown table or column, and then nothing is written."""
        self.write(self.select([tables])[0])

    def emit_measured(self, tables: Sequence[Table]) -> list[UsageError | OutputError]:
        """Write the selected tables, or all of them where a name is unknown, and return the errors.

        Some columns exist only once cells are measured, which must not be lost by an error in their names.
        """
        faults: list[UsageError | OutputError] = []
        try:
            (tables,) = self.select([tables])
        except UsageError as error:
            faults.append(error)
        try:
            self.write(tables)
        except OutputError as error:
            faults.append(error)
        return faults


@dataclass(frozen=True)
class SweepOptions:
    """Options for saving a sweep's cells, for choosing which are measured, and for how long."""

    panel: ClassVar = OUTPUT
    save: SaveOption = None
    resume: Annotated[bool, setting("--resume", help="Skip cells of --save that were measured alike.")] = False
    resume_any: Annotated[bool, setting("--resume-any", help="As --resume, however they were measured.")] = False
    track: Annotated[Sequence[str], choice(TRACKERS, "Record cells as runs: mlflow, wandb.", declare=connects)] = ()
    cell_timeout: Annotated[float | None, _seconds(help="Give up a cell after this many seconds.", min=1e-3)] = None
    cool_down: Annotated[float, _seconds(help="Seconds to wait between cells.", min=0)] = 0.0

    def __post_init__(self) -> None:
        """Refuse options that do not go together, whether or not anything is measured."""
        if self.resumes and self.save is None:
            raise UsageError("--resume needs --save: the file that holds the cells to skip")
        if self.save is not None:
            check_name(self.save)

    @property
    def resumes(self) -> bool:
        """Return whether cells that the file holds are skipped."""
        return self.resume or self.resume_any
