"""The commands as functions, for notebooks and scripts: the same options, refusals, worker processes and tables.

Each function hands a :class:`~cs336sys.command_line.invocation.Request` to its command, which runs in this process,
writes progress and warnings to standard error, and nothing to standard output. No import here needs torch.
"""

import contextlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, get_args

import typer

from cs336sys.cli import app
from cs336sys.command_line.faults import sentence_of
from cs336sys.command_line.invocation import Request, keyword_of, values_of
from cs336sys.command_line.options.reading import Effect, effect_of, types_in
from cs336sys.commands.show import drawings, saved_presentations
from cs336sys.errors import INTERRUPTED, SENTENCES, TERMINATED, UsageError, did_you_mean
from cs336sys.processes import started_outside
from cs336sys.results import model
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, read_results
from cs336sys.results.recording import recording
from cs336sys.settings.course_package import telling_import_errors
from cs336sys.settings.user_code import is_user_code
from cs336sys.tables.outputs import check_plot
from cs336sys.tables.page import html_picture, html_table
from cs336sys.tables.render import render
from cs336sys.tables.table import Table

# The commands that are functions of their names, and the argument that they take without a name, if any.
_TRAINING, _NOTHING, _FILES = "model_or_size", "", "files"
FUNCTIONS = {
    **dict.fromkeys(("bench", "nsys", "memprof", "ddp", "shard", "tune", "losses"), _TRAINING),
    **dict.fromkeys(("attn", "flash", "kernels", "allreduce", "precision", "doctor"), _NOTHING),
    "trace": _FILES,
}
_ROOT = typer.Context(typer.main.get_command(app), info_name="cs336sys")  # The group of all commands.
_CODE = str | Callable[..., Any]
_TYPES: dict[str, Any] = {_TRAINING: _CODE | Iterable[_CODE] | None, _FILES: str | Path | Iterable[str | Path]}

# Options of commands that functions refuse.
_RESUMING = ("resume", "resume_any")

# A variable that is set during a measurement. Workers inherit it: the file that they load may be the script that waits
# for them, and must not measure again.
_MEASURING = "_CS336SYS_MEASURING"


@dataclass(frozen=True)
class Pictures:
    """Pictures that a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


@dataclass(frozen=True, repr=False)
class Tables:
    """The tables that a command prints; the rows of the first are items, and its columns are found by name.

    Attributes:
        tables: in the order in which the command prints them.
        ok: whether the command would exit with 0: no cell is wrong or failed, no comparison fails.
    """

    tables: tuple[Table, ...]
    ok: bool = True

    def table(self, format: str = "markdown") -> str:
        """Return the tables as the command prints them with this ``--format``, or raise a UsageError for another."""
        return render(self.tables, format)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with ``--format json``: ``{"schema_version", "tables"}``."""
        document: dict[str, Any] = json.loads(render(self.tables, "json"))
        return document

    def rows(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of the first table, or of those of this name (else a UsageError), with the columns of csv."""
        tables = self.to_dict()["tables"]
        names = list(dict.fromkeys(table["name"] for table in tables))
        if name is not None and name not in names:
            raise UsageError(f"no table is named {name!r}: choose from {', '.join(names)}")
        return [row for table in tables if table["name"] == (name or names[0]) for row in table["rows"]]

    def to_pandas(self, name: str | None = None) -> Any:
        """Return :meth:`rows` as a DataFrame, or raise a UsageError where pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError("to_pandas() needs pandas: python -m pip install pandas") from error
        return pandas.DataFrame(self.rows(name))

    def __len__(self) -> int:
        return len(self.rows()) if self.tables else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows() if self.tables else ())

    def __getitem__(self, column: str) -> list[Any]:
        """Return a column of the first table, of samples (``step_ms``) their means, or raise a KeyError."""
        rows = list(self)
        names = list(dict.fromkeys(name for row in rows for name in row))
        for name in (column, f"{column}_mean"):
            if name in names:
                return [row.get(name) for row in rows]
        raise KeyError(f"no column {column!r}{did_you_mean(str(column), names)}")

    def _repr_html_(self) -> str:
        return "\n".join(html_table(table, "h4") for table in self.tables)

    def __repr__(self) -> str:
        return self.table("table")

    def __str__(self) -> str:
        return self.table()


@dataclass(frozen=True, repr=False)
class Results(Tables):
    """Measured cells, one for each configuration, whatever became of it (``status``); and the tables of their command.

    ``runs`` are the machines and settings that measured them.
    """

    cells: tuple[Cell, ...] = field(default=(), repr=False)
    runs: tuple[Run, ...] = field(default=(), repr=False)

    @property
    def saved(self) -> model.Results:
        """Return the cells as a results file holds them."""
        return model.Results({run.run_id: run for run in self.runs}, self.cells)

    def save(self, path: str | Path) -> None:
        """Append the cells to a results file, as ``--save`` does, or raise an OutputError where the disk is full.

        A UsageError says that there is no cell, or that the file cannot be opened or holds something else than results.
        """
        if not self.cells:
            raise UsageError(f"save({str(path)!r}): no cell was measured")
        with contextlib.closing(ResultsFile(Path(path))) as file:
            records: tuple[Run | Cell, ...] = (*self.runs, *self.cells)
            for record in records:
                file.append(record)  # It raises nothing: it keeps what it cannot write, and sets ``fault``.
        if file.fault is not None:
            raise file.fault

    def plot(self, path: str | Path | None = None) -> Pictures | None:
        """Draw the cells as ``show --plot`` does: to this file, or where there are several pictures, to one for each.

        Without a path, return the pictures, which a notebook shows. Raise a UsageError where the cells hold no data for
        pictures, or the file cannot be written.
        """
        from cs336sys.commands.registry import invocations, saved_pictures, shown_cells

        file = Path("plot.png" if path is None else path)  # Without a path, nothing is written to it, or checked.
        check_plot(file if path is not None else None)
        calls = invocations([self.saved])
        presentation = saved_presentations(_ROOT)
        pictures = [saved_pictures(call, shown_cells(call), presentation(call)) for call in calls]
        if path is None:
            return Pictures("\n".join(html_picture(draw, name) for drawn in pictures for name, draw in drawn.items()))
        for picture_file, draw in drawings(pictures, file, commands=Counter(call.command for call in calls)):
            draw(picture_file)
        return None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came during a measurement; ``results`` are the cells that were measured before."""

    def __init__(self, results: Results):
        super().__init__(f"{len(results.cells)} cells were measured")
        self.results = results


def account(question: str, /, **settings: Any) -> Tables:
    """Return the tables of ``cs336sys account QUESTION``: predictions, for which nothing is measured.

    ``question`` is ``"memory"``, ``"flops"``, ``"parallel"``, ...; ``settings`` are options of that command. A
    UsageError says that the question is unknown, or that settings do not go together.
    """
    answer = run(Request(("account", question), settings))
    return Tables(answer.tables, answer.ok)


def read(path: str | Path, /, **settings: Any) -> Results:
    """Read a results file, with its tables as ``cs336sys show`` prints them; raise a UsageError if it holds no results.

    Args:
        path: a file that ``--save`` or :meth:`Results.save` has written.
        settings: options of ``show``; they choose tables, columns and rows, and all cells are returned.
    """
    shown, saved = run(Request(("show",), {"files": path} | settings)), read_results(Path(path))
    return Results(shown.tables, shown.ok, cells=tuple(saved.cells), runs=tuple(saved.runs.values()))


def compare(a: str | Path | Results, b: str | Path | Results, /, **settings: Any) -> Tables:
    """Compare cells of the same configuration, as ``cs336sys compare A B``, or raise a UsageError if there are none.

    Args:
        a: the baseline: results, a file of them, or several files with commas between their names.
        b: the candidate.
        settings: options of the command; with ``fail_above`` the answer's ``ok`` is False for a regression.
    """
    # Files are named as they are, and results in memory after their side, under which ``run`` gets them.
    sides = {"baseline": a, "candidate": b}
    sources = {name: side.saved for name, side in sides.items() if isinstance(side, Results)}
    names = {name: name if name in sources else str(side) for name, side in sides.items()}
    answer = run(Request(("compare",), names | settings), sources)
    return Tables(answer.tables, answer.ok)


def run(request: Request, sources: Mapping[str, model.Results] = {}) -> Results:
    """Run a command in this process, and return its tables, cells and runs.

    Args:
        sources: results that it reads in place of files, by the names of these.

    Raises:
        UsageError: the request makes no sense.
        CapabilityError: the machine cannot serve the request.
        Interrupted: Ctrl-C; its ``results`` hold what was measured.
    """
    with recording(sources) as record:
        try:
            with telling_import_errors():
                code = _ROOT.command.main(
                    list(request.command),
                    prog_name="cs336sys",
                    standalone_mode=False,
                    auto_envvar_prefix="CS336SYS",
                    obj=request,
                )
        except SENTENCES as error:
            raise error.with_traceback(None) from None  # Without the frames of typer and of the command.
        except Exception as error:
            if (sentence := sentence_of(error)) is None:
                raise
            raise UsageError(sentence) from None
    results = Results(tuple(record.tables), ok=not code, cells=tuple(record.cells), runs=tuple(record.runs.values()))
    if code in (INTERRUPTED, TERMINATED):
        raise Interrupted(results)
    return results


def _measure(command: str, values: dict[str, Any]) -> Results:
    """Run a command that measures, unless a measurement runs already, or this process is a rank of torchrun."""
    if _MEASURING in os.environ:
        raise UsageError(
            f"{command}() is called while another measurement runs, or loads this file: call it under "
            "if __name__ == '__main__':"
        )
    if started_outside() is not None:
        raise UsageError(f"{command}() starts its own processes: under torchrun or Slurm run cs336sys {command}")
    for name in filter(values.get, _RESUMING):  # The first that is not False.
        raise UsageError(f"{name}: {command}() returns what it measures; resume with cs336sys {command}, and read()")
    os.environ[_MEASURING] = str(os.getpid())  # Workers inherit it, and may load the script that calls this.
    try:
        return run(Request((command,), values))
    finally:
        os.environ.pop(_MEASURING, None)


def _function_of(command: str, first: str) -> Callable[..., Results]:
    """Return a command as a function of its options, and of ``first`` without a name; its signature lists both."""

    def call(*positional: Any, **values: Any) -> Results:
        if len(positional) > bool(first):  # One, or where there is no ``first`` none.
            raise TypeError(f"{command}() takes {'one argument' if first else 'none'} without a name")
        for value in positional:  # At most one.
            option = first
            if first == _TRAINING:
                # A function, or FILE.py:NAME of one, is a model of the user's; other values are names of sizes.
                is_model = any(callable(part) or is_user_code(str(part)) for part in values_of(value))
                option = "model" if is_model else "size"
            if option in values:
                raise TypeError(f"{command}() got {option} twice: without a name, and as {option}=")
            values = {option: value} | values
        return _measure(command, values)

    click_command: Any = _ROOT.command.get_command(_ROOT, command)  # type: ignore[attr-defined]  # it is a group
    call.__name__ = call.__qualname__ = command
    call.__doc__ = f"{click_command.callback.__doc__.strip()}\n\nOptions: ``cs336sys {command} --help``."
    parameters = []
    if first:
        default = None if first == _TRAINING else Parameter.empty  # Training has a usual size; files have to be given.
        parameters = [Parameter(first, Parameter.POSITIONAL_ONLY, default=default, annotation=_TYPES[first])]
    for option in click_command.params:
        declared = click_command.callback.parameters.get(option.name)
        if option.param_type_name == "option" and declared is not None and option.name not in _RESUMING:
            named = Parameter(keyword_of(option), Parameter.KEYWORD_ONLY, default=declared.default)
            parameters.append(named.replace(annotation=_annotation(declared)))
    call.__signature__ = Signature(parameters, return_annotation=Results)  # type: ignore[attr-defined]
    return call


def _annotation(declared: Parameter) -> Any:
    """Return the type of an option's values in Python, where lists may be any iterable."""
    option_type, declaration, *_ = get_args(declared.annotation)
    types = types_in(option_type)
    # Text comes last: of int | str this is int, to which text is added below.
    accepted: Any = next(scalar for scalar in (bool, int, float, Path, str) if scalar in types)
    if effect_of(declaration) is Effect.RUNS_CODE:
        accepted = _CODE
    elif accepted is Path or str in types:  # A path can be given as text, too.
        accepted = str | accepted
    accepted = accepted | Iterable[accepted] if {list, Sequence} & types else accepted
    return accepted | None if declared.default is None else accepted


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'cs336sys.api' has no attribute '{name}'")
    return globals().setdefault(name, _function_of(name, FUNCTIONS[name]))
