"""Which saved cells were one invocation of a command."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cs336sys.results import Cell, Results, Run, configuration_key, differing_conditions, same_code


@dataclass
class Invocation:
    """The cells that one invocation of a command printed.

    Attributes:
        runs: the one that measured them, after those that it resumed.
        cells: by their configuration.
    """

    command: str
    runs: list[Run] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def run(self) -> Run | None:
        """The last run, whose machine a title may name; None where there were several machines."""
        return self.runs[-1] if self.runs and all(run.machine == self.runs[-1].machine for run in self.runs) else None

    @property
    def name(self) -> str:
        """What tells it from other invocations of the command."""
        return f"run {self.runs[-1].run_id[:8]} of {self.runs[-1].time}" if self.runs else "a run not recorded"


def invocations(files: Sequence[Results]) -> list[Invocation]:
    """The invocations whose cells these files hold, in their order, every cell once.

    A run with ``--resume`` goes on with what its file held before it, if that was measured alike; of cells that it
    measured again the later ones are kept, as it printed them.
    """
    found: dict[tuple[str, str], Invocation] = {}
    for results in files:
        in_file: dict[str, list[Invocation]] = {}
        for cell in results.cells:
            run, key = results.runs.get(cell.run_id), (cell.command, cell.run_id)
            earlier = in_file.setdefault(cell.command, [])
            if key not in found:
                resumed = next((one for one in reversed(earlier) if _is_resumed(one, run)), None)
                found[key] = resumed or Invocation(cell.command)
                found[key].runs += [run] if run is not None else []
            if found[key] not in earlier:
                earlier.append(found[key])
            found[key].cells[configuration_key(cell.configuration)] = cell
    return list({id(invocation): invocation for invocation in found.values()}.values())


def _is_resumed(earlier: Invocation, run: Run | None) -> bool:
    if run is None or not earlier.runs:
        return False
    before = earlier.runs[-1]
    alike = not differing_conditions(before, run) and same_code(before, run) is not False
    return "--resume-any" in run.arguments or ("--resume" in run.arguments and alike)
