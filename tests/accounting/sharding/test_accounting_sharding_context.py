"""Which tokens of a sequence each rank holds, and what the ranks send for it, by hand."""

import itertools

import pytest

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.sharding.context import attention_sent_bytes
from cs336sys.accounting.sharding.partition import SequenceSplit, require_heads
from cs336sys.accounting.sharding.step import ShardedStep, fullest_state, predicted_memory, predicted_sent_bytes
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import choose_size


def test_zigzag_gives_each_rank_a_chunk_from_either_end():
    split = SequenceSplit(8, 2)
    assert split.chunks == ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    assert SequenceSplit(7, 2, is_zigzag=False).chunks == ((range(0, 4),), (range(4, 7),))


@pytest.mark.parametrize("is_zigzag", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [8, 9, 23, 64, 101])
def test_every_token_has_one_rank_and_work_is_even(length, world_size, is_zigzag):
    split = SequenceSplit(length, world_size, is_zigzag)
    positions = [[token for chunk in chunks for token in chunk] for chunks in split.chunks]
    assert sorted(itertools.chain(*positions)) == list(range(length))
    assert all(own == sorted(own) for own in positions)
    assert max(split.lengths) - min(split.lengths) <= 1
    if is_zigzag:
        # Keys that a rank's queries see, itself among them.
        seen = [sum(token + 1 for token in own) for own in positions]
        assert max(seen) - min(seen) <= 2 * length


def test_fewer_tokens_than_ranks_are_refused():
    with pytest.raises(UsageError, match="a sequence of 3 tokens cannot be split over 4 ranks: choose at least one"):
        SequenceSplit(3, 4)


def test_heads_that_ranks_do_not_divide_are_refused_with_the_choices():
    require_heads(12, 4)
    with pytest.raises(UsageError, match="5 ranks do not divide 12 heads; choose 1, 2, 3, 4, 6 or 12 ranks, or ring"):
        require_heads(12, 5)
    with pytest.raises(UsageError, match="2 ranks do not divide 1 head; choose 1 rank, or ring attention"):
        require_heads(1, 2)


def test_a_rank_holds_the_whole_state_and_the_activations_of_its_slice():
    size = choose_size("small", context=4096, batch_size=1)
    step = ShardedStep("context-ring", size, 4, "bf16", "reference")
    alone = ShardedStep("none", size, 1, "bf16", "flash")
    assert fullest_state(step) == fullest_state(alone)
    moments = {held.moment: held for held in predicted_memory(step)}
    short = ShardedStep("none", choose_size("small", context=1024, batch_size=1), 1, "bf16", "flash")
    peak = {held.moment: held for held in predicted_memory(short)}["peak"]
    sent = attention_sent_bytes("context-ring", size, 4, "bf16", "none")
    # Beside those of a sequence of its length: where its tokens stand, and the angles of all positions.
    assert moments["peak"].total == peak.total + 8 * 1024 + 4 * (4096 - 1024) * 64
    assert predicted_sent_bytes(step) == sent + 8 * 3 / 4 * count_parameters(size)
    with pytest.raises(UsageError, match="a sequence of 4 tokens"):
        ShardedStep("context-ring", choose_size("small", context=4), 8, "bf16", "flash").share  # noqa: B018
