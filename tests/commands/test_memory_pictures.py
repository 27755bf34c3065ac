"""The timeline of ``memprof`` as a picture: nothing is cut, nothing stands on something else."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cs336sys.commands.memprof.page import CATEGORY_STYLES, timeline_figure

EVENTS = 80


def drawn(activations, *phases):
    """Boxes of the texts above the plot and of the peak's label, of the plot, and of the figure's legend."""
    timeline = dict.fromkeys(CATEGORY_STYLES, [0] * EVENTS) | {"position": list(range(EVENTS))}
    timeline["activations"] = activations
    regions = [{"name": name, "start": start, "end": end} for name, start, end in phases]
    figure = timeline_figure({"timeline": timeline, "regions": regions}, "tiny")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    renderer = canvas.get_renderer()
    texts = {text.get_text(): text.get_window_extent(renderer) for text in [*axes.texts, axes.title]}
    return texts, axes.get_window_extent(renderer), figure.legends[0].get_window_extent(renderer)


PHASES = {
    "as in a large model": (("forward", 0, 29), ("loss", 30, 32), ("backward", 33, 76), ("optimizer", 77, 79)),
    "all but one narrow": (("forward", 0, 2), ("loss", 2, 3), ("backward", 3, 5), ("optimizer", 5, 79)),
}


@pytest.mark.parametrize("phases", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("peak", [0, 40, EVENTS - 1])
def test_no_word_is_cut_or_overprinted(phases, peak):
    held = [2**30 - 2**22 * abs(event - peak) for event in range(EVENTS)]
    texts, plot, legend = drawn(held, *phases)
    assert {name for name, _, _ in phases} | {"1.000 GiB", "tiny"} == set(texts)
    for (one, first), (other, second) in itertools.combinations(texts.items(), 2):
        assert not first.overlaps(second), f"{one} stands on {other}"
    for text, box in texts.items():
        assert max(plot.x0 - box.x0, box.x1 - plot.x1) <= 0, f"{text} is cut by an axis"
    assert texts["1.000 GiB"].y1 < plot.y1
    assert legend.x0 > plot.x1
