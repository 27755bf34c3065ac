"""FlashAttention backward for Hopper in Gluon with a warpgroup of its own for dQ: up to head dimension 64.

As in ``backward`` a program takes 128 keys, 64 for each of two warpgroups, and streams tiles of 64 queries.
Up to head dimension 64 there are registers for more: K and V are left operands that stay in registers, S^T of the next
tile is computed alongside dK of this one, and a third warpgroup, the reducer, makes dQ:

    consumer    dP^T = V dO^T    P^T = exp2(S^T - L)    dV += P^T dO    dS^T = P^T (dP^T - D) to shared memory
                dK += dS^T Q    S^T = K Q^T of the next tile
    reducer     dQ = dS K for all 128 keys, which a TMA reduction adds to the float32 sum in memory

The consumers neither wait for each other nor for dQ to leave the multiprocessor.

Barriers work as in forward.py. ``grad_scores_ready`` counts both consumers, ``grad_scores_free`` the reducer;
``grad_query_done`` says that the reducer reads keys no more, in whose place dK then leaves.

Sources: equations 13 to 19 of the handout; Shah et al., "FlashAttention-3" (2024), appendix B.1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336sys.kernels.attention.hopper.backward_tiles import (
    FIRST,
    ROWS,
    SECOND,
    TURNS,
    end_turn,
    first_sequence,
    is_piece,
    issue_scores,
    item,
    load_tiles,
    pieces_of,
    store_piece,
    tile_of,
    tile_of_group,
    wait_for_turn,
)
from cs336sys.kernels.attention.hopper.gluon import reduce_wait, store_wait, thread_barrier, tma_reduce_add, tma_store


@gluon.jit
def _producer(
    shared,
    turns,
    STAGES: gl.constexpr,
    MASK: gl.constexpr,
    ORDERED: gl.constexpr,
    GROUPED: gl.constexpr,
    CUT: gl.constexpr,
):
    tensors, buffers, barriers, schedule, shape = shared
    _, _, _, _, _, _, grad_key, grad_value = tensors
    key_tiles, value_tiles = buffers[0], buffers[1]
    results_ready, turn = barriers[8], barriers[9]
    batch, head, first_key = load_tiles(
        tensors, buffers, barriers, schedule, shape, turns, turn, STAGES, MASK, ORDERED, False, GROUPED, CUT
    )
    if not is_piece(schedule, CUT):
        for consumer in gl.static_range(2):
            mbarrier.wait(results_ready.index(consumer), 0)
            row = first_key + consumer * ROWS
            tma_store(grad_key, [batch, head, row, 0], key_tiles.index(consumer))
            tma_store(grad_value, [batch, head, row, 0], value_tiles.index(consumer))
        store_wait(0)


@gluon.jit
def _consumer(
    shared,
    pieces,
    scale,
    scale_log2,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    MASK: gl.constexpr,
    GROUPED: gl.constexpr,
    CUT: gl.constexpr,
):
    tensors, buffers, barriers, schedule, shape = shared
    _, key, _, _, _, _, _, _ = tensors
    key_tiles, value_tiles, query_ring, grad_out_ring = buffers[0], buffers[1], buffers[2], buffers[3]
    logsumexp_ring, delta_ring, grad_scores_tiles = buffers[4], buffers[5], buffers[6]
    key_ready, value_ready, query_ready, grad_out_ready = barriers[0], barriers[1], barriers[2], barriers[3]
    tile_free, grad_scores_ready, grad_scores_free = barriers[4], barriers[5], barriers[6]
    grad_query_done, results_ready = barriers[7], barriers[8]
    dtype: gl.constexpr = key.dtype
    HEAD_DIM: gl.constexpr = key.block_type.shape[3]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, grad_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, scores_layout)
    key_tile = key_tiles.index(CONSUMER)
    value_tile = value_tiles.index(CONSUMER)

    first_key, _, first_tile, first, end = item(schedule, shape, 2 * ROWS, MASK, GROUPED, CUT)
    first_key += CONSUMER * ROWS
    grad_key_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    mbarrier.wait(key_ready.index(0), 0)
    mbarrier.wait(value_ready.index(0), 0)
    key_operand = key_tile.load(gl.DotOperandLayout(0, scores_layout, 2))
    value_operand = value_tile.load(gl.DotOperandLayout(0, scores_layout, 2))
    any_tile = first < end
    query = tile_of(first, first_tile, shape, MASK, GROUPED) * ROWS
    scores = issue_scores(query, 0, any_tile, key_operand, query_ring, query_ready, first_key, shape, STAGES, MASK)
    scores = warpgroup_mma_wait(0, [scores])
    for visit in range(first, end):
        use = visit - first
        slot = use % STAGES
        parity = (use // STAGES) & 1
        mbarrier.wait(grad_out_ready.index(slot), parity)
        grad_weights = warpgroup_mma(
            value_operand, grad_out_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        # Here and below, loaded no earlier than needed, for want of registers.
        logsumexp = logsumexp_ring.index(slot).reshape([ROWS]).load(query_layout)
        weights = gl.exp2(scores * scale_log2 - logsumexp[None, :])
        left = gl.convert_layout(weights.to(dtype), left_layout)
        grad_value_sum = warpgroup_mma(left, grad_out_ring.index(slot), grad_value_sum, is_async=True)
        grad_weights = warpgroup_mma_wait(1, [grad_weights])
        delta = delta_ring.index(slot).reshape([ROWS]).load(query_layout)
        grad_scores = (weights * (grad_weights - delta[None, :])).to(dtype)

        buffer = use % 2
        mbarrier.wait(grad_scores_free.index(buffer), ((use // 2) & 1) ^ 1)
        grad_scores_tiles.index(2 * buffer + CONSUMER).store(grad_scores)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(grad_scores_ready.index(buffer), count=1)
        left = gl.convert_layout(grad_scores, left_layout)
        grad_key_sum = warpgroup_mma(left, query_ring.index(slot), grad_key_sum, is_async=True)
        # After the last tile this multiplies what happens to lie in the ring, and nobody reads the result.
        query = tile_of(visit + 1, first_tile, shape, MASK, GROUPED) * ROWS
        another = visit + 1 < end
        scores = issue_scores(
            query, use + 1, another, key_operand, query_ring, query_ready, first_key, shape, STAGES, MASK
        )
        grad_value_sum, grad_key_sum, scores = warpgroup_mma_wait(0, [grad_value_sum, grad_key_sum, scores])
        mbarrier.arrive(tile_free.index(slot), count=1)

    if is_piece(schedule, CUT):
        share = pieces_of(pieces, schedule, 2, HEAD_DIM) + CONSUMER * ROWS * HEAD_DIM
        store_piece(share, grad_key_sum * scale)
        store_piece(share + 2 * ROWS * HEAD_DIM, grad_value_sum)
    else:
        # Only this warpgroup reads its values, and its keys are read no more when dQ is done, so they make room for the
        # results. The producer stores them, because it has registers to spare for the coordinates.
        value_tile.store(grad_value_sum.to(dtype))
        mbarrier.wait(grad_query_done.index(0), 0)
        key_tile.store((grad_key_sum * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(results_ready.index(CONSUMER), count=1)


@gluon.jit
def _in_register_order(grad_query):
    """(64, D) as (D / 2, 128), the order of ``convert.py``: a thread stores its numbers 16 bytes at a time."""
    COLUMNS: gl.constexpr = grad_query.shape[1]
    fours = grad_query.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return fours.reshape([COLUMNS // 2, 2 * ROWS])


@gluon.jit
def _reducer(shared, turns, MASK: gl.constexpr, ORDERED: gl.constexpr, GROUPED: gl.constexpr, CUT: gl.constexpr):
    """dQ of every tile of queries for the 128 keys.

    ORDERED: one tile of dQ is on its way to memory while the next is made, so two lie in shared memory.
    """
    tensors, buffers, barriers, schedule, shape = shared
    key, grad_query_sum = tensors[1], tensors[5]
    key_tiles, grad_scores_tiles, grad_query_tiles = buffers[0], buffers[6], buffers[7]
    key_ready, grad_scores_ready, grad_scores_free, grad_query_done = barriers[0], barriers[5], barriers[6], barriers[7]
    turn = barriers[9]
    padded_queries = shape[3]
    HEAD_DIM: gl.constexpr = key.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    _, key_sequence, first_tile, first, end = item(schedule, shape, 2 * ROWS, MASK, GROUPED, CUT)
    sequence = first_sequence(key_sequence, shape, GROUPED)
    turns += sequence * padded_queries
    mbarrier.wait(key_ready.index(0), 0)
    for visit in range(first, end):
        use = visit - first
        buffer = use % 2
        mbarrier.wait(grad_scores_ready.index(buffer), (use // 2) & 1)
        tile = tile_of_group(visit, first_tile, shape, MASK, GROUPED)
        row = (sequence * padded_queries // ROWS + tile) * (HEAD_DIM // 2)
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(2 * buffer).permute([1, 0]),
            key_tiles.index(0),
            zeros,
            use_acc=False,
            is_async=True,
        )
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(2 * buffer + 1).permute([1, 0]),
            key_tiles.index(1),
            grad_query,
            is_async=True,
        )
        grad_query = warpgroup_mma_wait(0, [grad_query])
        mbarrier.arrive(grad_scores_free.index(buffer), count=1)
        if ORDERED:
            reduce_wait(1)
            thread_barrier()
            end_turn(turns, visit - 2, use >= 2, first_tile, shape, MASK, GROUPED)
        else:
            # The reduction before must have read what this one overwrites.
            store_wait(0)
            thread_barrier()
        grad_query_tile = grad_query_tiles.index(use % 2 if ORDERED else 0)
        grad_query_tile.store(_in_register_order(grad_query))
        if ORDERED:
            wait_for_turn(turn, use)
        fence_async_shared()
        thread_barrier()
        tma_reduce_add(grad_query_sum, [row, 0], grad_query_tile)
    mbarrier.arrive(grad_query_done.index(0), count=1)
    if ORDERED:
        reduce_wait(0)
        thread_barrier()
        end_turn(turns, end - 2, first < end - 1, first_tile, shape, MASK, GROUPED)
        end_turn(turns, end - 1, first < end, first_tile, shape, MASK, GROUPED)
    else:
        store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_key_heads",
        "num_queries",
        "num_keys",
        "padded_queries",
        "group_size",
        "window",
        "window_tiles",
    ]
)
def reducer_backward_kernel(
    query,
    key,
    value,
    grad_out,
    statistics,
    grad_query_sum,
    grad_key,
    grad_value,
    turns,
    pieces,
    schedule,
    num_key_heads,
    num_queries,
    num_keys,
    padded_queries,
    scale,
    scale_log2,
    group_size,
    window,
    window_tiles,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    MASK: gl.constexpr,
    ORDERED: gl.constexpr,
    GROUPED: gl.constexpr,
    CUT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    REDUCER_REGISTERS: gl.constexpr,
):
    """dK and dV of 128 keys of one sequence; adds their share of dQ / scale to grad_query_sum.

    All tensors but the last three are TMA descriptors: statistics (2 * sequences, padded_queries) as ``prepare_kernel``
    writes them, grad_query_sum rows of 128 float32 numbers in the order that ``convert.py`` describes, the others
    (batch, head, row, element). ORDERED: dQ is added in turn, which ``turns`` counts (``pass_turns``). GROUPED, CUT
    and ``pieces``: as in ``backward_kernel``.
    """
    gl.static_assert(STAGES >= 2, "the scores of a tile are computed while the tile before it is in use")
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    key_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout)
    value_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout)
    query_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout)
    grad_out_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout)
    # Two buffers of two warpgroups' tiles.
    grad_scores_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    grad_scores_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], grad_scores_layout)
    grad_query_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    grad_query_shape: gl.constexpr = [2 if ORDERED else 1, HEAD_DIM // 2, 2 * ROWS]
    grad_query_tiles = gl.allocate_shared_memory(gl.float32, grad_query_shape, grad_query_layout)
    statistics_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    logsumexp_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    key_ready = gl.allocate_shared_memory(gl.int64, [1, 1], barrier_layout)
    value_ready = gl.allocate_shared_memory(gl.int64, [1, 1], barrier_layout)
    query_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    grad_out_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    tile_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    grad_scores_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    grad_scores_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    grad_query_done = gl.allocate_shared_memory(gl.int64, [1, 1], barrier_layout)
    results_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    turn = gl.allocate_shared_memory(gl.int64, [TURNS, 1], barrier_layout)
    mbarrier.init(key_ready.index(0), count=1)
    mbarrier.init(value_ready.index(0), count=1)
    for one in gl.static_range(TURNS):
        mbarrier.init(turn.index(one), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(query_ready.index(stage), count=1)
        mbarrier.init(grad_out_ready.index(stage), count=1)
        mbarrier.init(tile_free.index(stage), count=2)
    mbarrier.init(grad_query_done.index(0), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(grad_scores_free.index(consumer), count=1)
        mbarrier.init(grad_scores_ready.index(consumer), count=2)
        mbarrier.init(results_ready.index(consumer), count=1)
    fence_async_shared()

    tensors = (query, key, value, grad_out, statistics, grad_query_sum, grad_key, grad_value)
    buffers = (
        key_tiles,
        value_tiles,
        query_ring,
        grad_out_ring,
        logsumexp_ring,
        delta_ring,
        grad_scores_tiles,
        grad_query_tiles,
    )
    barriers = (
        key_ready,
        value_ready,
        query_ready,
        grad_out_ready,
        tile_free,
        grad_scores_ready,
        grad_scores_free,
        grad_query_done,
        results_ready,
        turn,
    )
    shape = (num_key_heads, num_queries, num_keys, padded_queries, group_size, window, window_tiles)
    shared = (tensors, buffers, barriers, schedule, shape)
    gl.warp_specialize(
        [
            (_consumer, (shared, pieces, scale, scale_log2, FIRST, STAGES, MASK, GROUPED, CUT)),
            (_consumer, (shared, pieces, scale, scale_log2, SECOND, STAGES, MASK, GROUPED, CUT)),
            (_reducer, (shared, turns, MASK, ORDERED, GROUPED, CUT)),
            (_producer, (shared, turns, STAGES, MASK, ORDERED, GROUPED, CUT)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, REDUCER_REGISTERS, 24],
    )
