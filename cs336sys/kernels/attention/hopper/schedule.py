"""Assign tiles to the programs of the Hopper kernels, in order: integer arithmetic only.

An *item* is a tile of queries (forward) or keys (backward) of one sequence (a head of a batch element). For an item a
program makes a *visit* to each tile of the other that it needs; a *piece* of an item has a part of these visits; a
*work* is an item that stays whole, or a piece. The host makes the schedule of a launch once; the functions behind
``as_table`` are also compiled into the kernels by ``gluon.jit``: hence their ``min`` and no call of one by another.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

# Into how many pieces ``cut_all`` may cut an item, and how many rounds of pieces are enough to keep the GPU full.
NUMBERS_OF_PIECES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_ROUNDS = 16


def ordered_items(
    num_tiles: int, num_sequences: int, sequences_per_group: int, last_tile_first: bool
) -> Iterator[tuple[int, int]]:
    """Yield (tile, sequence) of all items, in the order in which they should begin.

    Sequences come in groups whose streamed operands fit in the L2 cache together. Inside a group the items go tile by
    tile, each tile for all its sequences: under a causal mask the longest come first and the shortest fill the gaps.
    """
    tiles = range(num_tiles)[:: -1 if last_tile_first else 1]
    for first_sequence in range(0, num_sequences, sequences_per_group):
        group = range(first_sequence, min(first_sequence + sequences_per_group, num_sequences))
        yield from ((tile, sequence) for tile in tiles for sequence in group)


def longest_first_at_the_end(items: Iterable[tuple[int, int]], num_last: int) -> list[tuple[int, int]]:
    """Keep the order of (tile, sequence) items, last tiles first, but sort the last ``num_last`` ascending.

    If the shortest begin first, as later tiles of keys are under a causal mask, the longest begin last, and the GPU is
    not full at the end; sorted so, those that begin together also end together.
    """
    ordered = list(items)
    first_of_end = max(0, len(ordered) - num_last)
    return ordered[:first_of_end] + sorted(ordered[first_of_end:])


def share_out(items: Iterable[tuple[int, int]], costs: Sequence[int], num_programs: int) -> list[list[tuple[int, int]]]:
    """Return the items of each program: whoever is done first gets the next; costs[tile] is how long an item takes.

    Graham, "Bounds on multiprocessing timing anomalies" (1969): list scheduling.
    """
    programs = [(0, program) for program in range(num_programs)]  # A heap: when each is done, and its number.
    shares: list[list[tuple[int, int]]] = [[] for _ in range(num_programs)]
    for item in items:
        time, program = programs[0]
        shares[program].append(item)
        heapq.heapreplace(programs, (time + costs[item[0]], program))
    return shares


def cut_all(
    items: Sequence[tuple[int, int]],
    num_visits: Sequence[int],
    num_programs: int,
    costs: tuple[int, int],
    least_pieces: int = 1,
) -> tuple[int, int]:
    """Return (items that stay whole, pieces of each other item): item (tile, sequence) makes num_visits[tile] visits.

    ``share_out`` tells what ends first: none cut, all cut, or only those behind the last whole round. ``costs``: what a
    whole item and what a piece takes besides its visits, in visits. ``least_pieces``: from 2 on all are cut.
    """
    whole_cost, piece_cost = costs
    # Whole items end at most the longest one's time after the mean program, and pieces no sooner than that does.
    longest, work = whole_cost + max(num_visits, default=0), sum(whole_cost + num_visits[tile] for tile, _ in items)
    if least_pieces == 1 and 100 * num_programs * longest <= work:
        return len(items), 1
    least_pieces = min(least_pieces, NUMBERS_OF_PIECES[-1])
    # The first choice, of the fewest pieces, is taken unless another ends at least 1 % sooner.
    if least_pieces > 1:
        choices = [(0, next(pieces for pieces in NUMBERS_OF_PIECES if pieces >= least_pieces))]
        numbers_of_whole = [0]
    else:
        choices = [(len(items), 1)]
        whole_rounds = len(items) - len(items) % num_programs
        numbers_of_whole = sorted({0, whole_rounds} - {len(items)})  # All whole is the first choice.
    for num_whole in numbers_of_whole:
        for pieces in NUMBERS_OF_PIECES:
            if pieces >= least_pieces and (len(items) - num_whole) * pieces <= MAX_ROUNDS * num_programs:
                choices.append((num_whole, pieces))

    def end_of(num_whole: int, num_pieces: int) -> int:
        """Return when the last program is done that has items and, behind ``num_whole`` of them, pieces of items."""
        work_costs = [whole_cost + visits for visits in num_visits]
        work_costs += [piece_cost + -(-visits // num_pieces) for visits in num_visits]
        # Pairs as share_out takes items: it reads the first, where in work_costs a cost stands, and not the second.
        works = [(tile, 0) for tile, _ in items[:num_whole]]
        works += [(len(num_visits) + tile, 0) for tile, _ in items[num_whole:] for _ in range(num_pieces)]
        shares = share_out(works, work_costs, num_programs)
        return max(sum(work_costs[position] for position, _ in share) for share in shares)

    ends = {choice: end_of(*choice) for choice in choices}
    best = min(ends, key=ends.__getitem__)
    return best if ends[best] * 100 <= ends[choices[0]] * 99 else choices[0]


def as_table(shares: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Make the kernel's table: of each program (number of items, row of the first), then (tile, sequence) of all."""
    heads: list[tuple[int, int]] = []
    items: list[tuple[int, int]] = []
    for share in shares:
        heads.append((len(share), len(shares) + len(items)))
        items += share
    return heads + items


def as_table_of_pieces(
    items: Sequence[tuple[int, int]], num_whole: int, num_pieces: int, costs: Sequence[int] = (), num_programs: int = 0
) -> list[tuple[int, int]]:
    """Make the kernel's table of works, and behind them items, of which those behind ``num_whole`` are in pieces.

    A work's row: (pieces of its item + 256 * number of its piece among all, row of its item). Each has a program of its
    own, or ``num_programs`` share them: then the table begins with a row for each of these, (number of its works, row
    of the first). ``costs``: of whole items, by tile, then of pieces.
    """
    works = [(1, item) for item in range(num_whole)]  # (first number of a row, index of the item)
    all_pieces = range((len(items) - num_whole) * num_pieces)  # Fewer than 256 of an item, so that 256 * piece fits.
    works += [(num_pieces + 256 * piece, num_whole + piece // num_pieces) for piece in all_pieces]
    first_item = num_programs + len(works)
    table = [(pieces, first_item + item) for pieces, item in works]
    if num_programs:
        num_tiles = len(costs) // 2
        # As share_out takes items: first where in costs a cost stands, a piece's num_tiles behind its tile's.
        rows = [(items[item][0] + (num_tiles if pieces > 1 else 0), work) for work, (pieces, item) in enumerate(works)]
        shares = share_out(rows, costs, num_programs)
        table = as_table([[table[work] for _, work in share] for share in shares])
    return table + list(items)


def key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal):
    """Return (whole, end): queries see all key tiles before ``whole``, some of those before ``end``, none beyond.

    (0, 0) if all of them lie behind the last query.
    """
    last_query = min(first_query + query_rows, num_queries) - 1
    first_sees = min(num_keys, first_query + 1) if is_causal else num_keys
    last_sees = min(num_keys, last_query + 1) if is_causal else num_keys
    has_queries = 1 if first_query < num_queries else 0
    return first_sees // key_rows * has_queries, (last_sees + key_rows - 1) // key_rows * has_queries


def window_tiles(first_query, query_rows, num_queries, key_rows, window, end):
    """Return (first, whole): of the key tiles before ``end``, the queries see none before ``first``.

    No window ends in ``whole`` or behind it. ``first`` is always before ``end``, if there is a tile, also for queries
    that are too far behind the last key.
    """
    last_query = min(first_query + query_rows, num_queries) - 1
    first = min(max(first_query - window + 1, 0) // key_rows, max(end - 1, 0))
    return first, (max(last_query - window + 1, 0) + key_rows - 1) // key_rows


def query_tiles(first_query, num_queries, query_rows, is_causal, window_tiles):
    """Return (first, end) of the query tiles in which a query sees one of some keys: none if end <= first.

    ``first_query``: sees the first of these keys under a causal mask. ``window_tiles``: of how many tiles the queries
    have these keys in their window; 0 without a window.
    """
    end = (num_queries + query_rows - 1) // query_rows
    first = first_query // query_rows if is_causal else 0
    return first, min(end, first + window_tiles) if window_tiles else end


def tiles_of_window(window, query_rows, key_rows):
    """Return how many tiles of queries, from the one of its first key on, see one of ``key_rows`` keys.

    The last query that sees the last key is ``window - 1`` behind it. Tiles of keys begin where tiles of queries do.
    """
    return (key_rows + window - 2) // query_rows + 1


def visits(first, end, group_size):
    """Return (first, end) of the visits to query tiles ``first`` to ``end`` of each head of a group, head by head.

    With one head a visit has the number of its tile, and so have those to the first head of several.
    """
    return first, first + (end - first) * group_size


def member_of_visit(visit, first, end):
    """Return which head of the group it is whose tiles ``first`` to ``end`` are visited."""
    return (visit - first) // max(end - first, 1)  # 1: without tiles there are no visits.


def tile_of_visit(visit, first, end):
    """Return the tile of a visit among those of its head."""
    return visit - (visit - first) // max(end - first, 1) * (end - first)


def tile_among_heads(visit, first, end, num_tiles):
    """Return the tile of a visit among those of all heads, one head below the other, with ``num_tiles`` each."""
    return visit + (visit - first) // max(end - first, 1) * (num_tiles - end + first)


def piece_visits(first, end, piece, num_pieces):
    """Return (first, end) of the visits of one of the pieces into which an item's visits are cut."""
    num_visits = end - first
    return first + num_visits * piece // num_pieces, first + num_visits * (piece + 1) // num_pieces


def turns_before(tile, query_rows, first_key, num_keys, key_rows, is_causal, diagonal):
    """Return how many programs add to dQ of a tile of queries before that of the keys at ``first_key``.

    The order is fixed: those of later keys come first. Programs begin in this order, too: so nobody waits for one that
    has not begun, and under a causal mask each begins with queries that the one before it has behind it.
    """
    seen = min(num_keys, (tile + 1) * query_rows + diagonal) if is_causal else num_keys
    return (seen - 1) // key_rows - first_key // key_rows
