"""The timeline of ``memprof`` as a picture and on its page: nothing is cut, nothing stands on something else."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cs336sys.commands.bench import tables as bench_report
from cs336sys.commands.memprof.page import CATEGORY_STYLES, timeline_figure

EVENTS = 80


def drawn(activations, *phases, title="tiny"):
    """Boxes of the texts above the plot and of the peak's label, of the plot, and of the figure's legend."""
    timeline = dict.fromkeys(CATEGORY_STYLES, [0] * EVENTS) | {"position": list(range(EVENTS))}
    timeline["activations"] = activations
    regions = [{"name": name, "start": start, "end": end} for name, start, end in phases]
    figure = timeline_figure({"timeline": timeline, "regions": regions}, title)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    renderer = canvas.get_renderer()
    texts = {text.get_text(): text.get_window_extent(renderer) for text in [*axes.texts, axes.title]}
    return axes, texts, axes.get_window_extent(renderer), figure.legends[0].get_window_extent(renderer)


PHASES = {
    "as in a large model": (("forward", 0, 29), ("loss", 30, 32), ("backward", 33, 76), ("optimizer", 77, 79)),
    "all but one narrow": (("forward", 0, 2), ("loss", 2, 3), ("backward", 3, 5), ("optimizer", 5, 79)),
}


@pytest.mark.parametrize("phases", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("peak", [0, 40, EVENTS - 1])
def test_no_word_is_cut_or_overprinted(phases, peak):
    held = [2**30 - 2**22 * abs(event - peak) for event in range(EVENTS)]
    _, texts, plot, legend = drawn(held, *phases)
    assert {name for name, _, _ in phases} | {"1.000 GiB", "tiny"} == set(texts)
    for (one, first), (other, second) in itertools.combinations(texts.items(), 2):
        assert not first.overlaps(second), f"{one} stands on {other}"
    for text, box in texts.items():
        assert max(plot.x0 - box.x0, box.x1 - plot.x1) <= 0, f"{text} is cut by an axis"
    assert texts["1.000 GiB"].y1 < plot.y1
    assert legend.x0 > plot.x1


def test_a_long_title_ends_before_the_legend():
    title = (
        "2.7b: batch 4 x context 2048, forward-backward, bf16, reference attention, compile off, checkpointing every=4"
    )
    _, texts, _, legend = drawn([1] * EVENTS, ("forward", 0, 79), title=f"{title}, NVIDIA H200, torch 2.11.0+cu130")
    (box,) = [box for text, box in texts.items() if text.startswith("2.7b")]
    assert box.x0 >= 0
    assert box.x1 <= legend.x0


def test_the_axis_has_the_unit_of_a_tiny_model():
    axes, texts, *_ = drawn([3 * 2**19] * EVENTS, ("forward", 0, 79))
    assert axes.get_ylabel() == "active memory, MiB"
    assert axes.get_ylim() == (0, pytest.approx(1.12 * 1.5))
    assert "1.500 MiB" in texts


# How cones that lack one pigment see linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
VISION = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def seen(color, vision):
    """The color in CIELAB, as somebody with this vision sees it."""
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    light = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(matrix @ light / (0.9505, 1, 1.089), 0.0089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_categories_are_told_apart_without_a_pigment(vision):
    palettes = [{name: style.color for name, style in CATEGORY_STYLES.items()}, bench_report._COLORS]
    for palette in palettes:
        for (first, color), (second, other) in itertools.combinations(palette.items(), 2):
            distance = np.linalg.norm(seen(color, vision) - seen(other, vision))
            assert distance > 15, f"{first} and {second} are one color"
    neighbours = itertools.pairwise(style.hatch for name, style in CATEGORY_STYLES.items() if name != "unknown")
    assert all(first != second for first, second in neighbours)
