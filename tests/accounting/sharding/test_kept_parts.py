"""What the blocks of the 8B step keep, on paper."""

from dataclasses import replace

import pytest

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.fsdp import gathered_bytes
from cs336sys.accounting.sharding.selective_checkpointing import (
    KeptStep,
    choose_kept_blocks,
    flops_again,
    kept_block_bytes,
    kept_memory,
    kept_moments,
    kept_peak,
)
from cs336sys.accounting.sharding.step import MOMENTS, fullest_state
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES

STEP = KeptStep("fsdp", SIZES["8b"], 2, "bf16", "flash", state_dtype="bf16")


def test_bytes_of_a_block():
    tokens = 32768
    always = 2 * 6 * tokens * 4096 + 4 * 32 * tokens + 8 * tokens
    assert kept_block_bytes(STEP, gate_and_up=False) == always
    assert kept_block_bytes(STEP, gate_and_up=True) == always + 2 * 2 * tokens * 11008


def test_state_by_dtype():
    shard = count_parameters(STEP.size) / 2
    for dtype, each in {"fp32": 16, "bf16": 8, "split": 14}.items():
        assert fullest_state(replace(STEP, state_dtype=dtype)).total == pytest.approx(each * shard, rel=1e-4)


def test_moments_are_those_that_shard_measures():
    """Master weights, or their lower bits, are state of the optimizer."""
    step = replace(STEP, state_dtype="split", blocks=3)
    memory = {held.moment: held for held in kept_memory(step)}
    assert list(memory) == list(MOMENTS)
    assert memory["peak"].total == kept_peak(step).total
    assert memory["before the optimizer"].total == pytest.approx(fullest_state(step).total, rel=1e-3)
    assert memory["before the first optimizer step"].optimizer_state == 0


def test_peak_is_where_the_backward_pass_begins():
    """Of 34 blocks that keep everything: the state without gradients, the blocks, and little more."""
    step = replace(STEP, blocks=34)
    peak = kept_peak(step)
    assert peak.moment == "feed-forward backward, block 34 of 34"
    state = fullest_state(step)
    beside = peak.total - (state.parameters + state.optimizer_state) - 34 * kept_block_bytes(step, gate_and_up=True)
    assert 5 * GIB < beside < 7 * GIB
    assert {moment.moment for moment in kept_moments(step)} >= {"loss", "optimizer"}


def test_blocks_that_stay_gathered_are_counted_until_the_backward_pass_is_through_them():
    block = gathered_bytes(STEP.size, 2, 2)["layers.0"]
    plain, staying = (
        {moment.moment: moment.total for moment in kept_moments(replace(STEP, keep_gathered=blocks))}
        for blocks in (0, 12)
    )
    more = {moment: staying[moment] - plain[moment] for moment in plain}
    assert more["loss"] == 12 * block
    # The last needs its own weights and those of the one before it either way.
    assert more["feed-forward backward, block 34 of 34"] == 10 * block
    assert more["feed-forward backward, block 24 of 34"] == 0
    with pytest.raises(UsageError, match="--keep-gathered 35: the model has 34 blocks"):
        replace(STEP, keep_gathered=35)


def test_with_few_tokens_the_loss_is_widest():
    assert kept_peak(replace(STEP, size=replace(STEP.size, context=4096))).moment == "loss"


def test_most_blocks_that_fit_are_chosen():
    for limit, (blocks, staying) in {130: (34, 14), 125.3: (34, 2), 110: (22, 0), 81: (1, 0)}.items():
        chosen = choose_kept_blocks(STEP, limit * GIB, keeps_gathered=True)
        assert (chosen.blocks, chosen.keep_gathered) == (blocks, staying)
        given = choose_kept_blocks(replace(STEP, keep_gathered=1), limit * GIB, keeps_gathered=False)
        assert given.keep_gathered == 1
        assert kept_peak(chosen).total <= limit * GIB
        if blocks < 34:
            assert kept_peak(replace(chosen, blocks=blocks + 1)).total > limit * GIB
    with pytest.raises(UsageError, match=r"--memory-limit 80GiB: a rank needs 80\.9 GiB even if no block keeps"):
        choose_kept_blocks(STEP, 80 * GIB, keeps_gathered=True)


def test_flops_again_are_those_of_two_products():
    again = [flops_again(replace(STEP, blocks=blocks)) for blocks in range(35)]
    assert again[33] == 2 * 2 * 65536 * 4096 * 11008
    assert again[0] == 34 * again[33]
    assert again[34] == 0
