"""FlashAttention backward for Hopper in Gluon: dK and dV in registers, dQ added up in memory by TMA.

A program takes 128 keys of one sequence, 64 for each of two warpgroups, and streams the queries that see them in tiles
of 64, loaded by one more warp. Tiles of scores are transposed, S^T = K Q^T, because P^T and dS^T are then the left
operands of dV and dK, which the tensor cores take from registers. Each warpgroup computes, for one tile of queries,

    S^T = K Q^T    dP^T = V dO^T    P^T = exp2(S^T - L)    dV += P^T dO    dS^T = P^T (dP^T - D)    dK += dS^T Q

and puts dS^T into shared memory. When both have, each multiplies dS K for all 128 keys and its half of the head
dimension, and a TMA reduction adds that to the float32 sum of dQ: dQ leaves the multiprocessor once for 128 keys, not
once for 64.

Barriers work as in hopper_forward. ``grad_scores_ready`` counts both warpgroups. The two buffers of dS^T need no
barrier of the other direction: a warpgroup announces tile i - 1 only after its dQ of tile i - 2 is complete, and nobody
writes tile i before seeing tile i - 1 announced by both.

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

from cs336sys.kernels.attention import hopper_schedule
from cs336sys.kernels.attention.hopper_gluon import (
    seen_as,
    store_wait,
    thread_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
)

# The keys of one warpgroup, which are the rows of its matrix instructions, and the queries of a tile.
ROWS = gl.constexpr(64)
# Stands for a key behind the last one.
NOBODY_SEES = gl.constexpr(2**31 - 1)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)

_query_tiles = gluon.jit(hopper_schedule.query_tiles)


@gluon.jit
def _item(schedule, num_queries, CAUSAL: gl.constexpr):
    """(first key, sequence, first tile of queries, end of the tiles) of this program."""
    entry = schedule + gl.load(schedule + gl.program_id(0) * 2 + 1) * 2
    first_key = gl.load(entry) * (2 * ROWS)
    first, end = _query_tiles(first_key, num_queries, ROWS, CAUSAL)
    return first_key, gl.load(entry + 1), first, end


@gluon.jit
def _producer(tensors, buffers, barriers, schedule, shape, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    query, key, value, grad_out, statistics, _, grad_key, grad_value = tensors
    key_tiles, value_tiles, query_ring, grad_out_ring, logsumexp_ring, delta_ring, _, grad_query_tiles = buffers
    key_ready, value_ready, query_ready, grad_out_ready, tile_free, _, results_ready = barriers
    num_heads, num_queries, _, _ = shape
    first_key, sequence, first, end = _item(schedule, num_queries, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    mbarrier.expect(key_ready.index(0), 2 * key.block_type.nbytes)
    mbarrier.expect(value_ready.index(0), 2 * value.block_type.nbytes)
    for consumer in gl.static_range(2):
        tma_load(key, [batch, head, first_key + consumer * ROWS, 0], key_ready.index(0), key_tiles.index(consumer))
    for consumer in gl.static_range(2):
        row = first_key + consumer * ROWS
        tma_load(value, [batch, head, row, 0], value_ready.index(0), value_tiles.index(consumer))
    for tile in range(first, end):
        use = tile - first
        slot = use % STAGES
        first_query = tile * ROWS
        mbarrier.wait(tile_free.index(slot), ((use // STAGES) & 1) ^ 1)
        mbarrier.expect(query_ready.index(slot), query.block_type.nbytes + 2 * statistics.block_type.nbytes)
        tma_load(query, [batch, head, first_query, 0], query_ready.index(slot), query_ring.index(slot))
        tma_load(statistics, [2 * sequence, first_query], query_ready.index(slot), logsumexp_ring.index(slot))
        tma_load(statistics, [2 * sequence + 1, first_query], query_ready.index(slot), delta_ring.index(slot))
        mbarrier.expect(grad_out_ready.index(slot), grad_out.block_type.nbytes)
        tma_load(grad_out, [batch, head, first_query, 0], grad_out_ready.index(slot), grad_out_ring.index(slot))
    for consumer in gl.static_range(2):
        mbarrier.wait(results_ready.index(consumer), 0)
        row = first_key + consumer * ROWS
        grad_key_tile = _as_result(grad_query_tiles.index(consumer), grad_key.block_type.shape[3], key_tiles)
        tma_store(grad_key, [batch, head, row, 0], grad_key_tile)
        tma_store(grad_value, [batch, head, row, 0], value_tiles.index(consumer))
    store_wait(0)


@gluon.jit
def _as_result(grad_query_tile, HEAD_DIM: gl.constexpr, like):
    """A warpgroup's half tile of dQ in float32 seen as a whole tile in 16 bits: both have the same size."""
    return seen_as(grad_query_tile, like.dtype, [ROWS, HEAD_DIM], like.layout)


@gluon.jit
def _issue_scores(
    tile,
    use,
    there_is_one,
    key_tile,
    query_ring,
    query_ready,
    first_key,
    num_keys,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Begins S^T of a tile of queries, with -inf where a query does not see a key.

    The mask is what the sums start from: registers are scarcer once they are complete.
    """
    slot = use % STAGES
    mbarrier.wait(query_ready.index(slot), (use // STAGES) & 1, pred=there_is_one)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    last_key = first_key + ROWS - 1
    # Keys behind the last one end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
    masked = last_key >= num_keys
    if CAUSAL:
        masked = masked or tile * ROWS < last_key
    start = gl.zeros([ROWS, ROWS], gl.float32, layout)
    if masked:
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        keys = gl.where(keys < num_keys, keys, NOBODY_SEES)
        if CAUSAL:
            queries = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
            visible = keys[:, None] <= queries[None, :]
        else:
            visible = (keys < NOBODY_SEES)[:, None]
        start = gl.where(visible, start, float("-inf"))
    return warpgroup_mma(key_tile, query_ring.index(slot).permute([1, 0]), start, use_acc=masked, is_async=True)


@gluon.jit
def _consumer(
    tensors,
    buffers,
    barriers,
    schedule,
    shape,
    scale,
    scale_log2,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES_AHEAD: gl.constexpr,
):
    _, key, _, _, _, grad_query_sum, _, _ = tensors
    key_tiles, value_tiles, query_ring, grad_out_ring = buffers[0], buffers[1], buffers[2], buffers[3]
    logsumexp_ring, delta_ring, grad_scores_tiles, grad_query_tiles = buffers[4], buffers[5], buffers[6], buffers[7]
    key_ready, value_ready, query_ready, grad_out_ready, tile_free, grad_scores_ready, results_ready = barriers
    _, num_queries, num_keys, padded_queries = shape
    dtype: gl.constexpr = key.dtype
    HEAD_DIM: gl.constexpr = key.block_type.shape[3]
    HALF: gl.constexpr = HEAD_DIM // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, grad_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, scores_layout)
    half_zeros = gl.zeros([ROWS, HALF], gl.float32, half_layout)
    key_tile = key_tiles.index(CONSUMER)
    value_tile = value_tiles.index(CONSUMER)
    grad_query_tile = grad_query_tiles.index(CONSUMER)

    first_key, sequence, first, end = _item(schedule, num_queries, CAUSAL)
    first_key += CONSUMER * ROWS
    grad_key_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    mbarrier.wait(key_ready.index(0), 0)
    mbarrier.wait(value_ready.index(0), 0)
    if SCORES_AHEAD:
        any_tile = first < end
        scores = _issue_scores(
            first, 0, any_tile, key_tile, query_ring, query_ready, first_key, num_keys, STAGES, CAUSAL
        )
        scores = warpgroup_mma_wait(0, [scores])
    for tile in range(first, end):
        use = tile - first
        slot = use % STAGES
        parity = (use // STAGES) & 1
        if not SCORES_AHEAD:
            scores = _issue_scores(
                tile, use, True, key_tile, query_ring, query_ready, first_key, num_keys, STAGES, CAUSAL
            )
        mbarrier.wait(grad_out_ready.index(slot), parity)
        grad_weights = warpgroup_mma(
            value_tile, grad_out_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        if not SCORES_AHEAD:
            scores = warpgroup_mma_wait(1, [scores])
        # Here and below, loaded no earlier than needed, for want of registers.
        logsumexp = logsumexp_ring.index(slot).reshape([ROWS]).load(query_layout)
        weights = gl.exp2(scores * scale_log2 - logsumexp[None, :])
        left = gl.convert_layout(weights.to(dtype), left_layout)
        grad_value_sum = warpgroup_mma(left, grad_out_ring.index(slot), grad_value_sum, is_async=True)
        grad_weights = warpgroup_mma_wait(1, [grad_weights])
        delta = delta_ring.index(slot).reshape([ROWS]).load(query_layout)
        grad_scores = (weights * (grad_weights - delta[None, :])).to(dtype)

        buffer = use % 2
        grad_scores_tiles.index(2 * buffer + CONSUMER).store(grad_scores)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(grad_scores_ready.index(buffer), count=1)
        left = gl.convert_layout(grad_scores, left_layout)
        grad_key_sum = warpgroup_mma(left, query_ring.index(slot), grad_key_sum, is_async=True)
        mbarrier.wait(grad_scores_ready.index(buffer), (use // 2) & 1)
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(2 * buffer).permute([1, 0]),
            key_tiles.index(0).slice(CONSUMER * HALF, HALF, 1),
            half_zeros,
            use_acc=False,
            is_async=True,
        )
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(2 * buffer + 1).permute([1, 0]),
            key_tiles.index(1).slice(CONSUMER * HALF, HALF, 1),
            grad_query,
            is_async=True,
        )
        if SCORES_AHEAD:
            # After the last tile this multiplies what happens to lie in the ring, and nobody reads the result.
            next_tile = tile + 1
            another = next_tile < end
            scores = _issue_scores(
                next_tile, use + 1, another, key_tile, query_ring, query_ready, first_key, num_keys, STAGES, CAUSAL
            )
            grad_value_sum, grad_key_sum, grad_query = warpgroup_mma_wait(1, [grad_value_sum, grad_key_sum, grad_query])
        else:
            grad_value_sum, grad_key_sum, grad_query = warpgroup_mma_wait(0, [grad_value_sum, grad_key_sum, grad_query])
        mbarrier.arrive(tile_free.index(slot), count=1)
        # The reduction of the tile before must have read what this one overwrites.
        store_wait(0)
        thread_barrier()
        grad_query_tile.store(grad_query)
        fence_async_shared()
        thread_barrier()
        row = sequence * padded_queries + tile * ROWS
        tma_reduce_add(grad_query_sum, [row, CONSUMER * HALF], grad_query_tile)
        if SCORES_AHEAD:
            scores = warpgroup_mma_wait(0, [scores])

    # Only this warpgroup reads its values and its tile of dQ, so they make room for the results. The producer stores
    # them, because it has registers to spare for the coordinates.
    store_wait(0)
    thread_barrier()
    value_tile.store(grad_value_sum.to(dtype))
    _as_result(grad_query_tile, HEAD_DIM, key_tiles).store((grad_key_sum * scale).to(dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(results_ready.index(CONSUMER), count=1)


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "num_queries",
        "num_keys",
        "padded_queries",
    ]
)
def backward_kernel(
    query,
    key,
    value,
    grad_out,
    statistics,
    grad_query_sum,
    grad_key,
    grad_value,
    schedule,
    num_heads,
    num_queries,
    num_keys,
    padded_queries,
    scale,
    scale_log2,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES_AHEAD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """dK and dV of 128 keys of one sequence; adds their share of dQ / scale to grad_query_sum.

    All tensors are TMA descriptors: statistics (2 * sequences, padded_queries) as ``prepare_kernel`` writes them,
    grad_query_sum (sequences * padded_queries, HEAD_DIM) in float32, the others (batch, head, row, element).
    SCORES_AHEAD: S^T of the next tile is computed while dQ is on its way; takes registers that HEAD_DIM 128 lacks.
    """
    gl.static_assert(STAGES >= 2, "the scores of a tile may be computed while the tile before it is in use")
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout)
    value_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout)
    query_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout)
    grad_out_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout)
    # Two buffers of two warpgroups' tiles.
    grad_scores_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], layout)
    grad_query_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    grad_query_tiles = gl.allocate_shared_memory(gl.float32, [2, ROWS, HEAD_DIM // 2], grad_query_layout)
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
    results_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    mbarrier.init(key_ready.index(0), count=1)
    mbarrier.init(value_ready.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(query_ready.index(stage), count=1)
        mbarrier.init(grad_out_ready.index(stage), count=1)
        mbarrier.init(tile_free.index(stage), count=2)
    for consumer in gl.static_range(2):
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
        results_ready,
    )
    shape = (num_heads, num_queries, num_keys, padded_queries)
    gl.warp_specialize(
        [
            (
                _consumer,
                (tensors, buffers, barriers, schedule, shape, scale, scale_log2, FIRST, STAGES, CAUSAL, SCORES_AHEAD),
            ),
            (
                _consumer,
                (tensors, buffers, barriers, schedule, shape, scale, scale_log2, SECOND, STAGES, CAUSAL, SCORES_AHEAD),
            ),
            (_producer, (tensors, buffers, barriers, schedule, shape, STAGES, CAUSAL)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, 24],
    )
