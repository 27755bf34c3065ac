"""Timelines of a step on paper, and what is refused as a snapshot, written down in ``figures.txt``."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

from written_figures import figures_test, outcome

from cs336sys.allocations.dump import Frame, read_dump
from cs336sys.allocations.inference import FORWARD, NOTHING, code_of, role
from cs336sys.allocations.timeline import (
    RECOMPUTATION,
    Event,
    Gradient,
    Origin,
    Region,
    Span,
    build_timeline,
    largest_allocations,
    peak_position,
    thinned,
)

# A train step of one layer: weight 100, moments 200, activation 40 and a temporary 7 in the forward pass, a gradient of
# 100 and a temporary 30 in the backward pass, a temporary 90 in the update.
STEP = ((1, 40), (2, 7), (2, -7), (3, 30), (4, 100), (3, -30), (1, -40), (2, 90), (2, -90), (4, -100))
REGIONS = [Region("forward", 0, 3), Region("backward", 3, 7), Region("optimizer", 7, 10)]
HELD = {100: (100, "parameters"), 101: (200, "optimizer state")}
GRADIENT = Gradient(5, 4, "layers.3.ffn.w1.weight")


def timeline(*events, **more):
    return build_timeline([Event(*event) for event in events], **more)


def step(events=STEP, **more):
    arguments = {"regions": REGIONS, "live_blocks": HELD, "gradients": [GRADIENT], "optimizer_state": [101]}
    return timeline(*events, **arguments | more)


def scores(layer):
    return Origin(f"layers.{layer}.attn", "bmm", "model.py:1 f")


def largest(of_timeline, count):
    names = ("size", "count", "peak_count", "category", "phase", "module", "operation", "code")
    return [tuple(group[name] for name in names) for group in largest_allocations(of_timeline, count)]


def read(snapshot):
    """Return why a file with this is refused."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "s.pickle")
        path.write_bytes(pickle.dumps(snapshot, 4))
        return outcome(read_dump, path).replace(f"{folder}/", "")


test_figures_are_those_written_down = figures_test(globals())
