"""The tables of ``shard``, from cells that were never measured, and of ``--board``, from what two H200 gave."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.commands.shard.board_tables import board_tables
from cs336sys.commands.shard.tables import shard_tables
from cs336sys.results.model import Cell, Samples, read_results
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.table import grid_of

DERIVED = {"memory": [], "gathers": [], "timeline": None, "hidden_percent": None, "checked_layers": 2}


def cell(strategy, world_size, step_ms, attention="flash"):
    training = Workload(replace(choose_size("tiny"), batch_size=2), attention=attention)
    workload = ParallelWorkload(training, strategy, world_size)
    names = ("step", "forward", "backward", "synchronize", "optimizer", "wall", "communication")
    samples = {name: Samples("ms", "cuda events, maximum over ranks", (step_ms, step_ms)) for name in names}
    return Cell("shard", workload.configuration(), "ok", samples, DERIVED)


def test_ranks_are_compared_with_one_that_has_the_whole_batch():
    cells = [
        cell("none", 1, 100.0),
        cell("context-ring", 1, 110.0),
        cell("context-ring", 2, 55.0),
        cell("context-all-to-all", 2, 50.0),
        cell("context-all-to-all", 2, 40.0, attention="sdpa"),
    ]
    table = shard_tables(cells, None)[0]
    assert "scaling" in [column.key for column in table.columns]
    found = [row.get("scaling") for row in table.rows]
    assert found[0] is found[1] is found[4] is None
    # The ring's own, and none for what was not measured on one rank.
    assert [found[2].estimate, found[3].estimate] == pytest.approx([2.0, 2.0])


def test_without_a_single_rank_there_is_no_such_column():
    table = shard_tables([cell("context-ring", 2, 55.0)], None)[0]
    assert "over one rank, x" not in grid_of(table).headers
    assert not any("scaling" in row for row in table.rows)


SAVED = Path(__file__).parents[2] / "docs" / "results" / "board-h200.jsonl.gz"


def board(cells):
    return next(table for table in board_tables(cells, None) if table.name == "board")


def test_settings_that_differ_between_rows_have_a_column():
    """And a peak is predicted for blocks alone that choose themselves what to keep."""
    first = read_results(SAVED).cells[0]
    others = [{"prefetch": 0}, {"kernels": "reference", "compile": "block"}, {"strategy": "torch-fsdp"}]
    changed = [{**first.configuration, **settings} for settings in others]
    changed[-1]["prefetch"] = None
    table = board([first, *(replace(first, configuration=configuration) for configuration in changed)])
    shown = {column.key for column in table.columns}
    assert {"prefetch", "kernels", "compile", "strategy"} <= shown
    assert [row["prefetch"] for row in table.rows] == [1, 0, 1, None]
    predicted = [row["predicted_gib"] for row in table.rows]
    assert predicted[0] == pytest.approx(125.2, abs=0.1)
    assert predicted[1] == pytest.approx(124.9, abs=0.1)
    assert predicted[2:] == [None, None]
    assert "prefetch" not in {column.key for column in board([first, first]).columns}


def test_losses_have_a_row_for_each_step_of_cells_that_kept_them():
    first = read_results(SAVED).cells[0]
    table = board_tables([first, replace(first, derived=first.derived | {"losses": [11.5, 11.25]})], None)[-1]
    assert table.name == "losses"
    assert [(row["number"], row["loss"]) for row in table.rows] == [(1, 11.5), (2, 11.25)]
