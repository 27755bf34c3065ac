"""Pictures of few cells are narrow: titles and legends above them are whole all the same."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cs336sys.accounting.parallelism import Layer
from cs336sys.commands.account.tables import communication
from cs336sys.commands.attention import tables as attention
from cs336sys.commands.ddp import tables as ddp
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload


@pytest.fixture
def drawn(monkeypatch):
    """Figures in place of files, drawn."""
    figures = []

    def keep(figure, *_):
        FigureCanvasAgg(figure).draw()
        figures.append(figure)

    for module in (communication, attention, ddp):
        monkeypatch.setattr(module, "write_figure", keep)
    return figures


def is_inside(artist, figure):
    box, whole = artist.get_window_extent(figure.canvas.get_renderer()), figure.bbox
    return box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0 and box.y1 <= whole.y1


def test_legend_of_many_implementations_beside_one_head_dimension(drawn, tmp_path):
    shape = {"batch_size": 1, "heads": 16, "head_dim": 64, "dtype": "bf16", "causal": True, "context": 128}
    tflops = dict.fromkeys(("forward_tflops", "backward_tflops", "end_to_end_tflops"), 10.0)
    names = ("auto", "triton", "hopper", "eager", "compiled", "sdpa-flash", "sdpa-cudnn", "flex-attention")
    cells = [Cell("flash", shape | {"implementation": name}, "ok", derived=tflops) for name in names]
    attention.plot_flash(cells, tmp_path / "flash.png")
    (figure,) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(names)
    assert is_inside(figure.legends[0], figure)


def test_heading_of_one_strategy(drawn, tmp_path):
    layer = Layer(batch=131072, d_model=2560, d_ff=10240, flops_per_s=989.4e12, bytes_per_s=450e9)
    communication.plot_parallel(["fsdp"], layer, tmp_path / "parallel.png")
    assert is_inside(drawn[0]._suptitle, drawn[0])


def test_label_of_a_bucket_that_holds_everything(drawn, tmp_path):
    training = Workload(choose_size("xl"))
    derived = {"communicated_bytes": 8_000_000_000, "link_latency_s": 20e-6, "link_bytes_per_s": 320e9}
    cells = [
        Cell(
            "ddp",
            ParallelWorkload(training, "bucketed", bucket_mb=bucket_mb).configuration(),
            "ok",
            {"step": Samples("ms", "cuda events", (90.0,))},
            derived | {"gradient_calls": calls, "exposed_ms": 30.0},
        )
        for bucket_mb, calls in ((1000.0, 8), (8000.0, 1))
    ]
    ddp.plot_buckets(cells, tmp_path / "buckets.png")
    (axes,) = drawn[0].axes
    renderer = drawn[0].canvas.get_renderer()
    plot, boxes = axes.get_window_extent(renderer), [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 2
    assert max(box.x1 for box in boxes) <= plot.x1
    assert max(box.y1 for box in boxes) <= plot.y1
