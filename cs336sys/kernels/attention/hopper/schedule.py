"""Which tiles a program of the Hopper kernels works on, and in which order: integer arithmetic, no more.

The host makes the schedule of a launch once; the functions behind ``as_table`` are also compiled into the kernels by
``gluon.jit``: hence their ``min`` and no call of one by another.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence


def ordered_items(
    num_tiles: int, num_sequences: int, sequences_per_group: int, last_tile_first: bool
) -> Iterator[tuple[int, int]]:
    """(tile, sequence) of all items, in the order in which they should begin.

    Sequences come in groups whose streamed operands fit in the L2 cache together. Inside a group the items go tile by
    tile, each tile for all its sequences: under a causal mask the longest come first and the shortest fill the gaps.
    """
    tiles = range(num_tiles)[:: -1 if last_tile_first else 1]
    for first_sequence in range(0, num_sequences, sequences_per_group):
        group = range(first_sequence, min(first_sequence + sequences_per_group, num_sequences))
        yield from ((tile, sequence) for tile in tiles for sequence in group)


def longest_first_at_the_end(items: Iterable[tuple[int, int]], num_last: int) -> list[tuple[int, int]]:
    """Items in an order from the last tiles to the first, but that the last ``num_last`` of them are turned round.

    If the shortest begin first, as later tiles of keys are under a causal mask, the longest begin last, and the GPU is
    not full at the end; turned round, those that begin together also end together.
    """
    ordered = list(items)
    first_of_end = max(0, len(ordered) - num_last)
    return ordered[:first_of_end] + sorted(ordered[first_of_end:])


def share_out(items: Iterable[tuple[int, int]], costs: Sequence[int], num_programs: int) -> list[list[tuple[int, int]]]:
    """The items of each program: whoever is done first gets the next; costs[tile] is how long an item takes.

    Graham, "Bounds on multiprocessing timing anomalies" (1969): list scheduling.
    """
    programs = [(0, program) for program in range(num_programs)]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(num_programs)]
    for item in items:
        time, program = programs[0]
        shares[program].append(item)
        heapq.heapreplace(programs, (time + costs[item[0]], program))
    return shares


def cut_the_rest(num_items: int, num_programs: int, num_tiles: int, piece_cost: int) -> tuple[int, int]:
    """(items that stay whole, pieces of each other item), for items of ``num_tiles`` tiles each.

    If the last of them fill but a part of the GPU, which runs ``num_programs`` at a time, they are cut into pieces of
    about equal length, by which it is done sooner; ``piece_cost``: what a piece takes beside its tiles, in tiles.
    """
    rest = num_items % num_programs
    ends = {1: num_tiles if rest else 0}
    for pieces in range(2, 5):
        rounds = -(-rest * pieces // num_programs)
        ends[pieces] = rounds * (-(-num_tiles // pieces) + piece_cost)
    best = min(ends, key=ends.__getitem__)
    saved = ends[1] - ends[best]
    if saved * 100 < num_items // num_programs * num_tiles + ends[1]:
        return num_items, 1
    return num_items - rest, best


def as_table(shares: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """What a kernel reads: for each program (number of its items, index of the first), then all (tile, sequence)."""
    heads: list[tuple[int, int]] = []
    items: list[tuple[int, int]] = []
    for share in shares:
        heads.append((len(share), len(shares) + len(items)))
        items += share
    return heads + items


def as_table_of_pieces(items: Sequence[tuple[int, int]], num_whole: int, num_pieces: int) -> list[tuple[int, int]]:
    """As ``as_table`` for one item a program, those behind ``num_whole`` in pieces, each a program of its own.

    For each program (number of pieces of its item + 256 * number of its piece among all, index of the item).
    """
    programs = [(1, item) for item in range(num_whole)]
    all_pieces = range((len(items) - num_whole) * num_pieces)
    programs += [(num_pieces + 256 * piece, num_whole + piece // num_pieces) for piece in all_pieces]
    return [(pieces, len(programs) + item) for pieces, item in programs] + list(items)


def key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal):
    """(whole, end): the queries see all of the key tiles before ``whole``, some of those before ``end``, none beyond.

    (0, 0) if all of them lie behind the last query.
    """
    last_query = min(first_query + query_rows, num_queries) - 1
    first_sees = min(num_keys, first_query + 1) if is_causal else num_keys
    last_sees = min(num_keys, last_query + 1) if is_causal else num_keys
    some = 1 if first_query < num_queries else 0
    return first_sees // key_rows * some, (last_sees + key_rows - 1) // key_rows * some


def query_tiles(first_key, num_queries, query_rows, is_causal):
    """(first, end) of the query tiles in which a query sees a key at or behind ``first_key``: none if end <= first."""
    return (first_key // query_rows if is_causal else 0), (num_queries + query_rows - 1) // query_rows


def piece_tiles(first, end, piece, num_pieces):
    """(first, end) of the query tiles of one of the pieces into which an item's tiles are cut."""
    num_tiles = end - first
    return first + num_tiles * piece // num_pieces, first + num_tiles * (piece + 1) // num_pieces


def turns_before(tile, query_rows, first_key, num_keys, key_rows, is_causal):
    """How many programs add to dQ of a tile of queries before that of the keys at ``first_key``, in a fixed order.

    Those of later keys, and programs begin in this order, too: so nobody waits for one that has not begun, and under a
    causal mask each begins with queries that the one before it has behind it.
    """
    seen = min(num_keys, (tile + 1) * query_rows) if is_causal else num_keys
    return (seen - 1) // key_rows - first_key // key_rows
