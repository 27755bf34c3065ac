"""Parts that the backward kernels for Hopper share: finding tiles, loading them by TMA, starting sums.

Items, their visits and pieces are those of schedule.py. Tile n that goes through a ring is use n, in slot n % stages.
"""

from collections import namedtuple
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from cs336sys.kernels.attention.hopper import schedule as schedule_arithmetic
from cs336sys.kernels.attention.hopper.gluon import CAUSAL, WINDOW, run_assembly, store_wait, tma_load

# The keys of one warpgroup, which are the rows of its matrix instructions, and the queries of a tile.
ROWS = gl.constexpr(64)
NOBODY_SEES = gl.constexpr(2**31 - 1)  # Stands for a key behind the last one.
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
# How many turns to add to dQ may have come and not been used: two more than the ring has stages, because a reducer
# frees scores, by which consumers go on to the tile after next, before it takes its turn.
TURNS = gl.constexpr(4)

Tensors = namedtuple("Tensors", "query key value grad_out statistics grad_key grad_value grad_query_sum")
Shape = namedtuple("Shape", "num_key_heads num_queries num_keys padded_queries group_size window window_tiles diagonal")
# What all warps of a program share; each kernel has buffers and barriers of its own.
Shared = namedtuple("Shared", "tensors buffers barriers schedule shape")
# The keys of a program or of a piece of its work, and its visits to tiles of queries, from ``first_tile`` on, of each
# head of the group that shares the keys; there are none if ``end_visit`` is ``first_visit``.
Item = namedtuple("Item", "first_key key_sequence first_tile first_visit end_visit")


@dataclass(frozen=True)
class HopperBackwardConfig:
    """Constants of a backward kernel.

    ``ordered``: programs add to dQ in turn, which ``turns`` counts (``pass_turns``). ``grouped``: group_size heads of
    queries side by side share a head of keys, and the program visits all of their queries. ``cut``: some programs have
    a piece of these visits only, and leave dK and dV in ``pieces``, float32, (piece, dK or dV, tile of 64 keys, as
    ``convert.py`` describes). ``shifted``: as :class:`HopperForwardConfig`'s, without a window.
    """

    head_dim: int
    stages: int
    mask: int
    ordered: bool
    grouped: bool
    cut: bool
    shifted: bool
    consumer_registers: int
    reducer_registers: int = 0


_query_tiles = gluon.jit(schedule_arithmetic.query_tiles)
_turns_before = gluon.jit(schedule_arithmetic.turns_before)
_visits = gluon.jit(schedule_arithmetic.visits)
_member_of_visit = gluon.jit(schedule_arithmetic.member_of_visit)
_tile_of_visit = gluon.jit(schedule_arithmetic.tile_of_visit)
_tile_among_heads = gluon.jit(schedule_arithmetic.tile_among_heads)
_piece_visits = gluon.jit(schedule_arithmetic.piece_visits)


@gluon.jit
def query_at_key(key, shape, CONFIG: gl.constexpr):
    """Return which query is at the position of a key, below 0 for keys in front of the first."""
    if CONFIG.shifted:
        key -= shape.diagonal
    return key


@gluon.jit
def read_item(schedule, work, shape, KEY_ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Return the item, or the piece of one, of KEY_ROWS keys that has row ``work`` of ``as_table_of_pieces``."""
    # A row is two numbers: pieces of the item + 256 * number of the piece among all, and the row of the item.
    entry = schedule + gl.load(schedule + work * 2 + 1) * 2
    first_key = gl.load(entry) * KEY_ROWS
    first_query = query_at_key(first_key, shape, CONFIG)
    if CONFIG.shifted:
        first_query = max(first_query, 0)
    first_tile, end = _query_tiles(
        first_query, shape.num_queries, ROWS, CONFIG.mask >= CAUSAL, shape.window_tiles if CONFIG.mask == WINDOW else 0
    )
    first = first_tile
    if CONFIG.grouped:
        first, end = _visits(first_tile, end, shape.group_size)
    if CONFIG.cut:
        num_pieces = gl.load(schedule + work * 2) % 256
        first, end = _piece_visits(first, end, piece_number(schedule, work) % num_pieces, num_pieces)
    return Item(first_key, gl.load(entry + 1), first_tile, first, max(first, end))  # No query sees the keys: 0 visits.


@gluon.jit
def rows_of_program(schedule, CONFIG: gl.constexpr):
    """Return (first, end) of this program's rows of the schedule: of the items and pieces that it works through."""
    first = gl.program_id(0)
    count = 1
    if not CONFIG.ordered:  # Else each program has one row.
        count = gl.load(schedule + gl.program_id(0) * 2)
        first = gl.load(schedule + gl.program_id(0) * 2 + 1)
    return first, first + count


@gluon.jit
def consume(shared, pieces, scale, scale_log2, COMPUTE: gl.constexpr, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Let a warpgroup work through its program's items of 128 keys: COMPUTE computes dK and dV of one."""
    first_work, end_work = rows_of_program(shared.schedule, CONFIG)
    first_use = 0
    for work in range(first_work, end_work):
        item = read_item(shared.schedule, work, shared.shape, 2 * ROWS, CONFIG)
        numbers = scale, scale_log2, work, work - first_work, first_use
        COMPUTE(shared, pieces, numbers, item, CONSUMER, CONFIG)
        first_use += item.end_visit - item.first_visit
    store_wait(0)  # TMA must have read shared memory before the program ends.


@gluon.jit
def first_sequence(key_sequence, shape, CONFIG: gl.constexpr):
    """Return the first sequence of queries of the group that shares a sequence of keys."""
    sequence = key_sequence
    if CONFIG.grouped:
        sequence *= shape.group_size
    return sequence


@gluon.jit
def _end_tile(first_tile, shape, CONFIG: gl.constexpr):
    """Return where the visits to each head end that begin with ``first_tile``."""
    end = shape.padded_queries // ROWS
    if CONFIG.mask == WINDOW:
        end = min(end, first_tile + shape.window_tiles)
    return end


@gluon.jit
def member_of(visit, first_tile, shape, CONFIG: gl.constexpr):
    """Return which head of the group a visit is to; ``first_tile``: where its visits to each head begin."""
    member = 0
    if CONFIG.grouped:
        member = _member_of_visit(visit, first_tile, _end_tile(first_tile, shape, CONFIG))
    return member


@gluon.jit
def tile_of(visit, first_tile, shape, CONFIG: gl.constexpr):
    """Return the tile of queries of a visit among those of its sequence."""
    tile = visit
    if CONFIG.grouped:
        tile = _tile_of_visit(visit, first_tile, _end_tile(first_tile, shape, CONFIG))
    return tile


@gluon.jit
def tile_of_group(visit, first_tile, shape, CONFIG: gl.constexpr):
    """Return the tile of queries of a visit among those of all sequences of the group, sequence after sequence."""
    tile = visit
    if CONFIG.grouped:
        tile = _tile_among_heads(visit, first_tile, _end_tile(first_tile, shape, CONFIG), shape.padded_queries // ROWS)
    return tile


@gluon.jit
def grad_query_offset(visit, first_tile, shape, CONFIG: gl.constexpr):
    """Return where the sum of dQ of a visit's queries begins, in elements behind that of the group's first sequence."""
    tile = tile_of_group(visit, first_tile, shape, CONFIG)
    if CONFIG.grouped:  # 32 bits hold the offset in one sequence; in a group it may be larger.
        tile = tile.to(gl.int64)
    return tile * ROWS * CONFIG.head_dim


@gluon.jit
def piece_number(schedule, work):
    """Return which of all pieces of items a row of the schedule is."""
    return gl.load(schedule + work * 2) // 256  # See read_item().


@gluon.jit
def is_piece(schedule, work, CONFIG: gl.constexpr):
    """Return whether other pieces have other queries of the same keys: dK and dV are the sum of all of theirs."""
    piece = False
    if CONFIG.cut:
        piece = gl.load(schedule + work * 2) % 256 > 1  # The pieces of its item: see read_item().
    return piece


@gluon.jit
def load_keys(shared, item, slot, TILES: gl.constexpr):
    """Load keys and values of an item, TILES times 64, into a slot of their rings."""
    tensors, buffers, barriers, _, shape = shared
    load_operand(tensors.key, buffers.key_tiles, barriers.key_ready, slot, item, shape, TILES)
    load_operand(tensors.value, buffers.value_tiles, barriers.value_ready, slot, item, shape, TILES)


@gluon.jit
def load_operand(tensor, ring, ready, slot, item, shape, TILES: gl.constexpr):
    """Load the rows of an item's keys of ``tensor``, TILES times 64, into a slot of its ring."""
    batch = item.key_sequence // shape.num_key_heads
    key_head = item.key_sequence % shape.num_key_heads
    mbarrier.expect(ready.index(slot), TILES * tensor.block_type.nbytes)
    for tile in gl.static_range(TILES):
        row = item.first_key + tile * ROWS
        tma_load(tensor, [batch, key_head, row, 0], ready.index(slot), ring.index(TILES * slot + tile))


@gluon.jit
def load_queries(
    shared, turns, item, first_use, visits, TILES: gl.constexpr, ENDS_TURNS: gl.constexpr, CONFIG: gl.constexpr
):
    """Load the tiles of queries of an item's visits from ``visits[0]`` to before ``visits[1]``.

    ``first_use``: what use of the rings the item's first visit is. Ordered: see ``pass_turns``; there are STAGES visits
    more, which load nothing. If TILES is 1 (wide), consumers release queries later than gradients of the output.
    """
    tensors, buffers, barriers, _, shape = shared
    query, _, _, grad_out, statistics, _, _, _ = tensors
    query_ready, grad_out_ready = barriers.query_ready, barriers.grad_out_ready
    logsumexp_ring, delta_ring, grad_out_ring = buffers.logsumexp_ring, buffers.delta_ring, buffers.grad_out_ring
    STAGES: gl.constexpr = CONFIG.stages
    if TILES == 1:
        query_free = barriers.query_free
    else:
        query_free = barriers.tile_free
    _, key_sequence, first_tile, first, end = item
    batch = key_sequence // shape.num_key_heads
    key_head = key_sequence % shape.num_key_heads
    first_of_group = first_sequence(key_sequence, shape, CONFIG)
    first_head = first_sequence(key_head, shape, CONFIG)  # Of the group: heads are numbered as sequences are.
    turns += first_of_group * shape.padded_queries
    for visit in range(visits[0], visits[1]):
        use = first_use + visit - first
        slot = use % STAGES
        first_query = tile_of(visit, first_tile, shape, CONFIG) * ROWS
        head = first_head + member_of(visit, first_tile, shape, CONFIG)
        sequence = first_of_group + member_of(visit, first_tile, shape, CONFIG)
        free_parity = ((use // STAGES) & 1) ^ 1
        mbarrier.wait(query_free.index(slot), free_parity)
        # Visits behind the last load nothing: they end the turns of the tiles that the ring still has.
        has_tile = visit < end if CONFIG.ordered else True
        if has_tile:
            mbarrier.expect(query_ready.index(slot), query.block_type.nbytes + 2 * statistics.block_type.nbytes)
            tma_load(query, [batch, head, first_query, 0], query_ready.index(slot), buffers.query_ring.index(slot))
            tma_load(statistics, [2 * sequence, first_query], query_ready.index(slot), logsumexp_ring.index(slot))
            tma_load(statistics, [2 * sequence + 1, first_query], query_ready.index(slot), delta_ring.index(slot))
            if TILES == 1:
                mbarrier.wait(barriers.grad_out_free.index(slot), free_parity)
            mbarrier.expect(grad_out_ready.index(slot), grad_out.block_type.nbytes)
            tma_load(grad_out, [batch, head, first_query, 0], grad_out_ready.index(slot), grad_out_ring.index(slot))
        if CONFIG.ordered:
            pass_turns(turns, barriers.turn, visit, item, shape, TILES * ROWS, ENDS_TURNS, CONFIG)


@gluon.jit
def pass_turns(turns, turn, visit, item, shape, KEY_ROWS: gl.constexpr, ENDS_TURNS: gl.constexpr, CONFIG: gl.constexpr):
    """Pass turns to add to dQ on, while a visit's tile is loaded: end that of the tile it replaces, begin visit - 1's.

    ``turns``: for each tile of queries of the group's sequences how many programs have added, at its first query;
    ``prepare_kernel`` has set it to 0. ``turn``: barriers that tell those who add. The producer reads and writes the
    counters because it has the time: who adds would lose the latency of L2 twice in every tile. ENDS_TURNS: who
    releases a tile has added to its dQ; otherwise whoever adds ends its turns itself.
    """
    first_key, _, first_tile, first, end = item
    if ENDS_TURNS:
        replaced = visit - CONFIG.stages
        end_turn(turns, replaced, replaced >= first, first_tile, shape, CONFIG)
    if visit > first and visit <= end:  # The turn of visit - 1, the last one's, too.
        counter = turns + tile_of_group(visit - 1, first_tile, shape, CONFIG) * ROWS
        tile = tile_of(visit - 1, first_tile, shape, CONFIG)
        diagonal = shape.diagonal if CONFIG.shifted else 0
        before = _turns_before(tile, ROWS, first_key, shape.num_keys, KEY_ROWS, CONFIG.mask, diagonal)
        # Wait until so many programs have added. The fence: what the reducer writes by TMA comes after what was read.
        run_assembly(
            """{
            .reg .pred early;
            again:
            ld.acquire.gpu.global.u32 $0, [$1];
            setp.lt.u32 early, $0, $2;
            @early bra again;
            fence.proxy.async.global;
            }""",
            "=&r,l,r",
            [counter.to(gl.int64, bitcast=True), before],
        )
        mbarrier.arrive(turn.index((visit - 1 - first) % TURNS), count=1)


@gluon.jit
def wait_for_turn(turn, use):
    """Wait until this program may add to dQ of its visit number ``use``."""
    mbarrier.wait(turn.index(use % TURNS), (use // TURNS) & 1)


@gluon.jit
def end_turn(turns, visit, is_visit, first_tile, shape, CONFIG: gl.constexpr):
    """Let the next program add to dQ of a visit, if it is one, after all that this thread knows to be in memory."""
    counter = turns + tile_of_group(visit, first_tile, shape, CONFIG) * ROWS
    counter = counter.to(gl.pointer_type(gl.int32), bitcast=True)
    gl.atomic_add(counter, 1, mask=is_visit, sem="release", scope="gpu")


@gluon.jit
def needs_mask(first_query, first_key, shape, CONFIG: gl.constexpr):
    """Return whether a query of a tile of at most 64 does not see one of 64 keys, which have their queries' numbers."""
    # Keys behind the last one end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
    masked = first_key + ROWS > query_at_key(shape.num_keys, shape, CONFIG)
    if CONFIG.mask >= CAUSAL:
        masked = masked or first_query < first_key + ROWS - 1
    if CONFIG.mask == WINDOW:
        masked = masked or first_query + ROWS > first_key + shape.window
    return masked


@gluon.jit
def masked_start(start, first_query, first_key, shape, CONFIG: gl.constexpr):
    """Return ``start`` of the sums of S^T (keys, queries), and -inf where a query does not see a key.

    Keys have the numbers of queries, as :func:`query_at_key`: comparing with these takes a register less.
    The mask is what the sums start from: registers are scarcer once they are complete.
    """
    layout: gl.constexpr = start.type.layout
    keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    keys = gl.where(keys < query_at_key(shape.num_keys, shape, CONFIG), keys, NOBODY_SEES)
    if CONFIG.mask >= CAUSAL:
        queries = first_query + gl.arange(0, start.shape[1], gl.SliceLayout(0, layout))
        visible = keys[:, None] <= queries[None, :]
        if CONFIG.mask == WINDOW:
            visible = visible & (keys[:, None] > (queries - shape.window)[None, :])
    else:
        visible = (keys < NOBODY_SEES)[:, None]
    return gl.where(visible, start, float("-inf"))


@gluon.jit
def scores_start(logsumexps, scale_log2, first_query, first_key, shape, CONFIG: gl.constexpr):
    """Start the sums of S^T at -L / scale_log2, so that P^T is exp2(scale_log2 S^T), and at -inf for unseen keys.

    ``logsumexps``: of the tile's queries, in registers. So no thread waits for them between S and P, when products read
    all that shared memory can deliver and a load takes hundreds of clocks.
    """
    QUERIES: gl.constexpr = logsumexps.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])  # wgmma: 4 warps of 16 rows.
    start = gl.zeros([ROWS, QUERIES], gl.float32, layout) + (logsumexps * (-1.0 / scale_log2))[None, :]
    if needs_mask(first_query, first_key, shape, CONFIG):
        start = masked_start(start, first_query, first_key, shape, CONFIG)
    return start


@gluon.jit
def grad_weights_start(deltas):
    """Return -D of the tile's queries, what the sums of dP^T start from: then dS^T is P^T times dP^T."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, deltas.shape[0], 16])  # As scores_start().
    return gl.zeros([ROWS, deltas.shape[0]], gl.float32, layout) - deltas[None, :]


# For 16 bytes of a thread: to add them to what lies in memory, or to write them.
ADD = gl.constexpr("{ red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }")
WRITE = gl.constexpr("{ st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }")


@gluon.jit
def store_sums(sums, values, HOW: gl.constexpr):
    """Add or write a warpgroup's tile of 64 rows and N columns to 64 N float32 numbers, as ``convert.py`` describes."""
    COLUMNS: gl.constexpr = values.shape[1]
    fours = values.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16 * COLUMNS, 2, 2])
    left, right = gl.split(fours)
    first, third = gl.split(left)
    second, fourth = gl.split(right)
    addresses = sums + 4 * gl.arange(0, 16 * COLUMNS, first.type.layout)
    run_assembly(HOW, "=r,l,f,f,f,f", [addresses.to(gl.int64, bitcast=True), first, second, third, fourth])


@gluon.jit
def pieces_of(pieces, schedule, work, NUM_TILES: gl.constexpr, CONFIG: gl.constexpr):
    """Return where a piece leaves first all of dK, then all of dV, of NUM_TILES times 64 keys."""
    return pieces + piece_number(schedule, work).to(gl.int64) * (2 * NUM_TILES * ROWS * CONFIG.head_dim)


@gluon.jit
def issue_scores(
    first_query, use, has_tile, key_operand, query_ring, query_ready, first_key, shape, CONFIG: gl.constexpr
):
    """Begin S^T of a tile of queries, with -inf where a query does not see a key.

    ``key_operand``: the 64 keys, in registers. Without a tile nothing is waited for, and the result means nothing.
    """
    slot = use % CONFIG.stages
    mbarrier.wait(query_ready.index(slot), (use // CONFIG.stages) & 1, pred=has_tile)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # wgmma: 4 warps of 16 rows.
    masked = needs_mask(first_query, first_key, shape, CONFIG)
    start = gl.zeros([ROWS, ROWS], gl.float32, layout)
    if masked:
        start = masked_start(start, first_query, first_key, shape, CONFIG)
    return warpgroup_mma(key_operand, query_ring.index(slot).permute([1, 0]), start, use_acc=masked, is_async=True)
