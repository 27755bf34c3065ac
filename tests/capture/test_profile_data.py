"""Reports that runs on an H200 left: `nsys --size tiny --context 128 --batch-size 1 --steps 1 --warmup 2`, and a graph.

The tables that nobody reads here, and their strings, were taken out of the nsys exports.
"""

from pathlib import Path

import pytest

from cs336sys.capture.reading import open_capture
from cs336sys.capture.summary import summarize
from cs336sys.capture.taxonomy import Category, category_of
from cs336sys.errors import UsageError

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["step.sqlite", "step.trace.json.gz"])
def test_a_training_step(name):
    profile = summarize(open_capture(DATA / name))
    kernels = {row.name: row.kernels for row in profile.phases}
    assert list(kernels) == ["forward", "loss", "backward", "optimizer"]
    assert kernels["backward"] > kernels["forward"] > 0
    assert profile.attributed_percent > 99
    assert sum(row.kernel_ns for row in profile.phases) == pytest.approx(profile.step.kernel_ns, rel=0.01)
    kinds = {category_of(kernel.kernel) for kernel in profile.kernels}
    assert Category.MATMUL in kinds
    assert Category.UNCLASSIFIED not in kinds
    assert profile.configuration["size"] == "tiny"


def test_kernels_of_a_graph_that_was_traced_by_node():
    profile = summarize(open_capture(DATA / "graph-node.sqlite"))
    (phase,) = profile.phases
    # Two replays of a matrix product, ReLU and a sum.
    assert (phase.name, phase.count, phase.kernels) == ("forward", 2, 8)
    assert profile.attributed_percent == 100


def test_a_graph_that_was_traced_as_a_whole_is_refused():
    with pytest.raises(UsageError, match="--cuda-graph-trace=node"):
        summarize(open_capture(DATA / "graph-whole.sqlite"))
