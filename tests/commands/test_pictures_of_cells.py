"""The pictures that commands draw of cells which were never measured."""

import math
from dataclasses import replace

import pytest
from unmeasured_cells import DDP_CELLS, KERNEL_CELLS, RANK_CELLS, collective_cell, ddp_cell, flash_cell, samples

from cs336sys.commands.allreduce.tables import plot_collectives
from cs336sys.commands.attention.tables import plot_flash
from cs336sys.commands.ddp.tables import plot_buckets
from cs336sys.commands.kernels.tables import plot_kernels
from cs336sys.commands.rank_training.scaling_tables import plot_scaling
from cs336sys.commands.rank_training.tables import plot_timelines


@pytest.fixture
def drawn(monkeypatch):
    """Figures in the place of their files."""
    figures = []
    for module in ("allreduce.tables", "rank_training.scaling_tables"):
        writer = f"cs336sys.commands.{module}.write_figure"
        monkeypatch.setattr(writer, lambda figure, *arguments, **options: figures.append(figure))
    return figures


def test_collectives_stand_side_by_side_by_backend_and_time_over_ranks(tmp_path, drawn):
    cells = [
        collective_cell(size, 10.0 * ranks + size / 1e5, ranks, backend)
        for backend in ("gloo", "nccl")
        for ranks in (1, 2, 4)
        for size in (10**3, 10**6)
    ]
    plot_collectives(cells, tmp_path / "r.png")
    axes = drawn[0].axes
    assert [drawing.get_title() for drawing in axes[:2]] == ["all_reduce fp32 gloo", "all_reduce fp32 nccl"]
    labels = [[line.get_label() for line in drawing.get_lines() if line.get_label()[0] != "_"] for drawing in axes]
    assert labels[0] == labels[1] == ["1 ranks", "2 ranks", "4 ranks"]
    assert labels[2] == labels[3] == ["2 ranks", "4 ranks"], "one rank has no bus"
    assert labels[4] == labels[5] == ["1.00 MB", "1.00 KB"]
    over_ranks = axes[5].get_lines()[0]
    assert list(over_ranks.get_xdata()) == [1, 2, 4]
    assert list(over_ranks.get_ydata()) == [20.0, 30.0, 50.0]


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


def test_timelines_show_every_measured_cell(tmp_path):
    plot_timelines([*DDP_CELLS, ddp_cell("flat", 80.5), ddp_cell("overlap", 90.0, timeline=None)], tmp_path / "t.svg")
    # matplotlib writes text as outlines, with the text itself in a comment.
    text = (tmp_path / "t.svg").read_text()
    assert text.count("of which 10.0 ms overlapped with computing") == 5
    assert "flat xl bf16: communication 20.0 ms, of which 10.0 ms overlapped with computing; exposed &lt; " in text
    assert "naive xl fp32: communication 20.0 ms, of which 10.0 ms overlapped with computing; exposed 160.0 ms" in text
    assert "bucketed 100 MB xl bf16: communication 20.0 ms" in text


@pytest.mark.parametrize(("more", "is_drawn"), [({}, True), ({"link_bytes_per_s": math.inf}, False)])
def test_the_model_of_buckets_is_drawn_where_a_bandwidth_was_found(more, is_drawn, tmp_path):
    plot_buckets([ddp_cell("bucketed", 90.0, bucket_mb=100.0, **more)], tmp_path / "b.svg")
    assert ("model: s / (n w) + n o" in (tmp_path / "b.svg").read_text()) == is_drawn


def test_kernels_that_were_measured_are_drawn(tmp_path):
    plot_kernels(KERNEL_CELLS, tmp_path / "kernels.svg")
    picture = (tmp_path / "kernels.svg").read_text()
    assert all(f"<!-- {text} -->" in picture for text in ("ours", "eager", "swiglu", "rope", "end-to-end, % of a copy"))
    assert not any(name in picture for name in ("liger", "chunked"))


@pytest.mark.parametrize(
    ("plot", "cell"),
    [
        (plot_timelines, DDP_CELLS[3]),
        (plot_buckets, DDP_CELLS[3]),
        (plot_collectives, collective_cell(10**6, 0, status="unsupported")),
        (plot_flash, flash_cell("eager", 1.0, status="wrong")),
    ],
)
def test_nothing_measured_is_a_picture_too(plot, cell, tmp_path):
    plot([cell], tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()
