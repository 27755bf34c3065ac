"""The order of work of the Hopper kernels, emulated with their own integer arithmetic: Gluon has no interpreter."""

import collections
import functools
import itertools
import random

import pytest

from cs336sys.kernels.attention.hopper.schedule import (
    as_table,
    as_table_of_pieces,
    cut_all,
    cut_the_rest,
    key_tiles,
    longest_first_at_the_end,
    member_of_visit,
    ordered_items,
    piece_visits,
    query_tiles,
    share_out,
    tile_among_heads,
    tile_of_visit,
    tiles_of_window,
    turns_before,
    visits,
    window_tiles,
)

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 192, 193, 500)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# Full, causal, and windows of less than a tile, of about two, and of all keys of most lengths; 0: none.
MASKS = pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (True, 1), (True, 150), (True, 400)])


def sees(query, key, num_queries, num_keys, is_causal, window=0):
    hidden = (is_causal and key > query) or (window and key <= query - window)
    return query < num_queries and key < num_keys and not hidden


def seen_key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal, window):
    """(first, whole_from, whole, end), as ``_tiles`` of the forward kernel."""
    whole, end = key_tiles(first_query, query_rows, num_queries, num_keys, key_rows, is_causal)
    first, whole_from = 0, 0
    if window:
        first, whole_from = window_tiles(first_query, query_rows, num_queries, key_rows, window, end)
    return first, whole_from, whole, end


def seeing_query_tiles(first_key, num_queries, is_causal, window=0, key_rows=128):
    """(first, end) of the tiles that a program of the backward pass visits."""
    return query_tiles(first_key, num_queries, 64, is_causal, tiles_of_window(window, 64, key_rows) if window else 0)


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


@pytest.mark.parametrize(("num_tiles", "num_sequences", "per_group"), [(128, 16, 4), (86, 16, 16), (16, 128, 32)])
def test_sharing_out_balances_a_causal_mask(num_tiles, num_sequences, per_group):
    """16 heads of 16384 queries and 128 of 2048, on 132 programs: nobody has 3 % more key tiles than the average."""
    costs = [1 + tile for tile in range(num_tiles)]
    shares = share_out(ordered_items(num_tiles, num_sequences, per_group, True), costs, 132)
    loads = [sum(costs[tile] for tile, _ in share) for share in shares]
    assert max(loads) < 1.03 * sum(loads) / len(loads)


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


def test_as_many_programs_as_items_get_one_each_in_order():
    items = list(ordered_items(3, 5, 2, True))
    assert share_out(items, [1, 2, 3], len(items)) == [[item] for item in items]


def test_groups_finish_one_after_the_other_and_the_longest_tile_comes_first():
    order = list(ordered_items(3, 5, 2, True))
    first_group = [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert order[:6] == first_group
    assert order[12:] == [(2, 4), (1, 4), (0, 4)]
    assert list(ordered_items(3, 2, 2, False)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@MASKS
@pytest.mark.parametrize(("consumers", "key_rows"), [(2, 128), (3, 128), (3, 64), (2, 64)])
def test_consumers_visit_every_visible_tile_and_mask_where_they_must(consumers, key_rows, is_causal, window):
    for num_queries, num_keys in itertools.product(LENGTHS, LENGTHS):
        of_problem = num_queries, num_keys, key_rows, is_causal, window
        for item_query in range(0, num_queries, 64 * consumers):
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
                    if tile == end - 1 and not window:
                        # So that no row of the first tile visited is without a score.
                        assert sees(first_query, keys[0], num_queries, num_keys, is_causal)
            # The producer loads for the one that needs most, and nobody has to skip a negative number of tiles.
            assert (item_first, item_end) == (min(firsts), max(ends))


@pytest.mark.parametrize(
    ("num_items", "num_tiles", "expected"),
    [
        (2048, 256, (1980, 3)),  # 15 rounds of 132 and 68 more: two rounds of thirds instead of one
        (2048, 32, (2048, 1)),  # thirds of 32 tiles would gain nothing
        (512, 64, (512, 1)),  # 116 in the last round, of which halves would take two
        (132, 256, (132, 1)),
        (64, 32, (0, 2)),
        (30, 64, (0, 4)),
        (1, 1, (1, 1)),
    ],
)
def test_items_of_a_last_round_that_fills_but_half_of_the_gpu_are_cut(num_items, num_tiles, expected):
    assert cut_the_rest(num_items, 132, num_tiles, piece_cost=5) == expected


@pytest.mark.parametrize("num_programs", [0, 4])
@pytest.mark.parametrize(("num_whole", "num_pieces"), [(6, 1), (4, 3), (0, 2)])
def test_pieces_of_an_item_have_each_of_its_tiles_once(num_whole, num_pieces, num_programs):
    items = [(tile, sequence) for tile in range(3) for sequence in range(2)]
    table = as_table_of_pieces(items, num_whole, num_pieces, [7, 5, 3, 3, 2, 1], num_programs)
    num_works = num_whole + (6 - num_whole) * num_pieces
    first_item = num_programs + num_works
    if num_programs:
        shares = [range(first, first + count) for count, first in table[:num_programs]]
        assert sorted(itertools.chain(*shares)) == list(range(num_programs, first_item))
        # Fewer of those that take longest.
        assert len(shares[0]) <= len(shares[-1])
    seen = collections.Counter()
    for pieces, at in table[num_programs:first_item]:
        number = pieces // 256
        assert (pieces % 256 == 1) == (at - first_item < num_whole)
        assert number // num_pieces == max(0, at - first_item - num_whole)
        first, end = piece_visits(1, 12, number % (pieces % 256), pieces % 256)
        seen.update((table[at], query_tile) for query_tile in range(first, end))
    assert seen == collections.Counter((item, query_tile) for item in items for query_tile in range(1, 12))


def causal_visits(num_tiles, group_size):
    """Of tiles of 128 keys, to tiles of 64 queries, of as many queries as keys."""
    return [(2 * num_tiles - 2 * tile) * group_size for tile in range(num_tiles)]


@pytest.mark.parametrize(
    ("num_tiles", "num_sequences", "group_size", "least_pieces", "expected"),
    [
        (64, 1, 32, 1, (0, 4)),  # one head of 8192 keys: 64 programs of 132
        (16, 1, 32, 1, (0, 16)),  # one head of 2048 keys
        (16, 8, 4, 1, (0, 2)),  # eight of them, of which the longest takes twice as long as all on average
        (64, 8, 4, 1, (512, 1)),  # eight of 8192 keys fill the GPU
        (64, 8, 4, 3, (0, 3)),
        (64, 8, 4, 99, (0, 32)),
        (1, 1, 1, 1, (1, 1)),
    ],
)
def test_items_of_grouped_queries_are_cut_until_they_fill_the_gpu(
    num_tiles, num_sequences, group_size, least_pieces, expected
):
    items = list(ordered_items(num_tiles, num_sequences, num_sequences, last_tile_first=False))
    assert cut_all(items, causal_visits(num_tiles, group_size), 132, (2, 5), least_pieces) == expected


def test_only_the_last_round_of_grouped_queries_is_cut_where_that_suffices():
    """1024 items of full attention are 7 rounds of 132 and 100 more."""
    items = list(ordered_items(128, 8, 1, last_tile_first=False))
    num_whole, num_pieces = cut_all(items, [1024] * 128, 132, (2, 5))
    assert (num_whole, num_pieces) == (924, 6)


def test_cut_items_end_sooner():
    for num_tiles, num_sequences, group_size in ((64, 1, 32), (16, 1, 32), (16, 8, 4), (3, 2, 7)):
        num_visits = causal_visits(num_tiles, group_size)
        items = list(ordered_items(num_tiles, num_sequences, num_sequences, last_tile_first=False))
        num_whole, num_pieces = cut_all(items, num_visits, 132, (2, 5))
        ideal = num_sequences * sum(num_visits) / 132
        assert num_whole == 0
        # Of the 5 visits that a piece takes besides, each of 132 has those of its pieces.
        pieces_of_program = -(-len(items) * num_pieces // 132)
        longest = -(-max(num_visits) // num_pieces) + 5
        assert longest <= max(1.2 * ideal + 5 * pieces_of_program, group_size + 5)
        assert longest < 2 + max(num_visits)


@MASKS
@pytest.mark.parametrize("group_size", [1, 2, 5, 32])
@pytest.mark.parametrize("num_pieces", [1, 3, 32])
def test_visits_are_to_every_tile_of_every_head_once(num_pieces, group_size, is_causal, window):
    """Also of keys behind the last query, which no query sees under a causal mask."""
    for num_queries, first_key in itertools.product(LENGTHS, (0, 64, 128, 384)):
        first_tile, end_tile = seeing_query_tiles(first_key, num_queries, is_causal, window)
        num_tiles = -(-num_queries // 64)
        seen = []
        for piece in range(num_pieces):
            first, end = visits(first_tile, end_tile, group_size)
            first, end = piece_visits(first, end, piece, num_pieces)
            for visit in range(first, end):
                member = member_of_visit(visit, first_tile, end_tile)
                tile = tile_of_visit(visit, first_tile, end_tile)
                assert tile_among_heads(visit, first_tile, end_tile, num_tiles) == member * num_tiles + tile
                seen.append((member, tile))
        # Head by head, so that a program works on few of them at a time.
        assert seen == list(itertools.product(range(group_size), range(first_tile, end_tile)))


@MASKS
@pytest.mark.parametrize("key_rows", [64, 128])
def test_queries_that_see_a_block_of_keys(key_rows, is_causal, window):
    for num_queries, num_keys in itertools.product(LENGTHS, LENGTHS):
        for first_key in range(0, num_keys, key_rows):
            first, end = seeing_query_tiles(first_key, num_queries, is_causal, window, key_rows)
            visited = {query for tile in range(first, end) for query in range(64 * tile, 64 * tile + 64)}
            keys = range(first_key, min(first_key + key_rows, num_keys))
            needed = {
                query
                for query in range(num_queries)
                if any(sees(query, key, num_queries, num_keys, is_causal, window) for key in (keys[0], keys[-1]))
            }
            assert needed <= visited
            # Tiles of 64 queries start at a multiple of 64, so at most the first two cross the diagonal, and as if all
            # keys of the block were there, a query of the last sees one.
            assert all(sees(64 * tile, keys[-1], 10**9, num_keys, is_causal) for tile in range(first + 2, end))
            if window and end > first:
                assert sees(64 * end - 64, first_key + key_rows - 1, 10**9, 10**9, False, window)


class Barriers:
    """Counted barriers: [phases completed, arrivals] of each.

    A wait for use n of a slot is a wait for a number of phases, which is how the kernels' parities must be read: a test
    fails if anybody were two phases ahead.
    """

    def __init__(self, **counts):
        self._counts = counts
        self._states = collections.defaultdict(lambda: [0, 0])

    def arrive(self, kind, *where):
        state = self._states[kind, *where]
        state[1] += 1
        if state[1] == self._counts[kind]:
            state[0], state[1] = state[0] + 1, 0

    def passes(self, kind, *where, parity):
        """Whether mbarrier.wait(parity) returns: the phase of that parity is the last completed one."""
        return (self._states[kind, *where][0] - 1) % 2 == parity


class NamedBarriers:
    """Barriers of a number of parties. A phase completes when each has arrived, once: nobody may be a phase ahead."""

    def __init__(self, **counts):
        self._counts = counts
        self._phases = collections.Counter()
        self._arrived = collections.defaultdict(set)

    def arrive(self, kind, *where, by):
        arrived = self._arrived[kind, *where]
        assert by not in arrived
        arrived.add(by)
        if len(arrived) == self._counts[kind]:
            self._phases[kind, *where] += 1
            arrived.clear()

    def wait(self, kind, *where, by):
        phase = self._phases[kind, *where]
        self.arrive(kind, *where, by=by)
        while self._phases[kind, *where] == phase:
            yield


def simulate(
    consumers, stages, key_rows, num_queries, num_keys, is_causal, window, take_turns, own_out_tiles, num_sequences=2
):
    """One forward program's producer and consumers as coroutines on counted barriers, and what each consumer read."""
    barriers = Barriers(ready=1, query_ready=1, query_free=1)
    arrive, passes = barriers.arrive, barriers.passes
    named = NamedBarriers(free=consumers + 1, turn=2)
    ring = {}
    reads = collections.defaultdict(list)

    rows = 64 * consumers
    of_problem = num_queries, num_keys, key_rows, is_causal, window
    num_tiles = -(-num_queries // rows)
    (share,) = share_out(ordered_items(num_tiles, num_sequences, num_sequences, is_causal), [1] * num_tiles, 1)

    def items():
        for turn, (tile, sequence) in enumerate(share):
            yield turn, tile * rows, sequence

    def load(name, use, content):
        slot = use % stages
        if use >= stages:
            yield from named.wait("free", name, slot, by="producer")
        ring[name, slot] = content
        arrive("ready", name, slot)

    def producer():
        first_use = 0
        for turn, first_query, sequence in items():
            first, _, _, end = seen_key_tiles(first_query, rows, *of_problem)
            yield from load("key", first_use, (sequence, end - 1))
            for consumer in range(consumers):
                while not passes("query_free", consumer, parity=(turn & 1) ^ 1):
                    yield
                ring["query", consumer] = (sequence, first_query + 64 * consumer)
                arrive("query_ready", consumer)
            for i in range(1, end - first):
                yield from load("key", first_use + i, (sequence, end - 1 - i))
                yield from load("value", first_use + i - 1, (sequence, end - i))
            first_use += end - first
            yield from load("value", first_use - 1, (sequence, first))

    def consumer(me):
        def read(name, use):
            slot = use % stages
            while not passes("ready", name, slot, parity=(use // stages) & 1):
                yield
            return ring[name, slot]

        def release(name, use):
            named.arrive("free", name, use % stages, by=me)

        def take_turn():
            if take_turns:
                yield from named.wait("turn", me, by=me)

        def pass_turn():
            if take_turns:
                named.arrive("turn", (me + 1) % consumers, by=me)

        def skip(uses):
            for use in uses:
                yield from take_turn()
                pass_turn()
                yield from read("key", use)
                release("key", use)
                yield from read("value", use)
                release("value", use)

        if me == consumers - 1:
            pass_turn()
        first_use = 0
        for turn, item_query, sequence in items():
            first_query = item_query + 64 * me
            item_first, _, _, item_end = seen_key_tiles(item_query, rows, *of_problem)
            first, _, _, end = seen_key_tiles(first_query, 64, *of_problem)
            count = end - first if end else 0
            last_use = first_use + item_end - item_first
            yield from skip(range(first_use, min(last_use, first_use + item_end - end)))
            while not passes("query_ready", me, parity=turn & 1):
                yield
            assert ring["query", me] == (sequence, first_query)
            use = first_use + item_end - end
            if end:
                key = yield from read("key", use)
            for i in range(count):
                yield from take_turn()
                if i:
                    value = yield from read("value", use + i - 1)
                    reads[me, sequence, first_query].append(("value", *value))
                pass_turn()
                yield
                # Still there when the products are complete.
                assert ring["key", (use + i) % stages] == key
                reads[me, sequence, first_query].append(("key", *key))
                if not i:
                    release("key", use)
                yield
                if i + 1 < count:
                    next_key = yield from read("key", use + i + 1)
                if i:
                    assert ring["value", (use + i - 1) % stages] == value
                    release("value", use + i - 1)
                    yield
                    # Still there when its scores are needed once more.
                    assert ring["key", (use + i) % stages] == key
                    release("key", use + i)
                if i + 1 < count:
                    key = next_key
            if own_out_tiles or not end:
                arrive("query_free", me)
            if end:
                value = yield from read("value", use + count - 1)
                reads[me, sequence, first_query].append(("value", *value))
                release("value", use + count - 1)
                if not own_out_tiles:
                    ring["query", me] = "output"
                    yield
                    # Still there when it is stored.
                    assert ring["query", me] == "output"
                    arrive("query_free", me)
            yield from skip(range(last_use - (first - item_first if end else 0), last_use))
            first_use = last_use

    return producer, consumer, reads


@MASKS
@pytest.mark.parametrize("take_turns", [False, True], ids=["free", "turns"])
@pytest.mark.parametrize(
    ("consumers", "stages", "key_rows", "own_out_tiles"),
    [(2, 2, 128, True), (3, 2, 128, True), (3, 3, 64, True), (2, 2, 64, False)],
)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (500, 700), (700, 300), (65, 1000)])
def test_barriers_neither_deadlock_nor_let_a_tile_be_overwritten(
    num_queries, num_keys, consumers, stages, key_rows, own_out_tiles, take_turns, is_causal, window
):
    for seed in range(8):
        producer, consumer, reads = simulate(
            consumers, stages, key_rows, num_queries, num_keys, is_causal, window, take_turns, own_out_tiles
        )
        _run_in_random_order([[producer(), *(consumer(me) for me in range(consumers))]], seed)
        for (me, sequence, first_query), read in reads.items():
            first, _, _, end = seen_key_tiles(first_query, 64, num_queries, num_keys, key_rows, is_causal, window)
            for name in ("key", "value"):
                tiles = [(of, tile) for what, of, tile in read if what == name]
                assert tiles == [(sequence, tile) for tile in reversed(range(first, end))], (me, name)


def simulate_backward(
    first_key,
    num_queries,
    is_causal,
    kernel,
    window,
    stages=2,
    turns=None,
    num_keys=None,
    group_size=1,
    piece=0,
    num_pieces=1,
    rounds=1,
):
    """As ``simulate``, of a backward program: its coroutines, the visits that each sum got, and those it must get.

    ``rounds``: how many items of the same keys and queries it has, one after another.
    ``turns``: for each tile of queries of each head how many programs have added to dQ, if they do so in turn.
    """
    is_wide, has_reducer, in_turn = kernel == "wide", kernel == "reducer", turns is not None
    key_rows = 64 if is_wide else 128
    one_arrival = "key_ready", "query_ready", "grad_out_ready", "grad_scores_free", "turn"
    two_arrivals = "tile_free", "query_free", "grad_out_free", "weights_ready", "grad_scores_ready"
    counts = dict.fromkeys(one_arrival, 1) | dict.fromkeys(two_arrivals, 2)
    barriers = Barriers(**counts, keys_free=3, results_ready=2 if is_wide else 1)
    memory = {}
    sums = collections.defaultdict(list)
    tiles = seeing_query_tiles(first_key, num_queries, is_causal, window, key_rows)
    first, end = piece_visits(*visits(*tiles, group_size), piece, num_pieces)
    # Turns are counted by the tile of queries among those of all heads.
    place = {visit: tile_among_heads(visit, *tiles, -(-num_queries // 64)) for visit in range(first, end)}
    grad_query_names = ["dQ"] if has_reducer else [("dQ", 0), ("dQ", 1)]
    waited = set()

    def wait(kind, *where, parity):
        while not barriers.passes(kind, *where, parity=parity):
            yield

    num_visits = max(0, end - first)

    def of_all_rounds(one_round):
        return itertools.chain.from_iterable(map(one_round, range(rounds)))

    def producer(round):
        keys_slot = round % 2
        if has_reducer:
            yield from wait("keys_free", keys_slot, parity=((round // 2) & 1) ^ 1)
        memory.update({(name, consumer): "input" for name in ("value", ("key", keys_slot)) for consumer in range(2)})
        memory["round", keys_slot] = round
        barriers.arrive("key_ready", keys_slot)
        for visit in range(first, end + (stages if in_turn else 0)):
            use = round * num_visits + visit - first
            slot = use % stages
            for name in ("query", "grad_out"):
                if visit < end or name == "query":
                    free = f"{name}_free" if is_wide else "tile_free"
                    yield from wait(free, slot, parity=((use // stages) & 1) ^ 1)
                if visit < end:
                    memory[name, slot] = round, visit
                    barriers.arrive(f"{name}_ready", slot)
                    yield
            if in_turn:
                yield from pass_turns(visit)
        # Of a piece the consumers write their shares of dK and dV to memory themselves, and beside a reducer always.
        for consumer in range(2 if num_pieces == 1 and not has_reducer else 0):
            yield from wait("results_ready", 0 if is_wide else consumer, parity=0)
            assert memory["grad_key" if kernel == "exchange" else ("key", 0), consumer] == "dK"
            assert memory["value", consumer] == "dV"

    def seen_before(visit):
        return turns_before(tile_of_visit(visit, *tiles), 64, first_key, num_keys, key_rows, is_causal)

    def pass_turns(visit):
        if not has_reducer and visit - stages >= first:
            end_turn(visit - stages)
        if first < visit <= end:
            while turns[place[visit - 1]] < seen_before(visit - 1):
                yield
            # Whoever uses the turns sees every one of them.
            assert visit - 1 - first - len(waited) < 4
            barriers.arrive("turn", (visit - 1 - first) % 4)

    def end_turn(visit):
        assert turns[place[visit]] == seen_before(visit)
        assert all(visit in sums[name] for name in grad_query_names)
        turns[place[visit]] += 1

    def wait_for_turn(use):
        if in_turn:
            yield from wait("turn", use % 4, parity=(use // 4) & 1)
            assert turns[place[first + use]] == seen_before(first + use)
            waited.add(use)

    def both(name, *where):
        return [memory[name, *where, consumer] for consumer in range(2)]

    def add_grad_query(name, visit, *buffer, columns=(0, 1), round=0):
        """dS of both consumers is there when the product begins, and still there when it is complete."""
        for _ in range(2):
            assert both("grad_scores", *buffer) == [(round, visit)] * 2
            assert [memory[("key", round % 2), which] for which in columns] == ["input"] * len(columns)
            assert memory["round", round % 2] == round
            yield
        if name != "dQ":
            yield from wait_for_turn(visit - first)
            sums[name].append(visit)

    def scores_of(visit, round=0):
        use = round * num_visits + visit - first
        yield from wait("query_ready", use % stages, parity=(use // stages) & 1)
        return memory["query", use % stages]

    def consumer(me, round=0):
        keys_slot = round % 2
        yield from wait("key_ready", keys_slot, parity=(round // 2) & 1)
        if has_reducer:
            # Keys and values stay in registers.
            assert memory["round", keys_slot] == round
            yield
            assert memory["round", keys_slot] == round
            barriers.arrive("keys_free", keys_slot)
        if first < end:
            scores = yield from scores_of(first, round)
        for visit in range(first, end):
            use = round * num_visits + visit - first
            slot, buffer = use % stages, use % 2
            yield from wait("grad_out_ready", slot, parity=(use // stages) & 1)
            assert scores == memory["grad_out", slot] == (round, visit)
            yield
            if has_reducer:
                yield from wait("grad_scores_free", buffer, parity=((use // 2) & 1) ^ 1)
            memory["grad_scores", buffer, me] = round, visit
            barriers.arrive("grad_scores_ready", buffer)
            yield
            if visit + 1 < end:
                scores = yield from scores_of(visit + 1, round)
            if not has_reducer:
                yield from wait("grad_scores_ready", buffer, parity=(use // 2) & 1)
                yield from add_grad_query(("dQ", me), visit, buffer)
            assert memory["query", slot] == memory["grad_out", slot] == (round, visit)
            sums["dK", me].append(visit)
            barriers.arrive("tile_free", slot)
            yield
        if num_pieces > 1 or has_reducer:
            return
        memory["value", me] = "dV"
        memory["grad_key", me] = "dK"
        barriers.arrive("results_ready", me)

    def wide_consumer(me):
        yield from wait("key_ready", 0, parity=0)
        for visit in range(first, end):
            use = visit - first
            slot, buffer = use % stages, use % 2
            scores = yield from scores_of(visit)
            yield from wait("grad_out_ready", slot, parity=(use // stages) & 1)
            assert scores == memory["grad_out", slot] == (0, visit)
            assert both("value") == ["input", "input"]
            memory["weights", buffer, me] = visit
            barriers.arrive("weights_ready")
            yield
            yield from wait("weights_ready", parity=use & 1)
            assert both("weights", buffer) == [visit, visit]
            yield
            memory["grad_scores", me] = 0, visit
            barriers.arrive("grad_scores_ready")
            yield
            yield from wait("grad_scores_ready", parity=use & 1)
            yield from add_grad_query(("dQ", me), visit, columns=(me,))
            # dV is complete as well.
            assert both("weights", buffer) == [visit, visit]
            assert memory["grad_out", slot] == (0, visit)
            barriers.arrive("grad_out_free", slot)
            yield
            assert both("grad_scores") == [(0, visit), (0, visit)]
            assert memory["query", slot] == (0, visit)
            sums["dK", me].append(visit)
            barriers.arrive("query_free", slot)
            yield
        if num_pieces > 1:
            return
        memory["value", me] = "dV"
        memory[("key", 0), me] = "dK"
        barriers.arrive("results_ready", 0)

    def reducer(round):
        yield from wait("key_ready", round % 2, parity=(round // 2) & 1)
        for visit in range(first, end):
            use = round * num_visits + visit - first
            yield from wait("grad_scores_ready", use % 2, parity=(use // 2) & 1)
            yield from add_grad_query("dQ", visit, use % 2, round=round)
            barriers.arrive("grad_scores_free", use % 2)
            yield
            if in_turn and use >= 2:
                end_turn(visit - 2)
            yield from wait_for_turn(use)
            sums["dQ"].append(visit)
        barriers.arrive("keys_free", round % 2)
        if in_turn:
            for visit in range(max(first, end - 2), end):
                end_turn(visit)

    if is_wide:
        consumers = [wide_consumer(me) for me in range(2)]
    else:
        consumers = [of_all_rounds(functools.partial(consumer, me)) for me in range(2)]
    coroutines = [of_all_rounds(producer), *consumers]
    return [*coroutines, of_all_rounds(reducer)] if has_reducer else coroutines, sums, range(first, end)


KERNELS = pytest.mark.parametrize("kernel", ["exchange", "reducer", "wide"])


@MASKS
@KERNELS
@pytest.mark.parametrize(
    ("first_key", "num_queries", "group_size", "num_pieces"),
    [
        *((first_key, num_queries, 1, 1) for first_key, num_queries in ((0, 1), (0, 65), (0, 1000))),
        *(
            (first_key, num_queries, *pieces)
            for first_key, num_queries in ((0, 1), (0, 300), (128, 300), (256, 100))
            for pieces in ((1, 1), (2, 1), (3, 1), (4, 3), (8, 8), (3, 32))
        ),
    ],
)
def test_backward_barriers_neither_deadlock_nor_let_a_tile_be_overwritten(
    first_key, num_queries, group_size, num_pieces, kernel, is_causal, window
):
    """dK and dV get every tile of queries of every head that sees the keys from one piece, and dQ of it their share."""
    tiles = seeing_query_tiles(first_key, num_queries, is_causal, window, 64 if kernel == "wide" else 128)
    names = [("dK", 0), ("dK", 1), *(["dQ"] if kernel == "reducer" else [("dQ", 0), ("dQ", 1)])]
    for seed in range(20 if group_size == 1 else 3):
        rounds, stages = (1 + seed % 4, 2 + seed % 2) if kernel == "reducer" else (1, 2)
        options = {"stages": stages, "rounds": rounds, "group_size": group_size, "num_pieces": num_pieces}
        summed = []
        for piece in range(num_pieces):
            coroutines, sums, visited = simulate_backward(
                first_key, num_queries, is_causal, kernel, window, piece=piece, **options
            )
            _run_in_random_order([coroutines], seed)
            assert [sums[name] for name in names] == [[*visited] * rounds] * len(names)
            summed += [(member_of_visit(visit, *tiles), tile_of_visit(visit, *tiles)) for visit in visited]
        assert summed == list(itertools.product(range(group_size), range(*tiles)))


@MASKS
@KERNELS
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "at_once"), [(1, 1, 1), (500, 700, 3), (700, 300, 1), (300, 900, 9)]
)
def test_turns_to_add_to_dq_neither_deadlock_nor_pass_anybody_over(
    num_queries, num_keys, at_once, group_size, kernel, is_causal, window
):
    """``at_once`` programs have a multiprocessor; the next begins when one ends, in the order of the schedule.

    Under a causal mask as many of them may wait for one that begins after them.
    """
    key_rows = 64 if kernel == "wide" else 128
    end_tile = -(-num_queries // 64)
    num_tiles = -(-num_keys // key_rows)
    items = ordered_items(num_tiles, 1, 1, last_tile_first=True)
    items = list(longest_first_at_the_end(items, at_once if is_causal else 1))
    for seed in range(4):
        turns = collections.Counter()
        options = {"turns": turns, "num_keys": num_keys, "group_size": group_size}
        programs = [
            simulate_backward(tile * key_rows, num_queries, is_causal, kernel, window, **options) for tile, _ in items
        ]
        _run_in_random_order([coroutines for coroutines, _, _ in programs], seed, at_once)
        expected = collections.Counter()
        for tile in range(num_tiles):
            first, end = seeing_query_tiles(tile * key_rows, num_queries, is_causal, window, key_rows)
            expected.update(member * end_tile + seen for member in range(group_size) for seen in range(first, end))
        assert turns == expected


def _run_in_random_order(programs, seed, at_once=None):
    """Each program's coroutines; only ``at_once`` programs have begun and not ended at a time."""
    choose = random.Random(seed)
    waiting = list(programs)
    running = []
    for _ in range(400_000):
        while waiting and (at_once is None or len(running) < at_once):
            running.append(list(waiting.pop(0)))
        if not running:
            return
        program = choose.choice(running)
        one = choose.choice(program)
        try:
            next(one)
        except StopIteration:
            program.remove(one)
            if not program:
                running.remove(program)
    raise AssertionError("deadlock")
