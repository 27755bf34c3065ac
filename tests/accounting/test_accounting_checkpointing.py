"""Checkpointing on paper: schedules by hand; what a real step holds is compared in tests/training."""

from dataclasses import replace

import pytest

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import (
    best_group_size,
    checkpointed_moments,
    group_sizes,
    parse_checkpointing,
    predicted_peak,
    recomputed_blocks,
    recomputed_flops,
)
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.memory import GIB, widest_moments
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES, ModelSize

HAND = ModelSize("hand", d_model=8, d_ff=20, num_layers=5, num_heads=2, vocab_size=50, context=4, batch_size=2)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [("none", "none"), ("block", "block"), ("every=1", "block"), ("every=04", "every=4"), ("nested", "nested")],
)
def test_strategies_have_one_spelling(text, strategy):
    assert parse_checkpointing(text) == strategy


@pytest.mark.parametrize(
    "text", ["all", "every", "every=0", "every=-2", "every=two", "every=", "nested=2", "block=1", ""]
)
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


def test_groups_worked_by_hand():
    """Blocks 1-2, 3-4, 5 with a checkpoint each: the stretch's activations and the inputs of those before it."""
    b = block_activations(HAND, "fp32", "sdpa").total
    s = 4 * 8 * 8
    common = activations("none")["feed-forward backward, first block"] - b
    found = activations("every=2")
    assert {name: size - common for name, size in found.items() if name.startswith("feed")} == {
        "feed-forward backward, block 5 of 5": b + 2 * s,
        "feed-forward backward, block 4 of 5": 2 * b + s,
        "feed-forward backward, block 3 of 5": b + s,
        "feed-forward backward, block 2 of 5": 2 * b,
        "feed-forward backward, block 1 of 5": b,
    }
    assert activations("none")["loss"] - found["loss"] == 5 * b - 3 * s


def test_nested_halves_worked_by_hand():
    """Halves 1-3 and 4-5, of these 1-2 and 3, 4 and 5, and 1 and 2: a block waits for every half to its left."""
    b = block_activations(HAND, "fp32", "sdpa").total
    s = 4 * 8 * 8
    common = activations("none")["feed-forward backward, first block"] - b
    waiting = [
        (activations("nested")[f"feed-forward backward, block {block} of 5"] - common - b) // s for block in range(1, 6)
    ]
    assert waiting == [0, 1, 1, 1, 2]
    assert activations("none")["loss"] - activations("nested")["loss"] == 5 * b - 2 * s


def test_one_group_of_all_blocks_saves_nothing_in_the_backward_pass():
    assert (
        activations("every=5")["feed-forward backward, block 5 of 5"]
        == activations("none")["feed-forward backward, last block"]
    )


def test_forward_without_gradients_has_no_checkpoints():
    assert checkpointed_moments(HAND, "bf16", "forward", "reference", "nested") == widest_moments(
        HAND, "bf16", "forward", "reference"
    )


@pytest.mark.parametrize(
    ("layers", "strategy", "blocks", "ends"),
    [
        (5, "block", 5, 5),
        (5, "every=2", 5, 3),
        (1, "nested", 1, 1),
        # 1-2 | 3-4: inside each half its left block runs once more.
        (4, "nested", 4 + 2, 4),
        # N/2 log2 N + N/2 = 80 + 16.
        (32, "nested", 96, 32),
    ],
)
def test_recomputed_blocks(layers, strategy, blocks, ends):
    assert recomputed_blocks(layers, strategy) == (blocks, ends)


def test_recomputation_of_every_block_is_a_third_less_one_product_and_the_head():
    size = SIZES["2.7b"]
    forward = model_flops(size, backward=False)
    head = 2 * 4 * 512 * 2560 * 10_000
    w2 = 2 * 4 * 512 * 10240 * 2560
    assert recomputed_flops(size, "block") == forward - head - 32 * w2
    assert recomputed_flops(size, "every=8") == forward - head - 4 * w2
    assert recomputed_flops(size, "none") == 0


def test_best_group_of_the_handout_is_a_single_block():
    """2.7b, batch 4, context 2048: a block's input is 4 * 2048 * 2560 * 4 bytes = 80 MiB, its activations 6.35 GiB."""
    found = best_group_size(replace(SIZES["2.7b"], context=2048), "fp32", "train", "reference")
    assert found.best == 1
    assert found.block_input == 80 * 2**20
    assert found.block_activations / GIB == pytest.approx(6.35, abs=0.01)
    assert found.rule == pytest.approx((32 * 80 / 1024 / 6.35) ** 0.5, rel=2e-3)


def test_best_group_is_larger_where_inputs_outweigh_activations():
    """With hardly an inner layer a block saves 11 tensors as large as its input: norms (6), q, k, v, output, heads."""
    size = ModelSize("wide", d_model=64, d_ff=2, num_layers=100, num_heads=1, vocab_size=10, context=64, batch_size=99)
    found = best_group_size(size, "fp32", "forward-backward", "sdpa")
    peaks = {k: predicted_peak(size, "fp32", "forward-backward", "sdpa", f"every={k}").total for k in range(1, 101)}
    assert peaks[found.best] == min(peaks.values())
    assert found.rule == pytest.approx((100 / 11) ** 0.5, rel=0.01)
    assert found.best in (2, 3, 4)
