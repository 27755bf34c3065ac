"""Cells that earlier versions saved, as they are read today."""

from pathlib import Path

import pytest

from cs336sys.earlier_results import with_whole_step
from cs336sys.results import Samples, read_results

SAVED = Path(__file__).parent.parent / "docs/results/shard-2.7b-first-h200.jsonl.gz"


def test_a_step_lasts_until_its_parameters_are_sent():
    """The one that shares the optimizer's work was 22 % faster by its events, and is 9 % by the clock, or noise."""
    whole, shared = read_results(SAVED).cells
    assert [cell.configuration["strategy"] for cell in (whole, shared)] == ["none", "optimizer"]
    assert whole.samples["step"].method == "cuda events, maximum over ranks"
    assert shared.samples["step"] == shared.samples["wall"]
    assert whole.samples["step"].median / shared.samples["step"].median == pytest.approx(1.091, abs=1e-3)
    assert shared.derived["exposed_ms"] == pytest.approx(29.38, abs=0.01)
    assert shared.derived["tokens_per_s"] == pytest.approx(2048 / (shared.samples["wall"].mean / 1e3), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "derived"),
    [
        ({"strategy": "fsdp"}, {}),
        ({"cuda_graph": "on"}, {}),
        ({"synchronize": "none"}, {}),
        ({}, {"parameters_sent_in": "forward"}),
    ],
)
def test_other_steps_are_as_they_were_timed(settings, derived):
    names = {"strategy": "optimizer-flat", "synchronize": "step"} | settings
    samples = {name: Samples("ms", "cuda events", (ms,)) for name, ms in (("step", 90.0), ("wall", 100.0))}
    record = {"command": "shard", "configuration": names, "samples": samples, "derived": derived}
    assert with_whole_step(record) == record
    if derived:
        record["derived"] = {"tokens_per_s": 1000.0}
        corrected = with_whole_step(record)
        assert corrected["samples"]["step"] == samples["wall"]
        assert corrected["derived"] == {"tokens_per_s": 900.0}
