"""Find in saved results the cells that a problem of the write-up asks for, machine by machine."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cs336sys.commands.registry import Invocation, can_be_shown, invocations, saved_pictures, saved_tables, shown_cells
from cs336sys.errors import UsageError
from cs336sys.results.comparison import SAMPLING_SETTINGS
from cs336sys.results.foreign import MIB, printable, read_chunks
from cs336sys.results.model import Cell, Results, Run, configuration_key
from cs336sys.tables.saved import Pictures, Presentation
from cs336sys.tables.table import Table, select_columns

Settings = Mapping[str, Collection[Any]]

# Settings that say how, and how often, a cell was measured: cells that differ in them alone count as the same. To
# ``compare``, those after the first are different measurements: with another warm-up or device times may be others.
_OF_MEASURING = (
    *(*SAMPLING_SETTINGS, "warmup", "device", "synchronize", "rounds", "interleave", "interleaved"),
    *("profiler", "check_layers", "iterations"),
)

# Settings of a training step as the handouts have it. Later versions name more; cells without them had these values.
PLAIN_OF_ANY_MODE: Settings = {
    "compile": ("off",),
    "attention": ("reference",),
    "optimizer": ("course",),
    "cuda_graph": ("off",),
    "kernels": ("reference", None),
    "state_dtype": ("fp32", None),
    "update": ("step", None),
    "tf32": (False,),
}
PLAIN = {"mode": ("train",), **PLAIN_OF_ANY_MODE}


@dataclass(frozen=True)
class Selection:
    """Cells of one invocation, which may be compared with each other."""

    invocation: Invocation
    cells: list[Cell]

    @property
    def measured(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.status == "ok"]

    @cached_property
    def _tables(self) -> list[Table]:
        return saved_tables(self.invocation, self.cells, Presentation())

    def tables(self, name: str, *columns: str) -> list[Table]:
        """Return the command's tables of this name, with their columns of settings and these ``columns``, or all."""
        chosen = [table for table in self._tables if table.name == name and table.rows]
        if not chosen or not columns:
            return chosen
        keys = [column.key for table in chosen for column in table.columns]
        # nsys counts launched kernels in a column of the setting's name.
        settings = [key for key in keys if key in self.cells[0].configuration and key != "kernels"]
        return select_columns(chosen, [key for key in dict.fromkeys([*settings, *columns]) if key in keys])

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of the command's tables of this name."""
        return [dict(row) for full_table in self.tables(table) for row in full_table.rows]

    def pictures(self, *names: str) -> Pictures:
        """Return the command's pictures of the cells, of these names alone if any is given."""
        drawn = saved_pictures(self.invocation, self.cells)
        return {name: draw for name, draw in drawn.items() if not names or name in names}

    def by(self, setting: str) -> dict[Any, Cell]:
        """Return the measured cells by the value of a setting, the last one of each value."""
        return {cell.configuration[setting]: cell for cell in self.measured}

    def only(self, is_wanted: Callable[[Cell], Any]) -> "Selection":
        return Selection(self.invocation, [cell for cell in self.cells if is_wanted(cell)])

    def setting(self, name: str) -> Any:
        """Return the value of a setting that is the same in all cells."""
        return self.cells[0].configuration[name]


def joined_selection(groups: Sequence[Selection]) -> Selection:
    """Join the cells of several invocations, for tables that do not compare cells; small models and contexts first."""
    runs = [run for group in groups for run in group.invocation.runs[-1:]]
    order = ("d_model", "num_layers", "context", "head_dim")
    cells = sorted(cells_of(groups), key=lambda cell: [cell.configuration.get(name) or 0 for name in order])
    return Selection(replace(groups[0].invocation, runs=runs), cells)


def cells_of(groups: Sequence[Selection]) -> list[Cell]:
    return [cell for group in groups for cell in group.cells]


@dataclass
class Evidence:
    """The saved cells of one machine."""

    machine: str = ""  # Its GPU or CPU, and torch's version.
    selections: list[Selection] = field(default_factory=list)  # The cells of each invocation.
    tests: Mapping[str, str] = field(default_factory=dict)  # Outcomes by the name of the test, of a JUnit file.

    def find(self, command: str, preferred: Settings | None = None, /, **required: Collection[Any]) -> list[Selection]:
        """Return the command's cells with the ``required`` values of settings, the invocation with most cells first.

        A cell that several invocations measured is taken from the first of them. Cells without a ``preferred`` value
        are taken only where no cell has one: a machine may be too small for what a handout asks.
        """
        seen: set[str] = set()
        groups = []
        for group in self.find_each(command, preferred, **required):
            groups.append(group.only(lambda cell: _identity(cell) not in seen))
            seen.update(map(_identity, group.cells))
        return [group for group in groups if group.cells]

    def find_each(
        self, command: str, preferred: Settings | None = None, /, **required: Collection[Any]
    ) -> list[Selection]:
        """Find as :meth:`find`, with all cells of every invocation, so that cells of one can be compared."""
        # Cells of ``shard --board`` (the leaderboard's step) have other columns: only ``board=(True,)`` finds them.
        settings = {"board": (None, False), **required}
        groups = _narrowed([group for group in self.selections if group.invocation.command == command], settings)
        for name, values in (preferred or {}).items():
            groups = _narrowed(groups, {name: values}) or groups

        def count_and_time(group: Selection) -> tuple[int, str]:
            runs = group.invocation.runs
            return len(set(map(_identity, group.cells))), runs[-1].time if runs else ""

        return sorted(groups, key=count_and_time, reverse=True)


def _narrowed(groups: Sequence[Selection], settings: Settings) -> list[Selection]:
    """Return the groups with the cells that have one of the values of each setting, without groups that have none."""

    def is_wanted(cell: Cell) -> bool:
        return all(cell.configuration.get(name) in values for name, values in settings.items())

    return [wanted for group in groups if (wanted := group.only(is_wanted)).cells]


def _identity(cell: Cell) -> str:
    """Return the settings that decide what was measured, as a key."""
    return configuration_key(cell.configuration, ignore=_OF_MEASURING)


def machine_name(run: Run | None) -> str:
    """Name the machine whose cells may stand in one answer: one GPU (or CPU) with one version of torch."""
    if run is None:
        return "a machine not recorded"
    device = run.machine.get("gpu") or run.machine.get("cpu") or "unknown CPU"  # Several kinds of GPUs: "A, B".
    return f"{device.split(', ')[0]}, torch {run.machine.get('torch')}"


def evidence_of(files: Sequence[Results], tests: Mapping[str, str]) -> tuple[list[Evidence], list[str]]:
    """Sort the files' cells by machine, most cells first; return a sentence on each invocation that cannot be shown."""
    machines: dict[str, Evidence] = {}
    faults = []
    for invocation in invocations(files):
        if not can_be_shown(invocation.command):
            faults.append(f"cells of '{invocation.command}' are passed over: this cs336sys knows no such command")
            continue
        try:
            selection = Selection(invocation, shown_cells(invocation))
        except UsageError as error:
            faults.append(str(error))
            continue
        name = machine_name(invocation.runs[-1] if invocation.runs else None)
        machines.setdefault(name, Evidence(name, tests=tests)).selections.append(selection)
    most_first = sorted(machines.values(), key=lambda evidence: -len(cells_of(evidence.selections)))
    return most_first or [Evidence(tests=tests)], faults  # Without any cell, tests and arithmetic still answer.


def read_test_outcomes(path: Path) -> dict[str, str]:
    """Read which tests ``passed``, ``failed`` or were ``skipped``, by name, from a file of ``pytest --junitxml``."""
    try:
        chunks = read_chunks(path, 16 * MIB)  # The course's tests, of which there are dozens, take 20 KB.
        cases = list(ElementTree.fromstring(b"".join(chunks)).iter("testcase"))
    except UsageError:
        raise  # a ValueError that says already what is wrong
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        raise UsageError(f"cannot read the tests' outcomes from {path}: {error}") from error
    if not cases:
        raise UsageError(f"{path} holds no test's outcome: it should be a file written by pytest --junitxml")

    def outcome(case: ElementTree.Element) -> str:
        tags = {child.tag for child in case}
        return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"

    return {printable(case.get("name", "")): outcome(case) for case in cases}
