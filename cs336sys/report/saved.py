"""How saved cells are shown again: an entry for each command, and which cells were one invocation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cs336sys.errors import UsageError, choose_from
from cs336sys.report.attention import attn_tables, flash_tables, pool_flash_rounds
from cs336sys.report.attention_plots import plot_attn, plot_flash
from cs336sys.report.bench import bench_tables, pool_bench_rounds
from cs336sys.report.bench_plots import plot_bench
from cs336sys.report.kernels import kernel_tables, plot_kernels
from cs336sys.report.losses import loss_tables, plot_losses
from cs336sys.report.memory.files import timeline_title
from cs336sys.report.memory.plots import plot_timeline
from cs336sys.report.memory.tables import memory_tables
from cs336sys.report.noise import Interval
from cs336sys.report.parallel.allreduce import allreduce_tables
from cs336sys.report.parallel.allreduce_plots import plot_collectives
from cs336sys.report.parallel.board import is_of_board, sharding_tables
from cs336sys.report.parallel.ddp import bucket_sweeps, ddp_tables, pool_ddp_rounds
from cs336sys.report.parallel.ddp_plots import plot_buckets, plot_timelines
from cs336sys.report.parallel.scaling import plot_scaling, scaling_curves, scaling_tables
from cs336sys.report.parallel.shard_plots import plot_memory
from cs336sys.report.precision import precision_tables
from cs336sys.report.profile import plot_profiles, profile_tables
from cs336sys.report.tables import Table
from cs336sys.results import Cell, Results, Run, Samples, configuration_key, differing_conditions, same_code
from cs336sys.workload import MemoryWorkload


@dataclass(frozen=True)
class Presentation:
    """What commands are asked about how cells are shown; their options of these names, with their defaults."""

    baseline: str = "eager"
    percentiles: Sequence[float] = ()
    top: int = 5
    full_names: bool = False
    compare_precision: bool = False


Built = TypeVar("Built")

# The pictures of some cells by name, each drawn to a file.
Pictures = Mapping[str, Callable[[Path], None]]


@dataclass(frozen=True)
class SavedCommand:
    """How the cells of a command are shown again.

    Attributes:
        tables: of cells that ``pooled`` has returned.
        pictures: those that such cells have data for.
        pooled: joins the rounds of ``--rounds``.
    """

    tables: Callable[[Sequence[Cell], Run | None, Presentation], list[Table]]
    pictures: Callable[[Sequence[Cell], Run | None], Pictures] = lambda cells, run: {}
    pooled: Callable[[Sequence[Cell]], list[Cell]] = list


def _picture(
    name: str, draw: Callable[[Sequence[Cell], Path], None]
) -> Callable[[Sequence[Cell], Run | None], Pictures]:
    """One picture of all cells, if any was measured."""
    return lambda cells, run: {name: partial(draw, cells)} if _measured(cells) else {}


def _measured(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status == "ok"]


def _ddp_pictures(cells: Sequence[Cell], run: Run | None) -> Pictures:
    timelines = any(cell.derived["timeline"] is not None for cell in _measured(cells))
    pictures: dict[str, Callable[[Path], None]] = {"timelines": partial(plot_timelines, cells)} if timelines else {}
    if bucket_sweeps(cells):
        pictures["buckets"] = partial(plot_buckets, cells, option="--plot")
    return {**pictures, **_scaling_picture(cells)}


def _shard_pictures(cells: Sequence[Cell], run: Run | None) -> Pictures:
    memory = _picture("memory", plot_memory)([cell for cell in cells if not is_of_board(cell)], run)
    gathering = [cell for cell in _measured(cells) if cell.derived.get("gathers") and not is_of_board(cell)]
    timelines = {"timelines": partial(plot_timelines, gathering)} if gathering else {}
    return {**memory, **timelines, **_scaling_picture(cells)}


def _scaling_picture(cells: Sequence[Cell]) -> Pictures:
    return {"scaling": partial(plot_scaling, cells, option="--plot")} if scaling_curves(cells) else {}


def _memory_pictures(cells: Sequence[Cell], run: Run | None) -> Pictures:
    return {
        MemoryWorkload.from_configuration(cell.configuration).name: partial(
            plot_timeline, cell, timeline_title(cell, run), option="--plot"
        )
        for cell in _measured(cells)
    }


SAVED_COMMANDS: dict[str, SavedCommand] = {
    "bench": SavedCommand(
        lambda cells, run, asked: bench_tables(cells, run, asked.percentiles),
        _picture("bench", plot_bench),
        pool_bench_rounds,
    ),
    "losses": SavedCommand(lambda cells, run, asked: loss_tables(cells, run), _picture("losses", plot_losses)),
    "nsys": SavedCommand(
        lambda cells, run, asked: profile_tables(
            cells, run, top=asked.top, full_names=asked.full_names, compare_precision=asked.compare_precision
        ),
        _picture("shares", plot_profiles),
    ),
    "memprof": SavedCommand(lambda cells, run, asked: memory_tables(cells, run, asked.top), _memory_pictures),
    "attn": SavedCommand(lambda cells, run, asked: attn_tables(cells, run), _picture("attn", plot_attn)),
    "flash": SavedCommand(
        lambda cells, run, asked: flash_tables(cells, run, asked.baseline),
        _picture("flash", plot_flash),
        pool_flash_rounds,
    ),
    "kernels": SavedCommand(
        lambda cells, run, asked: kernel_tables(cells, run, asked.baseline), _picture("kernels", plot_kernels)
    ),
    "allreduce": SavedCommand(
        lambda cells, run, asked: allreduce_tables(cells, run), _picture("allreduce", plot_collectives)
    ),
    "ddp": SavedCommand(
        lambda cells, run, asked: [*ddp_tables(cells, run), *scaling_tables(cells)], _ddp_pictures, pool_ddp_rounds
    ),
    "precision": SavedCommand(lambda cells, run, asked: precision_tables(cells, run)),
    "shard": SavedCommand(
        lambda cells, run, asked: [*sharding_tables(cells, run), *scaling_tables(cells)], _shard_pictures
    ),
}


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


def shown_cells(invocation: Invocation, statuses: Sequence[str] = ()) -> list[Cell]:
    """Its cells of these statuses (of any, without one), with their rounds pooled.

    Raises:
        UsageError: nothing knows how cells of its command are shown, or they lack what that needs.
    """
    if invocation.command not in SAVED_COMMANDS:
        known = choose_from(invocation.command, SAVED_COMMANDS)
        raise UsageError(f"cells of '{invocation.command}' cannot be shown by this cs336sys: {known}")
    cells = _checked(invocation, lambda: SAVED_COMMANDS[invocation.command].pooled(list(invocation.cells.values())))
    return [cell for cell in cells if not statuses or cell.status in statuses]


def saved_tables(invocation: Invocation, cells: Sequence[Cell], presentation: Presentation, mark: bool) -> list[Table]:
    """The tables of an invocation's :func:`shown_cells`, whose titles say with ``mark`` which invocation it was.

    Raises:
        UsageError: the cells lack what the tables need.
    """
    build = SAVED_COMMANDS[invocation.command].tables
    tables = _checked(invocation, lambda: [_plain(table) for table in build(cells, invocation.run, presentation)])
    return [replace(table, title=f"{table.title} ({invocation.name})") for table in tables] if mark else tables


def _plain(table: Table) -> Table:
    for row in table.rows:
        for column in table.columns:
            if not isinstance(row.get(column.key), str | int | float | Samples | Interval | None):
                raise TypeError(f"{column.key} is {row[column.key]}")
    return table


def saved_pictures(invocation: Invocation, cells: Sequence[Cell]) -> Pictures:
    """The pictures that an invocation's :func:`shown_cells` have data for.

    Raises:
        UsageError: the cells lack what that needs.
    """
    draw = SAVED_COMMANDS[invocation.command].pictures
    return _checked(invocation, lambda: draw(cells, invocation.run))


def _checked(invocation: Invocation, build: Callable[[], Built]) -> Built:
    """What ``build`` makes of cells that another version, or another program, may have written."""
    try:
        return build()
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        lacking = f"lack {error}" if isinstance(error, KeyError) else f"hold something else than expected ({error})"
        raise UsageError(
            f"{invocation.command}, {invocation.name}: the saved cells {lacking}, so that they cannot be shown; "
            "show them with the version that measured them, or measure again"
        ) from error
