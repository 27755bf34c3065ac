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


def as_table(shares: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """What a kernel reads: for each program (number of its items, index of the first), then all (tile, sequence)."""
    heads: list[tuple[int, int]] = []
    items: list[tuple[int, int]] = []
    for share in shares:
        heads.append((len(share), len(shares) + len(items)))
        items += share
    return heads + items


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


def turns_before(tile, query_rows, first_key, num_keys, key_rows, is_causal):
    """How many programs add to dQ of a tile of queries before that of the keys at ``first_key``, in a fixed order.

    Those of later keys, and programs begin in this order, too: so nobody waits for one that has not begun, and under a
    causal mask each begins with queries that the one before it has behind it.
    """
    seen = min(num_keys, (tile + 1) * query_rows) if is_causal else num_keys
    return (seen - 1) // key_rows - first_key // key_rows
