"""FlashAttention backward for Hopper in Gluon, head dimension 256: two warpgroups share 64 keys by columns.

dK and dV of 64 keys, the fewest that a warpgroup's matrix instruction takes, would be 256 registers of each of its
threads. So both warpgroups of a program work on the same 64 keys: each computes S^T and dP^T for one half of a tile of
64 queries, writes its half of P^T and dS^T to shared memory, and multiplies the whole of them for one half of the head
dimension:

    S^T = K Q^T - L    dP^T = V dO^T - D    P^T = exp2(S^T)    for 32 queries
    dV += P^T dO                                               for 128 columns, when both have written P^T
    dS^T = P^T dP^T                                            for 32 queries
    dQ = dS K    dK += dS^T Q                                  for 128 columns, when both have written dS^T

dQ leaves the registers for the sum in memory while dK is computed.

Barriers work as in forward.py; ``weights_ready`` and ``grad_scores_ready`` count both warpgroups. P^T has two buffers:
who writes that of tile i has seen dS^T of tile i - 1 announced by both, and so knows dV of tile i - 2 complete, but not
that of tile i - 1. dS^T needs one: who writes it has seen P^T of the same tile announced, after dQ and dK of the last.

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
from cs336sys.kernels.attention.hopper.gluon import change_kernels, new_barriers, store_wait, thread_barrier, tma_store

HALF_ROWS = gl.constexpr(ROWS.value // 2)  # The queries of a tile for which one warpgroup computes scores.

Buffers = namedtuple(
    "Buffers",
    "key_tiles value_tiles query_ring grad_out_ring logsumexp_ring delta_ring weights_tiles grad_scores_tiles",
)
Barriers = namedtuple(
    "Barriers",
    "key_ready value_ready query_ready grad_out_ready query_free grad_out_free weights_ready grad_scores_ready "
    "results_ready turn",
)


@gluon.jit
def _producer(shared, turns, CONFIG: gl.constexpr):
    """Load keys and values once, then every tile of queries that sees them, and store dK and dV."""
    tensors, buffers, barriers, schedule, shape = shared
    item = tiles.read_item(schedule, gl.program_id(0), shape, ROWS, CONFIG)
    tiles.load_keys(shared, item, slot=0, TILES=1)
    change_kernels()  # What follows was written by the kernel before.
    visits = item.first_visit, item.end_visit + (CONFIG.stages if CONFIG.ordered else 0)
    tiles.load_queries(shared, turns, item, 0, visits, TILES=1, ENDS_TURNS=True, CONFIG=CONFIG)
    if not tiles.is_piece(schedule, gl.program_id(0), CONFIG):
        batch = item.key_sequence // shape.num_key_heads
        key_head = item.key_sequence % shape.num_key_heads
        mbarrier.wait(barriers.results_ready.index(0), 0)
        # Consumers left dK where the keys were, and dV where the values were.
        tma_store(tensors.grad_key, [batch, key_head, item.first_key, 0], buffers.key_tiles.index(0))
        tma_store(tensors.grad_value, [batch, key_head, item.first_key, 0], buffers.value_tiles.index(0))
        store_wait(0)


@gluon.jit
def _consumer(shared, pieces, scale, scale_log2, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute one warpgroup's half of the columns of dK and dV of the program's keys, and of their share of dQ."""
    tensors, buffers, barriers, schedule, shape = shared
    key_tiles, value_tiles, query_ring, grad_out_ring, logsumexp_ring, delta_ring, weights_tiles, _ = buffers
    key_ready, value_ready, query_ready, grad_out_ready, query_free, grad_out_free, weights_ready, _, _, turn = barriers
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    dtype: gl.constexpr = tensors.key.dtype
    HALF: gl.constexpr = HEAD_DIM // 2
    FIRST_ROW: gl.constexpr = CONSUMER * HALF_ROWS
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_ROWS, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])  # wgmma, 4 warps x 16 rows
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    half_zeros = gl.zeros([ROWS, HALF], gl.float32, grad_layout)

    first_key, key_sequence, first_tile, first, end = tiles.read_item(schedule, gl.program_id(0), shape, ROWS, CONFIG)
    query_at_key = tiles.query_at_key(first_key, shape, CONFIG)
    grad_key_sum = gl.zeros([ROWS, HALF], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HALF], gl.float32, grad_layout)
    # The sum of dQ has, for each tile of queries, the half tile of the first warpgroup, and behind it the second's.
    sequence = tiles.first_sequence(key_sequence, shape, CONFIG)
    sums = tensors.grad_query_sum + sequence.to(gl.int64) * shape.padded_queries * HEAD_DIM + CONSUMER * ROWS * HALF
    mbarrier.wait(key_ready.index(0), 0)
    mbarrier.wait(value_ready.index(0), 0)
    for visit in range(first, end):
        use = visit - first
        slot = use % STAGES
        # Always 0, but the compiler does not know: it would compute descriptors of all keys and values before the loop
        # and keep them in registers, of which there are none to spare.
        zero = use >> 30
        key_tile = key_tiles.index(zero)
        # L and D are loaded before a product is on its way: products read all that shared memory can deliver.
        mbarrier.wait(query_ready.index(slot), (use // STAGES) & 1)
        logsumexps = logsumexp_ring.index(slot).reshape([ROWS]).slice(FIRST_ROW, HALF_ROWS, 0).load(query_layout)
        first_query = tiles.tile_of(visit, first_tile, shape, CONFIG) * ROWS + FIRST_ROW
        scores = tiles.scores_start(logsumexps, scale_log2, first_query, query_at_key, shape, CONFIG)
        deltas = delta_ring.index(slot).reshape([ROWS]).slice(FIRST_ROW, HALF_ROWS, 0).load(query_layout)
        grad_weights = tiles.grad_weights_start(deltas)
        query_rows = query_ring.index(slot).slice(FIRST_ROW, HALF_ROWS, 0)
        scores = warpgroup_mma(key_tile, query_rows.permute([1, 0]), scores, is_async=True)
        mbarrier.wait(grad_out_ready.index(slot), (use // STAGES) & 1)
        grad_out_rows = grad_out_ring.index(slot).slice(FIRST_ROW, HALF_ROWS, 0)
        grad_weights = warpgroup_mma(
            value_tiles.index(zero), grad_out_rows.permute([1, 0]), grad_weights, is_async=True
        )
        scores = warpgroup_mma_wait(1, [scores])
        weights = gl.exp2(scores * scale_log2)
        weights_tile = weights_tiles.index(use % 2)
        weights_tile.slice(FIRST_ROW, HALF_ROWS, 1).store(weights.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(weights_ready.index(0), count=1)
        mbarrier.wait(weights_ready.index(0), use & 1)
        grad_out_columns = grad_out_ring.index(slot).slice(FIRST_COLUMN, HALF, 1)
        grad_value_sum = warpgroup_mma(weights_tile, grad_out_columns, grad_value_sum, is_async=True)
        grad_weights = warpgroup_mma_wait(1, [grad_weights])
        grad_scores = (weights * grad_weights).to(dtype)

        grad_scores_tile = buffers.grad_scores_tiles.index(0)
        grad_scores_tile.slice(FIRST_ROW, HALF_ROWS, 1).store(grad_scores)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(barriers.grad_scores_ready.index(0), count=1)
        mbarrier.wait(barriers.grad_scores_ready.index(0), use & 1)
        grad_query = warpgroup_mma(
            grad_scores_tile.permute([1, 0]),
            key_tile.slice(FIRST_COLUMN, HALF, 1),
            half_zeros,
            use_acc=False,
            is_async=True,
        )
        query_columns = query_ring.index(slot).slice(FIRST_COLUMN, HALF, 1)
        grad_key_sum = warpgroup_mma(grad_scores_tile, query_columns, grad_key_sum, is_async=True)
        # Products finish in the order of their issue: one outstanding means that dQ is there.
        grad_value_sum, grad_query = warpgroup_mma_wait(1, [grad_value_sum, grad_query])
        mbarrier.arrive(grad_out_free.index(slot), count=1)
        if CONFIG.ordered:
            tiles.wait_for_turn(turn, use)
        tiles.store_sums(sums + tiles.grad_query_offset(visit, first_tile, shape, CONFIG), grad_query, tiles.ADD)
        grad_key_sum = warpgroup_mma_wait(0, [grad_key_sum])
        mbarrier.arrive(query_free.index(slot), count=1)

    if tiles.is_piece(schedule, gl.program_id(0), CONFIG):
        share = tiles.pieces_of(pieces, schedule, gl.program_id(0), NUM_TILES=1, CONFIG=CONFIG)
        share += CONSUMER * ROWS * HALF
        tiles.store_sums(share, grad_key_sum * scale, tiles.WRITE)
        tiles.store_sums(share + ROWS * HEAD_DIM, grad_value_sum, tiles.WRITE)  # Behind dK of the item's 64 keys.
    else:
        # Nobody reads values any more, nor these columns of the keys: both have announced dS^T of the last tile, and dQ
        # is complete. The producer stores the results.
        value_tiles.index(0).slice(FIRST_COLUMN, HALF, 1).store(grad_value_sum.to(dtype))
        key_tiles.index(0).slice(FIRST_COLUMN, HALF, 1).store((grad_key_sum * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(barriers.results_ready.index(0), count=1)


@gluon.jit(do_not_specialize=Shape._fields)
def wide_backward_kernel(
    query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum, turns, pieces, schedule,
    num_key_heads, num_queries, num_keys, padded_queries, scale, scale_log2, group_size, window, window_tiles,
    diagonal, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute what ``backward.backward_kernel`` does, which explains the arguments, for 64 keys of one sequence."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # Swizzled by 128 bytes; 16 bits, two dimensions.
    statistics_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)  # Not swizzled; 32 bits.
    buffers = Buffers(
        key_tiles=gl.allocate_shared_memory(dtype, [1, ROWS, HEAD_DIM], layout),
        value_tiles=gl.allocate_shared_memory(dtype, [1, ROWS, HEAD_DIM], layout),
        query_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        grad_out_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        weights_tiles=gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], layout),
        grad_scores_tiles=gl.allocate_shared_memory(dtype, [1, ROWS, ROWS], layout),
        logsumexp_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
        delta_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
    )
    barriers = Barriers(  # Of each kind how many there are, and how many arrivals end a phase.
        key_ready=new_barriers(1, 1),
        value_ready=new_barriers(1, 1),
        query_ready=new_barriers(STAGES, 1),
        grad_out_ready=new_barriers(STAGES, 1),
        query_free=new_barriers(STAGES, 2),
        grad_out_free=new_barriers(STAGES, 2),
        weights_ready=new_barriers(1, 2),
        grad_scores_ready=new_barriers(1, 2),
        results_ready=new_barriers(1, 2),
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
            (_producer, (shared, turns, CONFIG)),
        ],
        [4, 1],
        [CONFIG.consumer_registers, 24],  # The fewest that a thread can have.
    )
