"""Who holds what: worked by hand, on properties, and of which tokens of a sequence."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cs336sys.accounting.sharding.partition import ALIGNMENT, SequenceSplit, flat_pieces, greedy_partition
from cs336sys.errors import UsageError


@pytest.mark.parametrize(
    ("sizes", "held", "owners"),
    [
        # 7, 5, 4, 4, 2 and 1: 7 to rank 0, 5 and 4 to 1, 4 to 0, 2 to 1, 1 to 0.
        ((4, 7, 1, 5, 4, 2), (0, 0), [1, 0, 0, 1, 0, 1]),
        ((3, 3, 3, 3), (0, 0), [0, 1, 0, 1]),
        ((3, 3), (5, 0), [1, 1]),
        ((2,), (0, 0, 0), [0]),
        ((), (0, 0), []),
        ((0, 0), (0, 0), [0, 0]),
    ],
)
def test_partition_worked_by_hand(sizes, held, owners):
    assert greedy_partition(sizes, held) == owners


@given(st.integers(2, 3), st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_fullest_rank_keeps_grahams_bound(tier, world_size, sizes):
    """At most 4/3 - 1/(3 W) of the best partition, which is found by trying all."""
    partitions = itertools.product(range(world_size), repeat=len(sizes))
    best = min(max(totals(sizes, owners, world_size)) for owners in partitions)
    greedy = totals(sizes, greedy_partition(sizes, [0] * world_size), world_size)
    assert max(greedy) <= (4 / 3 - 1 / (3 * world_size)) * best + 1e-9
    assert sum(greedy) == sum(sizes)


def totals(sizes, owners, world_size):
    held = [0] * world_size
    for size, owner in zip(sizes, owners, strict=True):
        held[owner] += size
    return held


SIZES_OF_TENSORS = st.lists(
    st.sampled_from((0, 1, 63, 64, 65, 128, 320, 640, 1600)) | st.integers(0, 2000), min_size=1, max_size=8
)


@given(st.integers(1, 5), SIZES_OF_TENSORS)
def test_every_element_has_one_owner_and_slices_are_aligned(tier, world_size, sizes):
    pieces = flat_pieces(sizes, world_size)
    owned = {index: [] for index in range(len(sizes))}
    for piece in pieces:
        assert piece.slice_size % ALIGNMENT == 0
        assert all(start % ALIGNMENT == 0 for start in piece.starts.values())
        spans = sorted((start, start + sizes[index]) for index, start in piece.starts.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= world_size * piece.slice_size
        for index in piece.starts:
            owned[index] += [n for rank in range(world_size) for n in piece.owned(index, sizes[index], rank)]
    assert all(elements == list(range(sizes[index])) for index, elements in owned.items())
    # Padding is at most one slice's alignment for every rank and one for every packed tensor.
    padded = sum(world_size * piece.slice_size for piece in pieces)
    assert padded - sum(sizes) < ALIGNMENT * (world_size + len(sizes))


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
