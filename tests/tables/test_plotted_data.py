"""Pictures show what saved cells hold, and nothing of them is cut: not even above narrow ones of few cells."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer

from cs336sys.commands.account import communication_tables as communication
from cs336sys.commands.attention import tables as attention
from cs336sys.commands.bench import tables as bench
from cs336sys.commands.ddp import tables as ddp
from cs336sys.commands.nsys.tables import plot_profiles, profile_tables
from cs336sys.commands.trace import kernel_tables as kernels
from cs336sys.results.model import read_results

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def saved(name):
    return list(read_results(RESULTS / f"{name}-h200.jsonl.gz").cells)


@pytest.fixture
def figures(monkeypatch):
    """Figures in place of files."""
    kept = []
    for module in (attention, bench, communication, ddp, kernels):
        monkeypatch.setattr(module, "write_figure", lambda figure, *_: kept.append(figure))
    return kept


def bars(axes):
    """Lengths of the bars of each row, from left to right."""
    rows = {}
    for patch in (patch for container in axes.containers for patch in container if isinstance(container, BarContainer)):
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2), []).append(patch)
    return {row: [bar.get_width() for bar in sorted(found, key=lambda bar: bar.get_x())] for row, found in rows.items()}


def assert_whole(figure, *more):
    """Every word of the figure lies inside it, and legends on no plot."""
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    for part in (*figure.axes, *figure.legends, *more):
        box = part.get_tightbbox(renderer)
        assert min(box.x0, box.y0) >= 0, part
        assert box.x1 <= figure.bbox.x1, part
        assert box.y1 <= figure.bbox.y1, part
    for legend in figure.legends:
        assert not any(axes.get_window_extent(renderer).overlaps(legend.get_window_extent()) for axes in figure.axes)


def test_bars_of_bench_are_the_means_of_the_phases_and_the_ratios_of_steps(figures):
    cells = saved("bench")[:8]
    cells[7] = replace(cells[7], status="oom", samples={}, derived={})
    bench.plot_bench(cells, Path("bench.png"))
    (figure,) = figures
    assert_whole(figure)
    times, speedups = figure.axes[0::2], figure.axes[1::2]
    for number, cell in enumerate(cells):
        column, row = divmod(number, 4)
        if cell.status == "oom":
            assert row not in bars(times[column])
            assert row not in bars(speedups[column])
            assert " oom" in [text.get_text() for text in times[column].texts]
            continue
        means = [cell.samples[phase].mean for phase in ("forward", "backward", "optimizer")]
        assert bars(times[column])[row] == pytest.approx(means)
        first = cells[number - row]
        ratio = first.samples["step"].median / cell.samples["step"].median
        assert bars(speedups[column])[row] == pytest.approx([ratio])
        label = f" {cell.samples['step'].mean:.4g} ms"
        assert label[:4] in [text.get_text()[:4] for text in times[column].texts]
    assert [text.get_text() for text in times[0].get_yticklabels()] == [
        "fp32, eager",
        "fp32, compiled by block",
        "bf16, eager",
        "bf16, compiled by block",
    ]
    assert times[1].get_title(loc="left") == "medium, 423.2 M parameters, batch 4 x context 512"


def test_users_model_is_drawn_without_the_parameters_of_ours_and_speed_ups_over_nothing_are_not(figures):
    cells = [
        replace(cell, configuration=cell.configuration | {"model": "mine.py:build"}) for cell in saved("bench")[:4]
    ]
    bench.plot_bench([replace(cells[0], status="oom", samples={}, derived={}), *cells[1:]], Path("bench.png"))
    (axes,) = figures[0].axes
    size = cells[0].configuration["size"]
    assert axes.get_title(loc="left") == f"{size}, mine.py:build, batch 4 x context 512"


def test_lines_of_attn_are_the_cells_and_crosses_the_predictions(figures):
    cells = saved("attn")
    lost = next(cell for cell in cells if cell.configuration["context"] == 16384)
    cells[cells.index(lost)] = replace(lost, status="oom", samples={}, derived={})
    attention.plot_attn(cells, Path("attn.png"))
    (figure,) = figures
    assert_whole(figure)
    values = {
        0: lambda cell: cell.samples["forward"].median,
        1: lambda cell: cell.samples["backward"].median,
        2: lambda cell: cell.derived["held_gib"],
        3: lambda cell: cell.derived["peak_gib"],
    }
    styles = {"eager": "-", "compiled": "--"}
    for number, value in values.items():
        lines = [line for line in figure.axes[number].lines if line.get_marker() == "o"]
        drawn = {(line.get_linestyle(), *point) for line in lines for point in zip(*line.get_data(), strict=True)}
        assert drawn == {
            (styles[cell.configuration["implementation"]], cell.configuration["context"], value(cell))
            for cell in cells
            if cell.status == "ok"
        }
    (lost_at,) = [line.get_data() for line in figure.axes[3].lines if line.get_marker() == "x"]
    assert lost_at[0] == [lost.configuration["context"]]
    assert lost_at[1] == pytest.approx([lost.derived["peak_gib"]], rel=0.01), "predicted as it was measured"
    assert sum(line.get_marker() == "+" for line in figure.axes[3].lines) == len(cells) / 2


def test_bars_of_nsys_are_the_shares_of_the_table(figures):
    cells = saved("nsys-torch")
    plot_profiles(cells, Path("nsys.png"))
    (figure,) = figures
    assert_whole(figure)
    rows = next(table for table in profile_tables(cells, None, top=1, full_names=False) if table.name == "shares").rows
    phases = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(phases) == ["forward", "loss", "backward", "optimizer", "step"]
    for number, row in enumerate(rows):
        shares = [value for key, value in row.items() if key.endswith("_percent")]
        drawn = bars(phases[row["phase"]])[number // len(phases)]
        assert sorted(drawn) == pytest.approx(sorted(shares))
        assert sum(drawn) == pytest.approx(100)
    colors = {to_hex(handle.get_facecolor()) for handle in figure.legends[0].get_patches()}
    used = {to_hex(patch.get_facecolor()) for axes in figure.axes for patch in axes.patches}
    assert used == colors, "every colour has its name"
