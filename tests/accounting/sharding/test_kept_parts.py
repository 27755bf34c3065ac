"""What the blocks of the 8B step keep, on paper."""

from dataclasses import replace

import pytest

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.selective_checkpointing import (
    KeptStep,
    choose_kept_blocks,
    kept_block_bytes,
    kept_moments,
    kept_peak,
)
from cs336sys.accounting.sharding.step import fullest_state
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES

STEP = KeptStep("fsdp", SIZES["8b"], 2, "bf16", "flash", state_dtype="bf16")


def test_peak_is_where_the_backward_pass_begins():
    """Of 34 blocks that keep everything: the state without gradients, the blocks, and little more."""
    step = replace(STEP, blocks=34)
    peak = kept_peak(step)
    assert peak.moment == "feed-forward backward, block 34 of 34"
    state = fullest_state(step)
    beside = peak.total - (state.parameters + state.optimizer_state) - 34 * kept_block_bytes(step, gate_and_up=True)
    assert 5 * GIB < beside < 7 * GIB
    assert {moment.moment for moment in kept_moments(step)} >= {"loss", "optimizer"}


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
