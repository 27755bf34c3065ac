"""Which tokens of a sequence each rank holds."""

import itertools

import pytest

from cs336sys.accounting.sharding.partition import SequenceSplit
from cs336sys.errors import UsageError


def test_zigzag_gives_each_rank_a_chunk_from_either_end():
    split = SequenceSplit(8, 2)
    assert split.chunks == ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    assert SequenceSplit(7, 2, is_zigzag=False).chunks == ((range(0, 4),), (range(4, 7),))


@pytest.mark.parametrize("is_zigzag", [True, False])
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("length", [8, 23, 64])
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
