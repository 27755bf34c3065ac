"""FlashAttention forward for Hopper in Gluon: one warp loads by TMA, two or three warpgroups compute.

A program works through the items that the host's schedule gives it. An item is CONSUMERS * 64 queries of one sequence:
consumer w takes the w-th 64 of them and reads the keys that these queries see in tiles of KEY_ROWS, from the last tile
to the first. So whatever needs a mask, the diagonal and the tail, comes first.

    producer    K0 Q | K1 V0 | K2 V1 | ... | Vn                     by TMA into rings of STAGES tiles
    consumer    S0 softmax0 | S1 P0*V0 softmax1 | S2 P1*V1 softmax2 | ... | Pn*Vn

Between two bars the matrix products are issued together and the softmax starts when S is there: the tensor cores
multiply P V of one tile while the exponentials of the next are computed. P stays in registers, as the left operand.

Weights are relative to the maximum of the row in the first tile, whose logarithm ends up in the logsumexp: any other
number would do as long as nothing overflows. So the loop takes no maxima, which as chains of comparisons would stand
in front of the exponentials, and rescales nothing. When a sum of weights passes a limit, S of the tile is multiplied
once more and its step is that of the online softmax, with new maxima.

What TMA brings is announced by mbarriers. A ``ready`` barrier counts one arrival, the producer's, and the bytes of the
tile; a phase is named by its parity: use n of a slot waits for phase n, of parity n & 1. Who overwrites what it holds
waits for the phase before, of parity (n & 1) ^ 1, which at first counts as over. That a slot of a ring is free,
and whose turn it is, is said by named barriers, at which a warp arrives and goes on: at an mbarrier a warpgroup's warps
must meet first, so that one thread may arrive for all (1x16x16384x64: 1.000 ms instead of 0.975).

Sources: Shah et al., "FlashAttention-3" (2024), algorithms 1 and 2; Dao, "FlashAttention-2" (2023), algorithm 1; Hong
et al., "FlashDecoding++" (2023), section 3, for weights relative to another number than the maximum.
"""

from collections import namedtuple
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336sys.kernels.attention.hopper.gluon import (
    CAUSAL,
    WINDOW,
    named_barrier_arrive,
    named_barrier_wait,
    new_barriers,
    store_wait,
    thread_barrier,
    tma_load,
    tma_store,
)
from cs336sys.kernels.attention.hopper.schedule import key_tiles, window_tiles

LN_2 = gl.constexpr(0.6931471805599453)
CONSUMER_ROWS = gl.constexpr(64)  # The rows of one warpgroup's matrix instruction.
WARPS = gl.constexpr(4)  # Of a warpgroup.
# With a larger head dimension shared memory has no room for tiles of the output: they take those of the queries.
LARGEST_WITH_OUT_TILES = gl.constexpr(128)
# The maximum of a row that has seen no key or only scores of -inf. Subtracted from one of these it gives a weight of 0,
# from any finite score inf, which is beyond every limit.
NO_MAXIMUM = gl.constexpr(-1e30)
# The largest sum of one thread's weights that a step without maxima may find, as the bits of a float32, which order
# positive numbers, too: 2^60 keeps all sums far from infinity, and 2^15 each weight in the range of float16.
LIMIT = gl.constexpr(0x5D800000)
FLOAT16_LIMIT = gl.constexpr(0x47000000)
FIRST, SECOND, THIRD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Numbers of named barriers: of both slots of each ring, and of each consumer's turn. A multiprocessor has 16, the
# first of which are the compiler's.
KEY_FREE, VALUE_FREE, TURNS = gl.constexpr(8), gl.constexpr(10), gl.constexpr(12)
WARPGROUP_THREADS, PRODUCER_THREADS = gl.constexpr(128), gl.constexpr(32)

# What all warps of a program share.
Shared = namedtuple("Shared", "tensors buffers barriers schedule shape")
Tensors = namedtuple("Tensors", "query key value out")
Buffers = namedtuple("Buffers", "query_tiles key_ring value_ring out_tiles largest_sums")
Barriers = namedtuple("Barriers", "query_ready query_free key_ready value_ready")
Shape = namedtuple("Shape", "num_heads num_queries num_keys window diagonal")


@dataclass(frozen=True)
class HopperForwardConfig:
    """``grouped``: group_size heads of queries side by side share a head of keys and values.

    ``shifted``: under the causal mask query i is at the position of key i + diagonal, a number above 0.
    """

    head_dim: int
    consumers: int
    key_rows: int
    stages: int
    mask: int
    take_turns: bool
    grouped: bool
    shifted: bool
    consumer_registers: int


_key_tiles = gluon.jit(key_tiles)
_window_tiles = gluon.jit(window_tiles)


@gluon.jit
def _tiles(first_query, shape, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Return (first, whole_from, whole, end) of key tiles that queries see; all see those from whole_from to whole."""
    _, num_queries, num_keys, window, diagonal = shape
    KEY_ROWS: gl.constexpr = CONFIG.key_rows
    if CONFIG.shifted:  # Positions in place of numbers of queries.
        first_query += diagonal
        num_queries += diagonal
    whole, end = _key_tiles(first_query, ROWS, num_queries, num_keys, KEY_ROWS, CONFIG.mask >= CAUSAL)
    first, whole_from = 0, 0
    if CONFIG.mask == WINDOW:
        first, whole_from = _window_tiles(first_query, ROWS, num_queries, KEY_ROWS, window, end)
    return first, whole_from, whole, end


@gluon.jit
def _num_rounds(schedule):
    return gl.load(schedule + gl.program_id(0) * 2)  # The program's (number of items, row of the first): as_table().


@gluon.jit
def _item(schedule, round, num_heads, CONFIG: gl.constexpr):
    """Return (first query, batch, head) of this program's item in a round."""
    entry = schedule + (gl.load(schedule + gl.program_id(0) * 2 + 1) + round) * 2
    sequence = gl.load(entry + 1)
    return gl.load(entry) * (CONFIG.consumers * CONSUMER_ROWS), sequence // num_heads, sequence % num_heads


@gluon.jit
def _release(slot, FREE: gl.constexpr, CONFIG: gl.constexpr):
    """Announce that a consumer has read what is in a slot of the ring whose named barriers begin with FREE."""
    named_barrier_arrive(FREE + slot, CONFIG.consumers * WARPGROUP_THREADS + PRODUCER_THREADS)


@gluon.jit
def _load(tensor, batch, head, row, ring, ready, use, FREE: gl.constexpr, CONFIG: gl.constexpr):
    """Fill the slot of a use of a ring with the tile that begins at a row, once its consumers have released it."""
    slot = use % CONFIG.stages
    if use >= CONFIG.stages:
        named_barrier_wait(FREE + slot, CONFIG.consumers * WARPGROUP_THREADS + PRODUCER_THREADS)
    mbarrier.expect(ready.index(slot), tensor.block_type.nbytes)
    tma_load(tensor, [batch, head, row, 0], ready.index(slot), ring.index(slot))


@gluon.jit
def _producer(shared, group_size, CONFIG: gl.constexpr):
    """Load the queries of all consumers for each item of the program, and the keys and values that any of them sees."""
    tensors, buffers, barriers, schedule, shape = shared
    query, key, value, _ = tensors
    query_tiles, key_ring, value_ring, _, _ = buffers
    query_ready, query_free, key_ready, value_ready = barriers
    KEY_ROWS: gl.constexpr = CONFIG.key_rows
    CONSUMERS: gl.constexpr = CONFIG.consumers
    first_use = 0
    for round in range(_num_rounds(schedule)):
        first_query, batch, head = _item(schedule, round, shape.num_heads, CONFIG)
        key_head = head
        if CONFIG.grouped:
            key_head //= group_size
        tiles = _tiles(first_query, shape, CONSUMERS * CONSUMER_ROWS, CONFIG)
        first, end = tiles[0], tiles[3]  # Of (first, whole_from, whole, end).
        last_key = (end - 1) * KEY_ROWS
        _load(key, batch, key_head, last_key, key_ring, key_ready, first_use, KEY_FREE, CONFIG)
        for consumer in gl.static_range(CONSUMERS):
            row = first_query + consumer * CONSUMER_ROWS
            mbarrier.wait(query_free.index(consumer), (round & 1) ^ 1)
            mbarrier.expect(query_ready.index(consumer), query.block_type.nbytes)
            tma_load(query, [batch, head, row, 0], query_ready.index(consumer), query_tiles.index(consumer))
        for i in range(1, end - first):
            use = first_use + i
            row = last_key - i * KEY_ROWS
            _load(key, batch, key_head, row, key_ring, key_ready, use, KEY_FREE, CONFIG)
            row += KEY_ROWS
            _load(value, batch, key_head, row, value_ring, value_ready, use - 1, VALUE_FREE, CONFIG)
        first_use += end - first
        _load(value, batch, key_head, first * KEY_ROWS, value_ring, value_ready, first_use - 1, VALUE_FREE, CONFIG)


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Wait until the consumer before has issued its products of the same use; the first waits for the use before."""
    named_barrier_wait(TURNS + CONSUMER, 2 * WARPGROUP_THREADS)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    named_barrier_arrive(TURNS + (CONSUMER + 1) % CONFIG.consumers, 2 * WARPGROUP_THREADS)


@gluon.jit
def _masked(scores, first_query, first_key, shape, CONFIG: gl.constexpr):
    """Return scores with -inf where a query does not see a key."""
    _, _, num_keys, window, diagonal = shape
    if CONFIG.shifted:
        first_query += diagonal
    layout: gl.constexpr = scores.type.layout
    keys = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
    if CONFIG.mask >= CAUSAL:
        queries = first_query + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout))
        visible = keys[None, :] <= gl.minimum(queries, num_keys - 1)[:, None]  # Queries may go on behind the last key.
        if CONFIG.mask == WINDOW:
            visible = visible & (keys[None, :] > (queries - window)[:, None])
    else:
        visible = (keys < num_keys)[None, :]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _has_mask(tile, whole_from, whole, CONFIG: gl.constexpr):
    """Return whether a query does not see a key of a tile."""
    masked = tile >= whole
    if CONFIG.mask == WINDOW:
        masked = masked or tile < whole_from
    return masked


@gluon.jit
def _sum_in_thread(weights):
    """Sum what one thread holds of a row, which four threads share: [rows, 4]. Adding these up can wait."""
    columns = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(columns, 3), 1)


@gluon.jit
def _softmax(scores, row_max, row_sum, scale_log2):
    """Return a step of the online softmax: weights, new maximum and sums of rows, and the factor of older weights."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    sums = _sum_in_thread(weights)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, new_max, row_sum, rescale


@gluon.jit
def _attend(shared, logsumexp, scale_log2, item, first_use, tiles, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Write output and logsumexp of a warpgroup's 64 queries, from key tile end - 1 down to the first, of at least one.

    Tile end - 1 - i is use first_use + i of the rings. ``item``: (first query, batch, head); ``tiles``:
    what :func:`_tiles` returns.
    """
    first_query, batch, head = item
    first, whole_from, whole, end = tiles
    count = end - first
    tensors, buffers, barriers, _, shape = shared
    query_tiles, key_ring, value_ring, out_tiles, largest_sums = buffers
    _, query_free, key_ready, value_ready = barriers
    KEY_ROWS: gl.constexpr = CONFIG.key_rows
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    dtype: gl.constexpr = tensors.out.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_ROWS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # wgmma, 4 warps x 16 rows
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    in_every_thread: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    limit: gl.constexpr = FLOAT16_LIMIT if dtype == gl.float16 else LIMIT
    zeros = gl.zeros([CONSUMER_ROWS, KEY_ROWS], gl.float32, scores_layout)
    query_tile = query_tiles.index(CONSUMER)

    slot = first_use % STAGES
    mbarrier.wait(key_ready.index(slot), (first_use // STAGES) & 1)
    if CONFIG.take_turns:
        _take_turn(CONSUMER)
    scores = warpgroup_mma(query_tile, key_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if CONFIG.take_turns:
        _pass_turn(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, [scores])
    _release(slot, KEY_FREE, CONFIG)
    if _has_mask(end - 1, whole_from, whole, CONFIG):
        scores = _masked(scores, first_query, (end - 1) * KEY_ROWS, shape, CONFIG)
    row_max = gl.full([CONSUMER_ROWS], NO_MAXIMUM, gl.float32, gl.SliceLayout(1, scores_layout))
    row_sum = _sum_in_thread(zeros)
    weights, row_max, row_sum, _ = _softmax(scores, row_max, row_sum, scale_log2)
    left = gl.convert_layout(weights.to(dtype), weights_layout)
    out_sum = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, out_layout)
    next_use = first_use + 1
    mbarrier.wait(key_ready.index(next_use % STAGES), (next_use // STAGES) & 1, pred=count > 1)
    for i in range(1, count):
        use = first_use + i
        slot = use % STAGES
        value_slot = (use - 1) % STAGES
        if CONFIG.take_turns:
            _take_turn(CONSUMER)
        scores = warpgroup_mma(query_tile, key_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(value_ready.index(value_slot), ((use - 1) // STAGES) & 1)
        out_sum = warpgroup_mma(left, value_ring.index(value_slot), out_sum, is_async=True)
        if CONFIG.take_turns:
            _pass_turn(CONSUMER, CONFIG)
        # Products finish in the order of their issue: one outstanding means that S is there.
        scores = warpgroup_mma_wait(1, [scores])
        if _has_mask(end - 1 - i, whole_from, whole, CONFIG):
            scores = _masked(scores, first_query, (end - 1 - i) * KEY_ROWS, shape, CONFIG)
        weights = gl.exp2(scores * scale_log2 - row_max[:, None])
        sums = _sum_in_thread(weights)
        # The largest of each warp, as bits (see LIMIT), goes to shared memory, where every thread finds that of all. By
        # ``gl.max`` of all each step would go through shared memory twice (1x16x16384x64: 1.104 ms instead of 0.995).
        largest_of_warps = largest_sums.index(2 * CONSUMER + use % 2)
        largest_of_warps.store(gl.max(sums.to(gl.int32, bitcast=True).reshape([WARPS, CONSUMER_ROWS]), 1))
        # Must stand here, in front of the wait for P V: without a loop between them the assembler pulls that wait up to
        # the one for S, and no softmax runs alongside a product.
        mbarrier.wait(key_ready.index((use + 1) % STAGES), ((use + 1) // STAGES) & 1, pred=i + 1 < count)
        out_sum = warpgroup_mma_wait(0, [out_sum])
        _release(value_slot, VALUE_FREE, CONFIG)
        left = gl.convert_layout(weights.to(dtype), weights_layout)
        if gl.max(largest_of_warps.load(in_every_thread), 0) > limit:
            scores = warpgroup_mma(
                query_tile, key_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, [scores])
            if _has_mask(end - 1 - i, whole_from, whole, CONFIG):
                scores = _masked(scores, first_query, (end - 1 - i) * KEY_ROWS, shape, CONFIG)
            weights, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, scale_log2)
            left = gl.convert_layout(weights.to(dtype), weights_layout)
            out_sum = out_sum * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        else:
            row_sum += sums
        _release(slot, KEY_FREE, CONFIG)
    HAS_OUT_TILES: gl.constexpr = HEAD_DIM <= LARGEST_WITH_OUT_TILES
    if HAS_OUT_TILES:  # No product reads the queries any more.
        mbarrier.arrive(query_free.index(CONSUMER), count=1)
    last_use = first_use + count - 1
    slot = last_use % STAGES
    mbarrier.wait(value_ready.index(slot), (last_use // STAGES) & 1)
    out_sum = warpgroup_mma(left, value_ring.index(slot), out_sum, is_async=True)
    out_sum = warpgroup_mma_wait(0, [out_sum])
    _release(slot, VALUE_FREE, CONFIG)

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, scores_layout))
    # Scores that are all -inf leave a sum of 0: such a row is 0 / 1, and its logsumexp -inf.
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    out_sum = out_sum * gl.convert_layout(inverse, gl.SliceLayout(1, out_layout))[:, None]
    # The store of the item before must have read the tile that this one overwrites, the products the queries.
    store_wait(0)
    thread_barrier()
    out_tiles.index(CONSUMER).store(out_sum.to(dtype))
    fence_async_shared()
    thread_barrier()
    tma_store(tensors.out, [batch, head, first_query, 0], out_tiles.index(CONSUMER))
    queries = first_query + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, scores_layout))
    natural_logsumexp = (row_max + gl.log2(row_sum)) * LN_2
    logsumexps = logsumexp + (batch * shape.num_heads + head).to(gl.int64) * shape.num_queries + queries
    gl.store(logsumexps, natural_logsumexp, mask=queries < shape.num_queries)
    if not HAS_OUT_TILES:
        # The output lies where the next queries are loaded to.
        store_wait(0)
        thread_barrier()
        mbarrier.arrive(query_free.index(CONSUMER), count=1)


@gluon.jit
def _skip(first_use, end, barriers, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Release tiles that this consumer does not see, each once it is loaded.

    An arrival before would count for the tile before in the same slot.
    """
    _, _, key_ready, value_ready = barriers
    for use in range(first_use, end):
        slot = use % CONFIG.stages
        parity = (use // CONFIG.stages) & 1
        if CONFIG.take_turns:
            _take_turn(CONSUMER)
            _pass_turn(CONSUMER, CONFIG)
        mbarrier.wait(key_ready.index(slot), parity)
        _release(slot, KEY_FREE, CONFIG)
        mbarrier.wait(value_ready.index(slot), parity)
        _release(slot, VALUE_FREE, CONFIG)


@gluon.jit
def _consumer(shared, logsumexp, scale_log2, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute, for each item of the program, the 64 queries of one consumer."""
    _, _, barriers, schedule, shape = shared
    if CONFIG.take_turns and CONFIG.consumers - 1 == CONSUMER:
        _pass_turn(CONSUMER, CONFIG)  # The first consumer's first turn.
    first_use = 0
    for round in range(_num_rounds(schedule)):
        item_query, batch, head = _item(schedule, round, shape.num_heads, CONFIG)
        first_query = item_query + CONSUMER * CONSUMER_ROWS
        item_tiles = _tiles(item_query, shape, CONFIG.consumers * CONSUMER_ROWS, CONFIG)
        tiles = _tiles(first_query, shape, CONSUMER_ROWS, CONFIG)
        item_first, item_end, first, end = item_tiles[0], item_tiles[3], tiles[0], tiles[3]
        end_use = first_use + item_end - item_first
        # Tiles that only later consumers see; all tiles where this one has no queries.
        first_seen_use = first_use + item_end - end
        if CONFIG.mask == WINDOW:
            first_seen_use = min(first_seen_use, end_use)
        _skip(first_use, first_seen_use, barriers, CONSUMER, CONFIG)
        mbarrier.wait(barriers.query_ready.index(CONSUMER), round & 1)
        if end > 0:
            _attend(shared, logsumexp, scale_log2, (first_query, batch, head), first_seen_use, tiles, CONSUMER, CONFIG)
        else:
            mbarrier.arrive(barriers.query_free.index(CONSUMER), count=1)
        if CONFIG.mask == WINDOW:
            # Tiles that only earlier consumers see.
            skipped = first - item_first if end > 0 else 0
            _skip(end_use - skipped, end_use, barriers, CONSUMER, CONFIG)
        first_use = end_use
    store_wait(0)  # TMA must have read shared memory before the program ends.


@gluon.jit(do_not_specialize=["num_heads", "num_queries", "num_keys", "group_size", "window", "diagonal"])
def forward_kernel(
    query, key, value, out, logsumexp, schedule, num_heads, num_queries, num_keys, scale_log2, group_size, window,
    diagonal, CONFIG: gl.constexpr,
):  # fmt: skip
    """Write output and logsumexp of all items that fall to a program; scale_log2 is log2(e) times the scale.

    ``query``, ``key``, ``value`` and ``out`` are TMA descriptors of (batch, head, row, element), ``logsumexp`` points
    to (sequence, query), ``schedule`` to what ``schedule.as_table`` made.
    """
    gl.static_assert(CONFIG.stages == 2, "there are named barriers for two slots of each ring")
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMER_ROWS, HEAD_DIM], dtype)
    query_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, CONSUMER_ROWS, HEAD_DIM], layout)
    key_ring = gl.allocate_shared_memory(dtype, [STAGES, CONFIG.key_rows, HEAD_DIM], layout)
    value_ring = gl.allocate_shared_memory(dtype, [STAGES, CONFIG.key_rows, HEAD_DIM], layout)
    out_tiles = query_tiles
    if HEAD_DIM <= LARGEST_WITH_OUT_TILES:
        out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, CONSUMER_ROWS, HEAD_DIM], layout)
    # Two for each consumer, in turn, unswizzled; with one, which would do, the compiler of triton 3.6 spills 380 bytes.
    largest_sums = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = Shared(
        Tensors(query, key, value, out),
        Buffers(query_tiles, key_ring, value_ring, out_tiles, largest_sums),
        Barriers(  # Of each kind how many there are, and how many arrivals end a phase.
            query_ready=new_barriers(CONSUMERS, 1),
            query_free=new_barriers(CONSUMERS, 1),
            key_ready=new_barriers(STAGES, 1),
            value_ready=new_barriers(STAGES, 1),
        ),
        schedule,
        Shape(num_heads, num_queries, num_keys, window, diagonal),
    )
    # Triton gives up constants in a tuple that is named or concatenated, so each call is written out. The last two
    # arguments: warps, and registers of a thread, of all functions but the first.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, logsumexp, scale_log2, FIRST, CONFIG)),
                (_consumer, (shared, logsumexp, scale_log2, SECOND, CONFIG)),
                (_producer, (shared, group_size, CONFIG)),
            ],
            [4, 1],
            [CONFIG.consumer_registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, logsumexp, scale_log2, FIRST, CONFIG)),
                (_consumer, (shared, logsumexp, scale_log2, SECOND, CONFIG)),
                (_consumer, (shared, logsumexp, scale_log2, THIRD, CONFIG)),
                (_producer, (shared, group_size, CONFIG)),
            ],
            [4, 4, 1],
            [CONFIG.consumer_registers, CONFIG.consumer_registers, 24],
        )
