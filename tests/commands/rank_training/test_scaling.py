"""Speed and memory by ranks, from cells that were never measured."""

from dataclasses import replace

import pytest

from cs336sys.accounting.memory import GIB
from cs336sys.commands.rank_training import scaling_tables as scaling
from cs336sys.commands.rank_training.scaling_tables import plot_scaling, scaling_curves, scaling_tables
from cs336sys.commands.registry import saved_command
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.saved import Presentation
from cs336sys.tables.table import with_rows

MEMORY = {"parameters": 0, "gradients": 0, "optimizer_state": 0, "rest": GIB}


def cell(strategy, ranks, batch, step_ms, status="ok", command="shard"):
    training = Workload(replace(choose_size("tiny"), batch_size=batch), attention="flash")
    bucket = 1.0 if strategy == "bucketed" else None
    workload = ParallelWorkload(training, strategy, ranks, prefetch=1 if strategy == "fsdp" else None, bucket_mb=bucket)
    names = ("step", "forward", "backward", "synchronize", "optimizer", "wall", "communication")
    samples = {name: Samples("ms", "cuda events", (step_ms,) * 6) for name in names}
    samples["unsynchronized"] = Samples("ms", "cuda events", (0.8 * step_ms,) * 6)
    derived = {
        "tokens_per_s": batch * training.size.context / step_ms * 1e3,
        "peak_gib": 10.0 / ranks,
        "gathers": [],
        "timeline": None,
        "hidden_percent": None,
        "checked_layers": 2,
    }
    if command == "shard":
        derived["memory"] = [{"moment": "peak", **MEMORY}]
    return Cell(command, workload.configuration(), status, samples if status == "ok" else {}, derived)


CELLS = [
    cell("none", 1, 4, 100.0),
    cell("none", 1, 8, 190.0),
    cell("fsdp", 2, 4, 62.5),
    cell("fsdp", 2, 8, 110.0),
    cell("fsdp", 4, 8, 50.0),
    cell("fsdp", 4, 16, 100.0, "oom"),
]


def shapes(curves):
    return [
        (curve.scaling, [(one.configuration["world_size"], one.configuration["batch_size"]) for one in curve.cells])
        for curve in curves
    ]


def test_strong_curves_keep_the_batch_and_weak_ones_the_share_of_a_rank():
    assert shapes(scaling_curves(CELLS)) == [
        # One rank of no strategy is where every strategy begins.
        ("strong", [(1, 4), (2, 4)]),
        ("strong", [(1, 8), (2, 8), (4, 8)]),
        ("weak", [(2, 4), (4, 8)]),
        ("weak", [(1, 4), (2, 8)]),
    ]


def test_a_strategy_begins_at_its_own_single_rank_where_that_was_measured():
    own = cell("fsdp", 1, 4, 125.0)
    for cells in ([own, *CELLS], [*CELLS, own]):
        begins = [curve.cells[0] for curve in scaling_curves(cells) if curve.cells[-1] is CELLS[2]]
        assert begins == [own]


def test_a_rank_is_held_to_one_rank_by_its_rate():
    (table,) = scaling_tables(CELLS)
    of_linear = {(row["scaling"], row["world_size"], row["batch_size"]): row["linear_percent"] for row in table.rows}
    assert of_linear["strong", 1, 4] is None
    assert of_linear["strong", 2, 4].estimate == pytest.approx(100 * 100 / (2 * 62.5))
    assert of_linear["strong", 4, 8].estimate == pytest.approx(100 * 190 / (4 * 50))
    assert of_linear["weak", 2, 8].estimate == pytest.approx(100 * 100 / 110)
    assert table.rows[1]["peak_gib"] == 5.0
    assert table.rows[1]["exposed_percent"].estimate == pytest.approx(20.0)
    assert table.rows[1]["predicted_peak_gib"] > 0


def test_peaks_of_a_board_are_those_of_its_gpus():
    def of_board(ranks, peaks):
        one = cell("fsdp", ranks, 8, 80.0 / ranks)
        return replace(one, derived=one.derived | {"peak_gib": None, "memory": [], "peaks_gib": peaks})

    (table,) = scaling_tables([of_board(1, [3.0]), of_board(2, [1.0, 2.0]), of_board(4, [None] * 4)])
    assert [row["peak_gib"] for row in table.rows] == [3.0, 2.0, None]


def test_without_several_numbers_of_ranks_there_is_neither_table_nor_picture():
    cells = [cell("fsdp", 2, 4, 50.0), cell("none", 2, 8, 50.0)]
    assert with_rows(*scaling_tables(cells)) == []
    assert "scaling" not in saved_command("shard").pictures(cells, None, Presentation())


@pytest.mark.parametrize("command", ["ddp", "shard"])
def test_saved_cells_are_shown_by_ranks(command):
    strategy = {"ddp": "bucketed", "shard": "fsdp"}[command]
    cells = [cell(strategy, ranks, 4, 100.0 / ranks, command=command) for ranks in (1, 2)]
    for one in cells:
        one.derived.update(gradient_calls=1, communicated_bytes=1e6, link_latency_s=1e-5, link_bytes_per_s=1e9)
    saved = saved_command(command)
    assert saved.tables(cells, None, Presentation())[-1].name == "scaling"
    assert "scaling" in saved.pictures(cells, None, Presentation())


def test_the_picture_draws_every_curve_beside_its_line(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(scaling, "write_figure", lambda figure, *_: figures.append(figure))
    plot_scaling(CELLS, tmp_path / "scaling.png")
    axes = figures[0].axes
    assert len(axes) == 6
    lines = [list(line.get_ydata()) for line in axes[0].lines]
    tokens = [one.derived["tokens_per_s"] for one in CELLS]
    assert lines[:2] == [[tokens[0], tokens[2]], [tokens[0], 2 * tokens[0]]]
    assert axes[2].lines[0].get_ydata()[0] == 10.0
    assert [text.get_text() for text in axes[3].get_legend().get_texts()] == ["fsdp, 2 a rank", "fsdp, 4 a rank"]
