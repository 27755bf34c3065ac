"""The tables of ``shard --board``, from what two H200 gave."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.commands.shard.board_tables import board_tables
from cs336sys.results.model import read_results

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
