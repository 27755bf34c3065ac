"""How the cells of each command are shown again: a new command's entry is made here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cs336sys.report.attention import attn_tables, flash_tables, pool_flash_rounds
from cs336sys.report.attention_plots import plot_attn, plot_flash
from cs336sys.report.bench import bench_tables, pool_bench_rounds
from cs336sys.report.bench_plots import plot_bench
from cs336sys.report.kernels import kernel_tables, plot_kernels
from cs336sys.report.losses import loss_tables, plot_losses
from cs336sys.report.memory.files import timeline_title
from cs336sys.report.memory.plots import plot_timeline
from cs336sys.report.memory.tables import memory_tables
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
from cs336sys.results import Cell, Run
from cs336sys.workload import MemoryWorkload


@dataclass(frozen=True)
class Presentation:
    """What commands are asked about how cells are shown; their options of these names, with their defaults."""

    baseline: str = "eager"
    percentiles: Sequence[float] = ()
    top: int = 5
    full_names: bool = False
    compare_precision: bool = False


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
