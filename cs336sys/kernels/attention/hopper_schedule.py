"""Which tiles a program of the Hopper kernels works on, and in which order: integer arithmetic, no more.

Every function is compiled into the kernels by ``gluon.jit`` and is called as it stands by the tests: hence ``min`` and
no call of one by another.
"""


def num_rounds(program, num_programs, num_items):
    """How many items a program works through: one of every round of ``num_programs`` items, if there is one left."""
    whole = num_items // num_programs
    # As in item_of_round.
    place = program if whole % 2 == 0 else num_programs - 1 - program
    return whole + (1 if place < num_items - whole * num_programs else 0)


def item_of_round(program, num_programs, round):
    """Items are dealt like cards, back and forth: who got the longer item of a causal mask now gets the shorter."""
    place = program if round % 2 == 0 else num_programs - 1 - program
    return round * num_programs + place


def tile_of_item(item, num_tiles, num_sequences, sequences_per_group, last_tile_first):
    """(tile, sequence) of an item.

    Sequences come in groups whose streamed operands fit in the L2 cache together. Inside a group the items go tile by
    tile, each tile for all its sequences: under a causal mask the longest come first and the shortest fill the gaps.
    """
    first_sequence = item // (num_tiles * sequences_per_group) * sequences_per_group
    group_size = min(sequences_per_group, num_sequences - first_sequence)
    index = item - first_sequence * num_tiles
    tile = index // group_size
    return (num_tiles - 1 - tile if last_tile_first else tile), first_sequence + index % group_size


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
