"""FlashAttention backward for Hopper in Gluon with a warpgroup of its own for dQ: up to head dimension 64.

As in ``backward`` a program takes 128 keys, 64 for each of two warpgroups, and streams tiles of 64 queries.
Up to head dimension 64 there are registers for more: K and V are left operands that stay in registers, S^T of the next
tile is computed alongside dK of this one, and a third warpgroup, the reducer, makes dQ:

    consumer    dP^T = V dO^T    P^T = exp2(S^T - L)    dV += P^T dO    dS^T = P^T (dP^T - D) to shared memory
                dK += dS^T Q    S^T = K Q^T of the next tile
    reducer     dQ = dS K for all 128 keys, which a TMA reduction adds to the float32 sum in memory

The consumers neither wait for each other nor for dQ to leave the multiprocessor.

A program works through the items that the host's schedule gives it, and loads keys, values and the first queries of the
next one while one ends; where programs take turns, each has one item.

Barriers work as in forward.py. ``grad_scores_ready`` counts both consumers, ``grad_scores_free`` the reducer,
``keys_free`` all three: a consumer has keys and values in registers, the reducer reads an item's keys no more.

Sources: equations 13 to 19 of the handout; Shah et al., "FlashAttention-3" (2024), appendix B.1.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336sys.kernels.attention.hopper import backward_tiles as tiles
from cs336sys.kernels.attention.hopper.backward_tiles import FIRST, ROWS, SECOND, TURNS, Shape, Shared, Tensors
from cs336sys.kernels.attention.hopper.gluon import (
    change_kernels,
    new_barriers,
    reduce_wait,
    store_wait,
    thread_barrier,
    tma_reduce_add,
    tma_store,
)

Buffers = namedtuple(
    "Buffers",
    "key_tiles value_tiles query_ring grad_out_ring logsumexp_ring delta_ring grad_scores_tiles grad_query_tiles "
    "result_tiles",
)
Barriers = namedtuple(
    "Barriers",
    "key_ready value_ready keys_free query_ready grad_out_ready tile_free grad_scores_ready grad_scores_free turn",
)


@gluon.jit
def _producer(shared, turns, CONFIG: gl.constexpr):
    first_work, end_work = tiles.rows_of_program(shared.schedule, CONFIG)
    first_use = 0
    for work in range(first_work, end_work):
        round = work - first_work
        item = tiles.read_item(shared.schedule, work, shared.shape, 2 * ROWS, CONFIG)
        mbarrier.wait(shared.barriers.keys_free.index(round % 2), ((round // 2) & 1) ^ 1)
        tiles.load_keys(shared, item, round % 2, TILES=2)
        if work == first_work:  # The kernel before wrote the statistics that come next.
            change_kernels()
        visits = item.first_visit, item.end_visit + (CONFIG.stages if CONFIG.ordered else 0)
        # The reducer, which adds to dQ, ends turns itself.
        tiles.load_queries(shared, turns, item, first_use, visits, TILES=2, ENDS_TURNS=False, CONFIG=CONFIG)
        first_use += item.end_visit - item.first_visit


@gluon.jit
def _consumer(shared, pieces, scale, scale_log2, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    tiles.consume(shared, pieces, scale, scale_log2, _keys_gradients, CONSUMER, CONFIG)


@gluon.jit
def _keys_gradients(shared, pieces, numbers, item, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dK and dV of a warpgroup's 64 keys of an item.

    ``numbers``: scale, scale_log2, the item's row of the schedule, how many items the program has had before, and how
    often it has used the rings of query tiles.
    """
    tensors, buffers, barriers, schedule, shape = shared
    query_ring, grad_out_ring, grad_scores_tiles = buffers.query_ring, buffers.grad_out_ring, buffers.grad_scores_tiles
    scale, scale_log2, work, round, first_use = numbers
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    dtype: gl.constexpr = tensors.key.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # wgmma, 4 warps x 16 rows
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, grad_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, scores_layout)

    first_key, key_sequence, first_tile, first, end = item
    first_key += CONSUMER * ROWS
    query_at_key = tiles.query_at_key(first_key, shape, CONFIG)
    grad_key_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    keys_slot = round % 2
    mbarrier.wait(barriers.key_ready.index(keys_slot), (round // 2) & 1)
    mbarrier.wait(barriers.value_ready.index(keys_slot), (round // 2) & 1)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    key_operand = buffers.key_tiles.index(2 * keys_slot + CONSUMER).load(operand_layout)
    value_operand = buffers.value_tiles.index(2 * keys_slot + CONSUMER).load(operand_layout)
    thread_barrier()  # All threads have loaded theirs.
    mbarrier.arrive(barriers.keys_free.index(keys_slot), count=1)
    query = tiles.tile_of(first, first_tile, shape, CONFIG) * ROWS
    query_ready = barriers.query_ready
    scores = tiles.issue_scores(
        query, first_use, first < end, key_operand, query_ring, query_ready, query_at_key, shape, CONFIG
    )
    scores = warpgroup_mma_wait(0, [scores])
    for visit in range(first, end):
        use = first_use + visit - first
        slot = use % STAGES
        mbarrier.wait(barriers.grad_out_ready.index(slot), (use // STAGES) & 1)
        grad_weights = warpgroup_mma(
            value_operand, grad_out_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        # Here and below, loaded no earlier than needed, for want of registers.
        logsumexp = buffers.logsumexp_ring.index(slot).reshape([ROWS]).load(query_layout)
        weights = gl.exp2(scores * scale_log2 - logsumexp[None, :])
        left = gl.convert_layout(weights.to(dtype), left_layout)
        grad_value_sum = warpgroup_mma(left, grad_out_ring.index(slot), grad_value_sum, is_async=True)
        grad_weights = warpgroup_mma_wait(1, [grad_weights])
        delta = buffers.delta_ring.index(slot).reshape([ROWS]).load(query_layout)
        grad_scores = (weights * (grad_weights - delta[None, :])).to(dtype)

        buffer = use % 2
        mbarrier.wait(barriers.grad_scores_free.index(buffer), ((use // 2) & 1) ^ 1)
        grad_scores_tiles.index(2 * buffer + CONSUMER).store(grad_scores)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(barriers.grad_scores_ready.index(buffer), count=1)
        left = gl.convert_layout(grad_scores, left_layout)
        grad_key_sum = warpgroup_mma(left, query_ring.index(slot), grad_key_sum, is_async=True)
        # After the last tile this multiplies what happens to lie in the ring, and nobody reads the result.
        query = tiles.tile_of(visit + 1, first_tile, shape, CONFIG) * ROWS
        has_next = visit + 1 < end
        scores = tiles.issue_scores(
            query, use + 1, has_next, key_operand, query_ring, query_ready, query_at_key, shape, CONFIG
        )
        grad_value_sum, grad_key_sum, scores = warpgroup_mma_wait(0, [grad_value_sum, grad_key_sum, scores])
        mbarrier.arrive(barriers.tile_free.index(slot), count=1)

    if tiles.is_piece(schedule, work, CONFIG):
        share = tiles.pieces_of(pieces, schedule, work, NUM_TILES=2, CONFIG=CONFIG) + CONSUMER * ROWS * HEAD_DIM
        tiles.store_sums(share, grad_key_sum * scale, tiles.WRITE)
        tiles.store_sums(share + 2 * ROWS * HEAD_DIM, grad_value_sum, tiles.WRITE)  # Behind dK of the item's 128 keys.
    else:
        grad_key_tile = buffers.result_tiles.index(2 * CONSUMER)
        grad_value_tile = buffers.result_tiles.index(2 * CONSUMER + 1)
        # The results of the item before must have left.
        store_wait(0)
        thread_barrier()
        grad_value_tile.store(grad_value_sum.to(dtype))
        grad_key_tile.store((grad_key_sum * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        batch = key_sequence // shape.num_key_heads
        key_head = key_sequence % shape.num_key_heads
        tma_store(tensors.grad_value, [batch, key_head, first_key, 0], grad_value_tile)
        tma_store(tensors.grad_key, [batch, key_head, first_key, 0], grad_key_tile)


@gluon.jit
def _in_register_order(grad_query):
    """Return (64, D) as (D / 2, 128), the order of ``convert.py``: a thread stores its numbers 16 bytes at a time."""
    COLUMNS: gl.constexpr = grad_query.shape[1]
    fours = grad_query.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return fours.reshape([COLUMNS // 2, 2 * ROWS])


@gluon.jit
def _reducer(shared, turns, CONFIG: gl.constexpr):
    """Add dQ of every tile of queries for the 128 keys of each item to the sum in memory.

    Ordered: one tile of dQ is on its way to memory while the next is made, so two lie in shared memory.
    """
    tensors, buffers, barriers, schedule, shape = shared
    key_tiles, grad_scores_tiles = buffers.key_tiles, buffers.grad_scores_tiles
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # wgmma: 4 warps of 16 rows.
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    first_work, end_work = tiles.rows_of_program(schedule, CONFIG)
    first_use = 0
    for work in range(first_work, end_work):
        _, key_sequence, first_tile, first, end = tiles.read_item(schedule, work, shape, 2 * ROWS, CONFIG)
        sequence = tiles.first_sequence(key_sequence, shape, CONFIG)
        turns_of_sequence = turns + sequence * shape.padded_queries
        keys_slot = (work - first_work) % 2
        mbarrier.wait(barriers.key_ready.index(keys_slot), ((work - first_work) // 2) & 1)
        for visit in range(first, end):
            use = first_use + visit - first
            buffer = use % 2
            mbarrier.wait(barriers.grad_scores_ready.index(buffer), (use // 2) & 1)
            tile = tiles.tile_of_group(visit, first_tile, shape, CONFIG)
            row = (sequence * shape.padded_queries // ROWS + tile) * (HEAD_DIM // 2)  # A tile is so many rows of 128.
            scores_tile = grad_scores_tiles.index(2 * buffer).permute([1, 0])
            grad_query = warpgroup_mma(scores_tile, key_tiles.index(2 * keys_slot), zeros, use_acc=False, is_async=True)
            scores_tile = grad_scores_tiles.index(2 * buffer + 1).permute([1, 0])
            grad_query = warpgroup_mma(scores_tile, key_tiles.index(2 * keys_slot + 1), grad_query, is_async=True)
            grad_query = warpgroup_mma_wait(0, [grad_query])
            mbarrier.arrive(barriers.grad_scores_free.index(buffer), count=1)
            if CONFIG.ordered:  # Then a program has a single item, and use is visit - first.
                reduce_wait(1)  # Of the tiles before, all but the last are in memory: the turn of visit - 2 is over.
                thread_barrier()
                tiles.end_turn(turns_of_sequence, visit - 2, use >= 2, first_tile, shape, CONFIG)
            else:
                # The reduction before must have read what this one overwrites.
                store_wait(0)
                thread_barrier()
            grad_query_tile = buffers.grad_query_tiles.index(use % 2 if CONFIG.ordered else 0)
            grad_query_tile.store(_in_register_order(grad_query))
            if CONFIG.ordered:
                tiles.wait_for_turn(barriers.turn, use)
            fence_async_shared()
            thread_barrier()
            tma_reduce_add(tensors.grad_query_sum, [row, 0], grad_query_tile)
        mbarrier.arrive(barriers.keys_free.index(keys_slot), count=1)
        if CONFIG.ordered:
            reduce_wait(0)  # Now the turns of the last two visits are over, too.
            thread_barrier()
            tiles.end_turn(turns_of_sequence, end - 2, first < end - 1, first_tile, shape, CONFIG)
            tiles.end_turn(turns_of_sequence, end - 1, first < end, first_tile, shape, CONFIG)
        first_use += end - first
    store_wait(0)  # TMA must have read shared memory before the program ends.


@gluon.jit(do_not_specialize=Shape._fields)
def reducer_backward_kernel(
    query, key, value, grad_out, statistics, grad_query_sum, grad_key, grad_value, turns, pieces, schedule,
    num_key_heads, num_queries, num_keys, padded_queries, scale, scale_log2, group_size, window, window_tiles,
    diagonal, CONFIG: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of 128 keys of one sequence; add their share of dQ / scale to grad_query_sum.

    All tensors but the last three are TMA descriptors: statistics (2 * sequences, padded_queries) as ``prepare_kernel``
    writes them, grad_query_sum rows of 128 float32 numbers in the order that ``convert.py`` describes, the others
    (batch, head, row, element). ``turns`` and ``pieces``: as ``HopperBackwardConfig`` says.
    """
    gl.static_assert(CONFIG.stages >= 2, "the scores of a tile are computed while the tile before it is in use")
    gl.static_assert(not CONFIG.ordered or CONFIG.stages + 2 <= TURNS, "a turn would come twice before it is used")
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    grad_scores_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # Swizzled by 128 bytes; 16 bits, two dims.
    grad_query_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)  # Not swizzled; 32 bits.
    grad_query_shape: gl.constexpr = [2 if CONFIG.ordered else 1, HEAD_DIM // 2, 2 * ROWS]  # Rows of 128 numbers.
    statistics_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    buffers = Buffers(
        key_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, HEAD_DIM], layout),  # Two slots of 128 keys.
        value_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, HEAD_DIM], layout),
        query_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        grad_out_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        # Two buffers of two warpgroups' tiles.
        grad_scores_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], grad_scores_layout),
        grad_query_tiles=gl.allocate_shared_memory(gl.float32, grad_query_shape, grad_query_layout),
        logsumexp_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
        delta_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
        result_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, HEAD_DIM], layout),
    )
    barriers = Barriers(  # Of each kind how many there are, and how many arrivals end a phase.
        key_ready=new_barriers(2, 1),
        value_ready=new_barriers(2, 1),
        keys_free=new_barriers(2, 3),
        query_ready=new_barriers(STAGES, 1),
        grad_out_ready=new_barriers(STAGES, 1),
        tile_free=new_barriers(STAGES, 2),
        grad_scores_ready=new_barriers(2, 2),
        grad_scores_free=new_barriers(2, 1),
        turn=new_barriers(TURNS, 1),
    )
    fence_async_shared()

    tensors = Tensors(query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum)
    shape = Shape(num_key_heads, num_queries, num_keys, padded_queries, group_size, window, window_tiles, diagonal)
    shared = Shared(tensors, buffers, barriers, schedule, shape)
    # The last two arguments: warps, and registers of a thread, of all functions but the first.
    gl.warp_specialize(
        [
            (_consumer, (shared, pieces, scale, scale_log2, FIRST, CONFIG)),
            (_consumer, (shared, pieces, scale, scale_log2, SECOND, CONFIG)),
            (_reducer, (shared, turns, CONFIG)),
            (_producer, (shared, turns, CONFIG)),
        ],
        [4, 4, 1],
        [CONFIG.consumer_registers, CONFIG.reducer_registers, 24],  # The fewest that a thread can have.
    )
