"""The order of work of the Hopper kernels, followed with their own integer arithmetic: Gluon has no interpreter."""

import collections
import itertools

import pytest

from cs336sys.kernels.attention.hopper.schedule import (
    as_table,
    key_tiles,
    longest_first_at_the_end,
    ordered_items,
    query_tiles,
    share_out,
    tiles_of_window,
    turns_before,
    window_tiles,
)

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 192, 193, 449)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# Full, causal, and windows of less than a tile, of about two, and of all keys of most lengths; 0: none.
MASKS = pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (True, 1), (True, 130), (True, 384)])


def sees(query, key, num_queries, num_keys, is_causal, window=0, diagonal=0):
    hidden = (is_causal and key > query + diagonal) or (window and key <= query - window)
    return query < num_queries and key < num_keys and not hidden


def seen_key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal, window):
    """(first, whole_from, whole, end), as ``_tiles`` of the forward kernel: queries by their positions."""
    whole, end = key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal)
    first, whole_from = 0, 0
    if window:
        first, whole_from = window_tiles(first_query, query_rows, num_queries, key_rows, window, end)
    return first, whole_from, whole, end


def seeing_query_tiles(first_key, num_queries, is_causal, window=0, key_rows=128, diagonal=0):
    """(first, end) of the tiles that a program of the backward pass visits."""
    window_tiles = tiles_of_window(window, 64, key_rows) if window else 0
    return query_tiles(max(0, first_key - diagonal), num_queries, 64, is_causal, window_tiles)


def lengths_and_diagonals(is_shifted):
    """(queries, keys, diagonal)."""
    for num_queries, num_keys in itertools.product(LENGTHS, LENGTHS):
        for diagonal in {0, max(0, num_keys - num_queries)} if is_shifted else {0}:
            yield num_queries, num_keys, diagonal


@CAUSAL
@pytest.mark.parametrize(("num_sequences", "per_group"), [(1, 1), (5, 2), (16, 4), (7, 7)])
@pytest.mark.parametrize("num_tiles", [1, 3, 86])
@pytest.mark.parametrize("num_programs", [1, 2, 13, 132])
def test_table_gives_every_item_to_one_program(num_programs, num_tiles, num_sequences, per_group, is_causal):
    items = ordered_items(num_tiles, num_sequences, per_group, is_causal)
    table = as_table(share_out(items, range(1, num_tiles + 1), num_programs))
    seen = []
    for program in range(num_programs):
        count, first = table[program]
        seen += table[first : first + count]
    assert sorted(seen) == list(itertools.product(range(num_tiles), range(num_sequences)))
    assert len(table) == num_programs + len(seen)


@pytest.mark.parametrize(("num_tiles", "num_sequences", "per_group"), [(128, 16, 2), (16, 128, 19), (16, 16, 16)])
def test_the_gpu_is_full_until_the_end_although_the_shortest_begin_first(num_tiles, num_sequences, per_group):
    """Backward, in turn: 16 heads of 16384, 128 of 2048 and 16 of 2048 queries, 132 programs at a time."""
    costs = [2 * (num_tiles - tile) for tile in range(num_tiles)]

    def longest(items):
        loads = [sum(costs[tile] for tile, _ in share) for share in share_out(items, costs, 132)]
        return max(loads) / (sum(loads) / len(loads))

    items = list(ordered_items(num_tiles, num_sequences, per_group, last_tile_first=True))
    turned = longest_first_at_the_end(items, 99)
    assert sorted(turned) == sorted(items)
    assert turned[:-99] == items[:-99]
    assert longest(turned) - 1 < 0.35 * (longest(items) - 1)


@MASKS
@pytest.mark.parametrize(("consumers", "key_rows"), [(2, 128), (3, 128), (3, 64), (2, 64)])
def test_consumers_visit_every_visible_tile_and_mask_where_they_must(consumers, key_rows, is_causal, window):
    for num_queries, num_keys, diagonal in lengths_and_diagonals(is_causal):
        num_queries += diagonal  # Positions, as the kernel has them.
        of_problem = num_queries, num_keys, key_rows, is_causal, window
        for item_query in range(diagonal, num_queries, 64 * consumers):
            item_first, _, _, item_end = seen_key_tiles(item_query, 64 * consumers, *of_problem)
            assert item_end > item_first
            firsts, ends = [], []
            for consumer in range(consumers):
                first_query = item_query + 64 * consumer
                first, whole_from, whole, end = seen_key_tiles(first_query, 64, *of_problem)
                ends.append(end)
                if end:
                    assert end > first
                    firsts.append(first)
                last_query = min(first_query + 64, num_queries) - 1
                for tile in range(-(-num_keys // key_rows) + 1):
                    keys = tile * key_rows, (tile + 1) * key_rows - 1
                    queries = range(first_query, last_query + 1)
                    far_end = [query - window + 1 if window else 0 for query in queries]
                    near_end = [min(query, num_keys - 1) if is_causal else num_keys - 1 for query in queries]
                    pairs = list(zip(far_end, near_end, strict=True))
                    some = any(far <= keys[1] and near >= keys[0] for far, near in pairs)
                    every = bool(pairs) and all(far <= keys[0] and near >= keys[1] for far, near in pairs)
                    # Of queries that see no key the last tile is visited, and all of it masked.
                    assert (first <= tile < end) == some or tile == end - 1
                    assert (whole_from <= tile < whole) == every
                    if tile == end - 1 and not window and not diagonal:
                        # So that no row of the first tile visited is without a score.
                        assert sees(first_query, keys[0], num_queries, num_keys, is_causal)
            # The producer loads for the one that needs most, and nobody has to skip a negative number of tiles.
            assert (item_first, item_end) == (min(firsts), max(ends))


@MASKS
@pytest.mark.parametrize("key_rows", [64, 128])
def test_queries_that_see_a_block_of_keys(key_rows, is_causal, window):
    for num_queries, num_keys, diagonal in lengths_and_diagonals(is_causal and not window):
        for first_key in range(0, num_keys, key_rows):
            first, end = seeing_query_tiles(first_key, num_queries, is_causal, window, key_rows, diagonal)
            visited = {query for tile in range(first, end) for query in range(64 * tile, 64 * tile + 64)}
            keys = range(first_key, min(first_key + key_rows, num_keys))
            needed = {
                query
                for query in range(num_queries)
                if any(
                    sees(query, key, num_queries, num_keys, is_causal, window, diagonal) for key in (keys[0], keys[-1])
                )
            }
            assert needed <= visited
            assert end <= -(-num_queries // 64)
            # Tiles of 64 queries start at a multiple of 64, so at most the first two cross the diagonal, or three where
            # that does not start so; and as if all keys of the block were there, a query of the last sees one.
            unmasked = range(first + 2 + (diagonal > 0), end)
            assert all(sees(64 * tile, keys[-1], 10**9, num_keys, is_causal, 0, diagonal) for tile in unmasked)
            if window and end > first:
                assert sees(64 * end - 64, first_key + key_rows - 1, 10**9, 10**9, False, window)


@MASKS
@pytest.mark.parametrize("key_rows", [64, 128])
def test_turns_count_the_programs_of_later_keys_that_add_to_the_same_queries(key_rows, is_causal, window):
    for num_queries, num_keys, diagonal in lengths_and_diagonals(is_causal and not window):
        added = collections.Counter()
        for first_key in reversed(range(0, num_keys, key_rows)):
            for tile in range(*seeing_query_tiles(first_key, num_queries, is_causal, window, key_rows, diagonal)):
                assert turns_before(tile, 64, first_key, num_keys, key_rows, is_causal, diagonal) == added[tile]
                added[tile] += 1
