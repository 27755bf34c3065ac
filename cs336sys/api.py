"""The commands as functions, for notebooks and scripts: the same options, refusals, worker processes and tables.

Each function runs its command in this process with the command line that its settings mean. Progress and warnings go
to standard error, nothing to standard output; the tables come back as :class:`Tables`, the saved cells with them as
:class:`Results`. No import here needs torch.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from cs336sys.cli import app
from cs336sys.commands.faults import say, sentence_of
from cs336sys.errors import INTERRUPTED, TERMINATED, OutputError, UsageError, a_value
from cs336sys.processes import started_outside
from cs336sys.processes.folders import OwnedFolder
from cs336sys.report.page import html_table
from cs336sys.report.render import collecting, render
from cs336sys.report.table import Table
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, read_results
from cs336sys.user_code import TO_FILE, is_user_code, name_object

Value = str | int | float | Path | Callable[..., Any]
Setting = Value | Sequence[Value] | None

# What measures in one process can do so in this one.
_MEASURED_HERE = ("bench", "memprof", "flash", "kernels")

# Workers inherit it, and know so that the file which they load is the script that waits for them.
_MEASURING = "_CS336SYS_MEASURING"


@dataclass(frozen=True)
class Tables:
    """The tables that a command prints.

    Attributes:
        tables: in the order in which the command prints them.
        ok: whether the command would exit with 0: no cell is wrong or failed, no comparison fails.
    """

    tables: tuple[Table, ...]
    ok: bool = True

    def table(self, format: str = "markdown") -> str:
        """Return the tables as the command prints them with this ``--format``.

        Raises:
            UsageError: the format is unknown.
        """
        return render(self.tables, format)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with ``--format json``: ``{"schema_version", "tables"}``."""
        document: dict[str, Any] = json.loads(render(self.tables, "json"))
        return document

    def to_pandas(self, name: str | None = None) -> Any:
        """Return the first table, or the one of this name, as a DataFrame with the columns of ``--format json``.

        Raises:
            UsageError: pandas is not installed, or no table has the name.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError("to_pandas() needs pandas: python -m pip install pandas") from error
        tables = self.to_dict()["tables"]
        chosen = [table for table in tables if name in (None, table["name"])]
        if not chosen:
            raise UsageError(f"no table is named {name!r}: choose from {', '.join(table['name'] for table in tables)}")
        return pandas.DataFrame(chosen[0]["rows"])

    def _repr_html_(self) -> str:
        return "\n".join(html_table(table, "h4") for table in self.tables)

    def __str__(self) -> str:
        return self.table()


@dataclass(frozen=True)
class Results(Tables):
    """Measured cells, and the tables of the command that measured them.

    Attributes:
        cells: one for each configuration, whatever became of it: see ``status``.
        runs: the machines and settings that measured them.
    """

    cells: tuple[Cell, ...] = field(default=(), repr=False)
    runs: tuple[Run, ...] = field(default=(), repr=False)

    def save(self, path: str | Path) -> None:
        """Append the cells to a results file, as ``--save`` does.

        Raises:
            UsageError: the file cannot be opened, or holds something else than results.
            OutputError: the disk is full.
        """
        if not self.cells:
            raise UsageError(f"save({str(path)!r}): no cell was measured")
        file = ResultsFile(Path(path))
        try:
            for run in self.runs:
                file.append(run)
            for cell in self.cells:
                file.append(cell)
        finally:
            file.close()
        if file.fault is not None:
            raise OutputError(f"cannot write results to {path}: {file.fault}")

    def plot(self, path: str | Path) -> None:
        """Draw the cells as ``show --plot`` does: to this file, or where there are several pictures, to one for each.

        Raises:
            UsageError: the cells hold no picture's data, or the file cannot be written.
        """
        with OwnedFolder() as folder:
            saved = folder / "cells.jsonl"
            self.save(saved)
            _run_in_process("show", [str(saved), f"--plot={path}"])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came during a measurement.

    Attributes:
        results: the cells that were measured before.
    """

    def __init__(self, results: Results):
        super().__init__(f"{len(results.cells)} cells were measured")
        self.results = results


def bench(model_or_size: Setting = None, /, **settings: Setting) -> Results:
    """Time the phases of a training step, as ``cs336sys bench``.

    Args:
        model_or_size: a size (``"tiny"``), sizes, or your model: ``"FILE.py:NAME"``, or a function of a file.
        settings: options of the command, with underscores: ``precision=["fp32", "bf16"], steps=5``.

    Raises:
        UsageError: settings do not go together.
        CapabilityError: the machine lacks what is asked for.
        Interrupted: Ctrl-C; its ``results`` hold what was measured.
    """
    return _run_command("bench", _trained(model_or_size) | settings)


def memprof(model_or_size: Setting = None, /, **settings: Setting) -> Results:
    """Find where the memory of a training step goes, as ``cs336sys memprof``; see :func:`bench`.

    The option ``--from`` is the keyword ``from_``.
    """
    return _run_command("memprof", _trained(model_or_size) | settings)


def ddp(model_or_size: Setting = None, /, **settings: Setting) -> Results:
    """Compare ways to train data-parallel, as ``cs336sys ddp``; see :func:`bench`."""
    return _run_command("ddp", _trained(model_or_size) | settings)


def shard(model_or_size: Setting = None, /, **settings: Setting) -> Results:
    """Shard training state over ranks and measure, as ``cs336sys shard``; see :func:`bench`."""
    return _run_command("shard", _trained(model_or_size) | settings)


def tune(model_or_size: Setting = None, /, **settings: Setting) -> Results:
    """Predict the fastest settings that fit, as ``cs336sys tune``; it has cells where ``measure`` is given."""
    return _run_command("tune", _trained(model_or_size) | settings)


def flash(**settings: Setting) -> Results:
    """Check and time attention implementations, as ``cs336sys flash``; see :func:`bench`."""
    return _run_command("flash", settings)


def kernels(**settings: Setting) -> Results:
    """Check and time fused kernels, as ``cs336sys kernels``; see :func:`bench`."""
    return _run_command("kernels", settings)


def allreduce(**settings: Setting) -> Results:
    """Time collectives, as ``cs336sys allreduce``; see :func:`bench`."""
    return _run_command("allreduce", settings)


def trace(path: str | Path | Sequence[str | Path], /, **settings: Setting) -> Results:
    """Say where the time of a recorded step goes, as ``cs336sys trace``.

    Args:
        path: a capture, one for each rank, or their folder.
        settings: options of the command.

    Raises:
        UsageError: a file is no capture.
    """
    return _run_command("trace", settings, [str(file) for file in _several(path)])


def account(question: str, /, **settings: Setting) -> Tables:
    """Answer on paper, as ``cs336sys account QUESTION``.

    Args:
        question: ``"memory"``, ``"flops"``, ``"parallel"``, ...
        settings: options of that command.

    Raises:
        UsageError: the question is unknown, or settings do not go together.
    """
    tables, code = _run_in_process("account", [question, *_arguments(settings, "account", question)])
    return Tables(tables, code == 0)


def read(path: str | Path, /, **settings: Setting) -> Results:
    """Read a results file, with its tables as ``cs336sys show`` prints them.

    Args:
        path: a file that ``--save`` or :meth:`Results.save` has written.
        settings: options of ``show``; they choose tables, columns and rows, and all cells are returned.

    Raises:
        UsageError: the file holds no results.
    """
    tables, code = _run_in_process("show", [str(path), *_arguments(settings, "show")])
    saved = read_results(Path(path))
    return Results(tables, code == 0, tuple(saved.cells), tuple(saved.runs.values()))


def compare(a: str | Path | Results, b: str | Path | Results, /, **settings: Setting) -> Tables:
    """Compare cells of the same configuration, as ``cs336sys compare A B``.

    Args:
        a: the baseline: results, a file of them, or several files with commas between their names.
        b: the candidate.
        settings: options of the command; with ``fail_above`` the answer's ``ok`` is False for a regression.

    Raises:
        UsageError: the two have no configuration in common.
    """
    with OwnedFolder() as folder:
        sides = []
        for name, side in (("a", a), ("b", b)):
            if isinstance(side, Results):
                side.save(folder / f"{name}.jsonl")
            sides.append(str(folder / f"{name}.jsonl") if isinstance(side, Results) else str(side))
        tables, code = _run_in_process("compare", [*sides, *_arguments(settings, "compare")])
    return Tables(tables, code == 0)


def _trained(model_or_size: Setting) -> dict[str, Setting]:
    if model_or_size is None:
        return {}
    is_model = any(callable(value) or is_user_code(str(value)) for value in _several(model_or_size))
    return {"model" if is_model else "size": model_or_size}


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _run_command(command: str, settings: dict[str, Setting], files: Sequence[str] = ()) -> Results:
    if _MEASURING in os.environ:
        raise UsageError(
            f"{command}() is called while another measurement runs, or loads this file: call it under "
            "if __name__ == '__main__':"
        )
    if started_outside() is not None:
        raise UsageError(f"{command}() starts its own processes: under torchrun or Slurm run cs336sys {command}")
    for name in ("resume", "resume_any"):
        if settings.get(name):
            raise UsageError(
                f"{name}: {command}() returns what it measures; resume with cs336sys {command}, and read()"
            )
    arguments = [*files, *_arguments(settings, command)]
    with OwnedFolder() as folder:
        save = settings.get("save")
        path = Path(str(save)) if save is not None else folder / "cells.jsonl"
        before = set(read_results(path).runs) if save is not None and path.exists() and path.stat().st_size else set()
        # Without --measure tune only predicts, and refuses to save.
        is_saved_here = save is None and (command != "tune" or bool(settings.get("measure")))
        tables, code = _run_in_process(command, arguments, [f"--save={path}"] if is_saved_here else [])
        cells: tuple[Cell, ...] = ()
        runs: tuple[Run, ...] = ()
        if path.exists() and path.stat().st_size:
            measured = read_results(path)
            cells = tuple(cell for cell in measured.cells if cell.run_id not in before)
            runs = tuple(
                replace(run, arguments=(command, *arguments)) for key, run in measured.runs.items() if key not in before
            )
    results = Results(tables, code == 0, cells, runs)
    if code in (INTERRUPTED, TERMINATED):
        raise Interrupted(results)
    return results


def _arguments(settings: dict[str, Setting], *command: str) -> list[str]:
    """Return the command's options for these settings."""
    options = _options(command)
    arguments = []
    for name, value in settings.items():
        option = f"--{name.rstrip('_').replace('_', '-')}"
        declared = options.get(option)
        if value is None:
            continue
        if isinstance(value, bool) and declared is not None and declared.is_flag:
            if value:
                arguments.append(option)
            elif declared.secondary_opts:
                arguments.append(declared.secondary_opts[0])
            elif declared.default:
                raise UsageError(f"{name}=False: {option} cannot be switched off")
            continue
        if declared is not None and declared.is_flag:
            raise UsageError(f"{name}={value!r}: must be True or False")
        if isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: {option} takes a value, not True or False")
        values = _several(value)
        if declared is not None and not declared.multiple and len(values) != 1:
            raise UsageError(f"{name}={value!r}: takes one value")
        arguments += [f"{option}={_argument_text(name, item, command[0])}" for item in values]
    return arguments


def _options(command: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command by their names; none where there is no such command, which says so itself."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="cs336sys")
    for name in command:
        group = group.get_command(context, name)
        if group is None:
            return {}
    return {name: option for option in group.params if option.param_type_name == "option" for name in option.opts}


def _argument_text(name: str, value: Any, command: str) -> str:
    if isinstance(value, str | int | float | Path) and not isinstance(value, bool):
        return str(value)
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    file, own_name = getattr(module, "__file__", None), getattr(value, "__qualname__", "")
    if callable(value) and file and own_name.isidentifier() and getattr(module, own_name, None) is value:
        assert module is not None
        return f"{module.__name__ if '.' in module.__name__ else file}:{own_name}"
    if callable(value):
        sentence = f"{name}: {a_value(value)} that worker processes cannot find by name"
        if command not in _MEASURED_HERE:
            raise UsageError(f"{sentence}; {TO_FILE}")
        say(f"note: {sentence}: it is measured in this process, and nothing ends a cell that takes too long")
        return name_object(value)
    raise UsageError(f"{name}={value!r}: must be a text, a number, a path, a function of a file, or a list of them")


@contextlib.contextmanager
def _as_command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Let results say which command measured them, and workers that a measurement waits for them."""
    before = sys.argv
    sys.argv = ["cs336sys", *arguments]
    os.environ[_MEASURING] = str(os.getpid())
    try:
        yield
    finally:
        sys.argv = before
        os.environ.pop(_MEASURING, None)


def _run_in_process(command: str, arguments: Sequence[str], added: Sequence[str] = ()) -> tuple[tuple[Table, ...], int]:
    """Run a command in this process; return its tables and exit code, or raise its error."""
    line = [command, *arguments, *added]
    with _as_command_line(line), collecting() as tables:
        try:
            code = typer.main.get_command(app).main(
                line, prog_name="cs336sys", standalone_mode=False, auto_envvar_prefix="CS336SYS"
            )
        except Exception as error:
            if (sentence := sentence_of(error)) is None:
                raise
            raise UsageError(sentence) from error
    return tuple(tables), code if isinstance(code, int) else 0
