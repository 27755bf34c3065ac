"""Which cells a resumed sweep need not measure again: those that would be measured now as they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cs336sys.results import (
    Cell,
    Results,
    Run,
    code_name,
    configuration_key,
    differing_conditions,
    folders_of,
    same_code,
)

# A resumed sweep measures these again; every other status would come out the same.
_WORTH_RETRYING = ("error", "timeout")


@dataclass(frozen=True)
class KnownCells:
    """What a results file holds of a sweep.

    Attributes:
        cells: the ones to skip, by :func:`configuration_key`.
        notes: what is measured again although the file holds it, and what was taken although it was measured otherwise.
    """

    cells: dict[str, Cell]
    notes: tuple[str, ...]


def known_cells(
    results: Results, command: str, configurations: Sequence[Mapping[str, Any]], run: Run, *, take_any: bool
) -> KnownCells:
    """The cells of a file that a sweep in ``run`` need not measure.

    They are those of a run under the same :attr:`~cs336sys.results.Run.conditions` with the same code, or of any run
    with ``take_any``; the latest, where there are several. Cells that are measured in turn (``interleave``) are known
    together, from one run, or not at all. A cell that is asked for files (``--trace``) is known if it left them there.
    """
    measured: dict[str, dict[str, Cell]] = {}
    for cell in results.cells:
        if cell.command == command and cell.status not in _WORTH_RETRYING:
            measured.setdefault(configuration_key(cell.configuration), {})[cell.run_id] = cell
    together: dict[str, list[Mapping[str, Any]]] = {}
    for configuration in configurations:
        together.setdefault(turn_key(configuration), []).append(configuration)
    differences = {
        run_id: _differences(results.runs.get(run_id), run) for cells in measured.values() for run_id in cells
    }
    known: dict[str, Cell] = {}
    otherwise: list[str] = []
    differing: dict[str, tuple[Any, Any]] = {}
    apart = 0
    for in_turn in together.values():
        keys = [configuration_key(configuration) for configuration in in_turn]
        present = [
            [run_id for run_id, cell in measured.get(key, {}).items() if _left_files(cell, configuration)]
            for key, configuration in zip(keys, in_turn, strict=True)
        ]
        complete = [run_id for run_id in present[0] if all(run_id in runs for runs in present)]
        same = [run_id for run_id in complete if not differences[run_id]]
        if complete and not same:
            otherwise += keys
            differing |= differences[complete[-1]]
        elif not complete:
            apart += sum(map(bool, present))
        taken = same or (complete if take_any else [])
        known |= {key: measured[key][taken[-1]] for key in keys if taken}
    return KnownCells(known, tuple(_notes(len(otherwise), differing, apart, take_any)))


def shown_run(cells: Sequence[Cell], results: Results, run: Run) -> Run | None:
    """The run whose machine a title may name: that of the cells; None where they are of several machines."""
    runs = {run.run_id: run} | {
        cell.run_id: results.runs.get(cell.run_id) for cell in cells if cell.run_id != run.run_id
    }
    measured_in = [runs[cell.run_id] for cell in cells] or [run]
    first = measured_in[0]
    return first if first and all(one and one.machine == first.machine for one in measured_in) else None


def _left_files(cell: Cell, asked: Mapping[str, Any]) -> bool:
    """Whether a cell left its files where they are asked for, if they are."""
    return folders_of(asked).items() <= folders_of(cell.configuration).items()


def _differences(then: Run | None, now: Run) -> dict[str, tuple[Any, Any]]:
    code = {} if same_code(then, now) else {"code": (code_name(then), code_name(now))}
    return differing_conditions(then, now) | code


def turn_key(configuration: Mapping[str, Any]) -> str:
    """Equal for the configurations that are measured in turn."""
    return configuration_key(configuration, ignore=(configuration.get("interleave", ""),))


def _notes(otherwise: int, differing: Mapping[str, tuple[Any, Any]], apart: int, take_any: bool) -> list[str]:
    notes = []
    if otherwise:
        listed = ", ".join(f"{name} ({then} then, {now} now)" for name, (then, now) in differing.items())
        cells = "1 cell" if otherwise == 1 else f"{otherwise} cells"
        if take_any:
            notes.append(f"--resume-any takes {cells} that the file holds from other conditions: {listed}")
        else:
            notes.append(
                f"--resume measures {cells} again, other conditions than in the file: {listed}; --resume-any takes them"
            )
    if apart:
        cells = "1 cell" if apart == 1 else f"{apart} cells"
        notes.append(f"--resume measures {cells} again, whose partners of --interleave are missing or of another run")
    return notes
