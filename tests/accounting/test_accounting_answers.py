"""Answers about one model, its checkpoints, and buckets: worked by hand, and against the formulas they build on."""

import pytest

from cs336sys.accounting.checkpointing import parse_checkpointing
from cs336sys.accounting.memory import best_group_size
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import Workload


def test_strategies_have_one_spelling():
    assert [parse_checkpointing(text) for text in ("every=1", "every=04", "nested")] == ["block", "every=4", "nested"]


@pytest.mark.parametrize("text", ["every=0", "every=two", "nested=2", ""])
def test_unknown_strategy_is_refused(text):
    with pytest.raises(UsageError, match=r"choose from none, block, every=K|a whole number of blocks"):
        parse_checkpointing(text)


def test_best_group_is_larger_where_inputs_outweigh_activations():
    """With hardly an inner layer a block saves 11 tensors as large as its input: norms (6), q, k, v, output, heads."""
    size = ModelSize("wide", d_model=64, d_ff=2, num_layers=100, num_heads=1, vocab_size=10, context=64, batch_size=99)
    found = best_group_size(size, "fp32", "forward-backward", "sdpa")
    step = Workload(size, "forward-backward", attention="sdpa")
    peaks = {k: step.predicted_peak(f"every={k}").total for k in range(1, 101)}
    assert peaks[found.best] == min(peaks.values())
    assert found.rule == pytest.approx((100 / 11) ** 0.5, rel=0.01)
    assert found.best in (2, 3, 4)
