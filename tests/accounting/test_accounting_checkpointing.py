"""Checkpointing on paper: schedules by hand; what a real step holds is compared in tests/training."""

import pytest

from cs336sys.accounting.checkpointing import (
    best_group_size,
    checkpointed_moments,
    group_sizes,
    parse_checkpointing,
    predicted_peak,
)
from cs336sys.accounting.memory import widest_moments
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import ModelSize

HAND = ModelSize("hand", d_model=8, d_ff=20, num_layers=5, num_heads=2, vocab_size=50, context=4, batch_size=2)


def test_strategies_have_one_spelling():
    assert [parse_checkpointing(text) for text in ("every=1", "every=04", "nested")] == ["block", "every=4", "nested"]


@pytest.mark.parametrize("text", ["every=0", "every=-2", "every=two", "every=", "nested=2", ""])
def test_unknown_strategy_is_refused(text):
    with pytest.raises(UsageError, match=r"choose from none, block, every=K|a whole number of blocks"):
        parse_checkpointing(text)


def test_the_last_group_takes_what_is_left():
    assert group_sizes("block", 3) == [1, 1, 1]
    assert group_sizes("every=3", 8) == [3, 3, 2]
    assert group_sizes("every=9", 8) == [8]


def activations(checkpointing):
    """Activations of each moment of HAND in fp32, with sdpa attention, beside what every moment has."""
    moments = checkpointed_moments(HAND, "fp32", "train", "sdpa", checkpointing)
    return {moment.moment: moment.activations for moment in moments}


def test_one_group_of_all_blocks_saves_nothing_in_the_backward_pass():
    assert (
        activations("every=5")["feed-forward backward, block 5 of 5"]
        == activations("none")["feed-forward backward, last block"]
    )


def test_forward_without_gradients_has_no_checkpoints():
    assert checkpointed_moments(HAND, "bf16", "forward", "reference", "nested") == widest_moments(
        HAND, "bf16", "forward", "reference"
    )


def test_best_group_is_larger_where_inputs_outweigh_activations():
    """With hardly an inner layer a block saves 11 tensors as large as its input: norms (6), q, k, v, output, heads."""
    size = ModelSize("wide", d_model=64, d_ff=2, num_layers=100, num_heads=1, vocab_size=10, context=64, batch_size=99)
    found = best_group_size(size, "fp32", "forward-backward", "sdpa")
    peaks = {k: predicted_peak(size, "fp32", "forward-backward", "sdpa", f"every={k}").total for k in range(1, 101)}
    assert peaks[found.best] == min(peaks.values())
    assert found.rule == pytest.approx((100 / 11) ** 0.5, rel=0.01)
    assert found.best in (2, 3, 4)
