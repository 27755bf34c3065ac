"""The tables that commands make of cells which were never measured, as ``tables_of_cells.txt`` has them.

An expression chooses columns of a table; below it stand its rows (tests/written_figures.py). Pictures of them, too.
"""

# Further names are used in tables_of_cells.txt.
# ruff: noqa: F401

import math
from dataclasses import replace
from pathlib import Path

import pytest
from unmeasured_cells import (
    ALONE,
    COLLECTIVES,
    CONTEXT_CELLS,
    DDP_CELLS,
    DDP_ROUNDS,
    KERNEL_CELLS,
    RANK_CELLS,
    attn_cell,
    collective_cell,
    configured,
    ddp_cell,
    derived,
    flash_cell,
    in_parts,
    in_rounds,
    not_hidden,
    of_board,
    profiled,
    rank_cell,
    samples,
)
from written_figures import read_figures, rows_of, write_figures

from cs336sys.capture.analysis import Analysis, KernelGroup
from cs336sys.capture.taxonomy import Category
from cs336sys.commands.allreduce.tables import allreduce_tables, fit_of, groups_of, plot_collectives
from cs336sys.commands.attention.tables import attn_tables, flash_tables, pool_flash_rounds
from cs336sys.commands.ddp.tables import bucket_sweeps, ddp_plan, ddp_tables, plot_buckets, pool_ddp_rounds
from cs336sys.commands.kernels.tables import kernel_tables
from cs336sys.commands.nsys.tables import profile_tables
from cs336sys.commands.rank_training.tables import plot_scaling, scaling_curves, scaling_tables
from cs336sys.commands.registry import saved_command
from cs336sys.commands.shard.tables import board_tables, shard_tables
from cs336sys.commands.trace.tables import kind_table
from cs336sys.results.model import Run, Samples, read_results
from cs336sys.results.statistics import Interval
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.render import render
from cs336sys.tables.saved import Presentation
from cs336sys.tables.table import grid_of, with_rows

PATH = Path(__file__).with_name("tables_of_cells.txt")
BOARD = Path(__file__).parents[2] / "docs" / "results" / "board-h200.jsonl.gz"
H200 = Run("a", "", (), {"gpu": "NVIDIA H200"}, {})


def plain(value):
    """Return the median of samples, and of an interval the estimate."""
    return value.median if isinstance(value, Samples) else value.estimate if isinstance(value, Interval) else value


def shown(tables, name, *keys):
    """Return the rows of the table of this name, with these columns."""
    return [tuple(plain(row.get(key)) for key in keys) for table in tables if table.name == name for row in table.rows]


def notes(tables, name, part=""):
    return [note for table in tables if table.name == name for note in table.notes if part in note]


def names(tables):
    """Return those of tables with rows."""
    return [table.name for table in with_rows(*tables)]


def curves(cells):
    return [
        (curve.scaling, [(cell.configuration["world_size"], cell.configuration["batch_size"]) for cell in curve.cells])
        for curve in scaling_curves(cells)
    ]


def nsys(*cells, **options):
    return with_rows(*profile_tables(cells, None, top=5, full_names=False, **options))


def unclassified(*groups):
    """The table of kinds of kernels: each has a name, a module and a time."""
    kernels = tuple(
        KernelGroup(name, Category.UNCLASSIFIED, module, "", "", (1,), (ms,), (ms,)) for name, module, ms in groups
    )
    return kind_table(Analysis("f", "", "torch.profiler", True, "", 0, "", True, (6.0,), {}, kernels, (), (), {}, {}))


def board(*changes):
    """The table of the board's first saved cell, and of the same in other settings."""
    first = read_results(BOARD).cells[0]
    tables = board_tables([first, *(configured(first, **settings) for settings in changes)], None)
    return next(table for table in tables if table.name == "board")


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_tables_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


@pytest.fixture
def drawn(monkeypatch):
    """Figures in the place of their files."""
    figures = []
    for module in ("allreduce.tables", "rank_training.tables"):
        writer = f"cs336sys.commands.{module}.write_figure"
        monkeypatch.setattr(writer, lambda figure, *arguments, **options: figures.append(figure))
    return figures


def test_bandwidths_are_those_of_median_calls(tmp_path, drawn):
    # A stall: the mean of 100, 100 and 400 us is 200, and its bandwidth half of the median's.
    stalled = {"back_to_back": samples(100.0, 100.0, 400.0, unit="us")}
    cells = [replace(collective_cell(size, 200.0), samples=stalled) for size in (10**6, 10**7)]
    plot_collectives(cells, tmp_path / "r.png")
    (line,) = drawn[0].axes[1].get_lines()
    assert list(line.get_ydata()) == pytest.approx([10.0, 100.0])


def test_every_curve_is_drawn_beside_its_line(tmp_path, drawn):
    plot_scaling(RANK_CELLS, tmp_path / "scaling.png")
    axes = drawn[0].axes
    assert len(axes) == 6
    lines = [list(line.get_ydata()) for line in axes[0].lines]
    tokens = [cell.derived["tokens_per_s"] for cell in RANK_CELLS]
    assert lines[:2] == [[tokens[0], tokens[2]], [tokens[0], 2 * tokens[0]]]
    assert axes[2].lines[0].get_ydata()[0] == 10.0
    assert [text.get_text() for text in axes[3].get_legend().get_texts()] == ["fsdp, 2 a rank", "fsdp, 4 a rank"]


@pytest.mark.parametrize(("more", "is_drawn"), [({}, True), ({"link_bytes_per_s": math.inf}, False)])
def test_the_model_of_buckets_is_drawn_where_a_bandwidth_was_found(more, is_drawn, tmp_path):
    plot_buckets([ddp_cell("bucketed", 90.0, bucket_mb=100.0, **more)], tmp_path / "b.svg")
    assert ("model: s / (n w) + n o" in (tmp_path / "b.svg").read_text()) == is_drawn


def test_no_bucket_measured_is_a_picture_too(tmp_path):
    plot_buckets([DDP_CELLS[3]], tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()


if __name__ == "__main__":
    write_figures(PATH, globals())
